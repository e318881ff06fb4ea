"""The methods: one file a value of ``--sparse-method`` or ``--sparse-prefill-method``."""

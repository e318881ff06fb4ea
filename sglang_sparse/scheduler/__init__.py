"""Which tokens run, and what may be shared."""

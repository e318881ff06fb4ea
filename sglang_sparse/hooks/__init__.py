"""The border to SGLang: what is hooked, and everything that a new SGLang version changes."""

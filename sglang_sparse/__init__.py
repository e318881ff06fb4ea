"""Sparse attention for stock SGLang; see README.md."""

__version__ = "0.1.0"

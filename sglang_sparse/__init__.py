"""Sparse attention for stock SGLang; see README.md."""

__version__ = "0.2.0"

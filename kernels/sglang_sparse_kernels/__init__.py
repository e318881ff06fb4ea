"""Sparse attention kernels over a paged KV cache: plain torch references, and implementations for GPUs.

One folder per operation, each usable without SGLang; README.md lists them.
"""

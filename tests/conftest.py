"""Loaded before any test module."""

import triton_interpreter  # noqa: F401

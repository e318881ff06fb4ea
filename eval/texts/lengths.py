"""Lengths in tokens, as people write them: 4096, or 4k."""

import argparse


def length(text: str) -> int:
    """Tokens, such as "4096" or "4k" (k = 1024); an ``ArgumentTypeError`` if it is neither."""
    digits = text.strip().lower()
    digits, factor = (digits[:-1], 1024) if digits.endswith("k") else (digits, 1)
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is no length: allowed are positive integers such as 4096 or 4k")
    return int(digits) * factor


def short_length(tokens: int) -> str:
    """The shortest text that `length` reads as so many tokens."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)

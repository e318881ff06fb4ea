"""Temporary memory of an operation: rows that together need more than a limit take turns."""

# Bytes, wherever what a single row needs fits.
LIMIT = 256 << 20


def rows_at_once(batch: int, row_bytes: int, limit: int) -> int:
    """The rows whose scratch fits ``limit`` bytes, or one."""
    return max(1, min(batch, limit // row_bytes))


def most_bytes(batch: int, row_bytes: int, limit: int) -> int:
    """No less than the rows of `rows_at_once` take, whether a row has these bytes or fewer."""
    return min(batch * row_bytes, max(limit, row_bytes))

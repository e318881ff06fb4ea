"""Assert refusals by their fields; the wording of messages stands in ``tests/wording.jsonl`` alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import ANY

import pytest

from sglang_sparse.errors import SparseArgumentError


@contextmanager
def refused(
    field: str, got: object = ANY, kind: type[SparseArgumentError] = SparseArgumentError
) -> Iterator[pytest.ExceptionInfo[SparseArgumentError]]:
    """Expect an error of a kind that names a field and, if one is given, its value."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    # NaN is itself, and True is not 1.
    assert (error.field, repr(error.got)) == (field, repr(error.got if got is ANY else got)), str(error)

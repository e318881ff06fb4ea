"""What the tests of the Gluon kernel of sparse MLA decode attention share."""

from typing import Any

import torch
from mla_decode import TOLERANCE, relative_error, run_reference

from sglang_sparse_kernels.sparse_mla_decode.cases import BF16, Case

# Full and partial last blocks and tiles, a padded row, a single token, rows of one tile, of two and of several.
RAGGED = Case((150, 0, 33, 1, 640, 64, 70), 16, 16, 512, BF16, BF16, ratio=0.6, max_select=45)
SMALL = Case((200, 0, 33), 16, 16, 512, BF16, BF16, ratio=1.0)


def run(arguments: dict[str, Any], **launch: Any) -> torch.Tensor:
    """Into an output that holds NaN, with launch parameters."""
    from sglang_sparse_kernels.sparse_mla_decode import hopper

    names = ("q_nope", "q_rope", "kv_cache", "indices", "sm_scale", "kv_scale")
    assert hopper.takes(**{name: arguments[name] for name in names})
    out = torch.full_like(arguments["q_nope"], float("nan"), memory_format=torch.contiguous_format)
    return hopper.sparse_mla_decode(**arguments, out=out, config=hopper.Config(**launch))


def assert_as_the_reference(arguments: dict[str, Any], **options: Any) -> None:
    got = run(arguments, **options)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[got.dtype]
    assert got[(arguments["counts"] == 0)[:, 0]].count_nonzero() == 0

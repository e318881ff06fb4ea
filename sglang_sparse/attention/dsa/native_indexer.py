"""DSA with a native indexer: this project's selection behind SGLang's logits, and what SGLang prepares for its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.dsa.indexer import served_backend
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.methods.dsa.decode import Dsa
from sglang_sparse_kernels.index_topk.choose import select

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata


def choose(
    original: Callable[..., torch.Tensor],
    metadata: DSAIndexerMetadata,
    logits: torch.Tensor,
    topk: int,
    ks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    ke_offset: torch.Tensor | None = None,
    batch_idx_list: Sequence[int] | torch.Tensor | None = None,
    topk_indices_offset_override: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around ``DSAIndexerMetadata.topk_transform``: choose the best, ties to the lowest position.

    Args:
        original: SGLang's function, for servers without the method.
        logits: ``[queries, columns]`` float32; may be overwritten.
        topk: tokens that a query attends to at most.
        ks: ``[queries]`` int32, the column of each query's first token; None: all begin in the first.
        cu_seqlens_q: not needed: each query's row is known otherwise.
        ke_offset: ``[queries]`` int32, tokens that each query sees; those of the whole pass if not given.
        batch_idx_list: row of each query, where these are some of the queries of a pass.
        topk_indices_offset_override: ``[queries]``, likewise what the tokens are numbered from.

    Returns:
        ``[queries, topk]`` int32, in ascending order of position, then -1: slots of the KV pool; numbers in the copy of
        the KV where SGLang makes one; or positions within each row where SGLang looks them up itself.
    """
    backend = served_backend()
    if backend is None:
        some = {"batch_idx_list": batch_idx_list, "topk_indices_offset_override": topk_indices_offset_override}
        return original(metadata, logits, topk, ks, cu_seqlens_q, ke_offset, **some)
    batch = metadata.attn_metadata
    lengths = (metadata.get_seqlens_expanded() if ke_offset is None else ke_offset).int()
    first = None if ks is None else ks.int()
    if not backend.dense.use_fused_topk:
        return select(logits, lengths, topk, first)
    rows, offsets = batch.token_to_batch_idx, batch.topk_indices_offset
    if batch_idx_list is not None:
        rows = torch.as_tensor(batch_idx_list, device=logits.device)
    if topk_indices_offset_override is not None:
        offsets = topk_indices_offset_override
    rows, offsets = (tensor if tensor is None else tensor.int() for tensor in (rows, offsets))
    return select(logits, lengths, topk, first, (batch.real_page_table, rows, offsets))


def schedule(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """After ``resolve_paged_mqa_logits_metadata_fn``: what it returns makes nothing where SGLang's logits are not made.

    Args:
        original: DeepGEMM's function.
    """

    def metadata(lengths: torch.Tensor, *args: object) -> torch.Tensor:
        method = _method()
        if method is None or method.native("indexer"):
            return original(lengths, *args)
        return torch.zeros(1, dtype=torch.int32, device=lengths.device)

    return metadata


def plan(original: Callable[..., torch.Tensor | None], dense: object, lengths: torch.Tensor) -> torch.Tensor | None:
    """Around ``_build_topk_v2_plan``: none where SGLang's selection does not run; it is then not refreshed either.

    Args:
        original: SGLang's function.
        dense: its backend.
        lengths: ``[rows]`` int32.
    """
    return original(dense, lengths) if _method() is None else None


def _method() -> Dsa | None:
    """The method of this process's server, whose selection is never SGLang's."""
    from sglang.srt.runtime_context import get_server_args

    settings = hooked_settings_of(get_server_args())
    return settings.method if settings is not None and isinstance(settings.method, Dsa) else None

"""Decode CUDA graphs for every batch size, a dense and a sparse one, as SGLang's attention graph variants.

SGLang captures a graph for each label and asks which of them a batch replays. So a batch below the crossover replays
the dense graph and pays nothing for sparsity but the refresh of the summaries. What the dense backend allocates for a
size serves both. Where the drafts of a round share a selection, a third graph is that of drafts behind the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang_sparse.config.settings import hooked_settings_of

if TYPE_CHECKING:
    from sglang_sparse.attention.backend import SparseAttentionBackend
    from sglang_sparse.attention.protocols import ForwardBatch
    from sglang_sparse.config.settings import Settings

# Not "dense": SGLang's DSA indexer takes that label for its own variant, which scores nothing.
DENSE, SPARSE, LATER_DRAFT = "dense decode", "sparse decode", "later draft"


class GraphVariants:
    """SGLang's protocol ``AttentionGraphVariants``, for one sparse backend.

    Args:
        backend: decides which rows run sparse.
        settings: with ``dense_fallback: never`` and with deterministic inference there is no dense graph, without a
            decode method no other.

    Attributes:
        capture_labels: the graphs of each size, in the order of their capture.
    """

    def __init__(self, backend: SparseAttentionBackend, settings: Settings):
        self._backend = backend
        sparse = (SPARSE, LATER_DRAFT) if backend.may_share else (SPARSE,)
        always = settings.config.dense_fallback == "never" or settings.decode.deterministic
        decode = sparse if always else (DENSE, *sparse)
        self.capture_labels = decode if settings.name else (DENSE,)

    def select(self, forward_batch: ForwardBatch) -> str:
        """Name the graph that a batch replays."""
        if SPARSE not in self.capture_labels:
            # A verification may come without lengths on the host.
            return DENSE
        plan = self._backend.plan(forward_batch.seq_lens_cpu)
        if self._backend.reuses(plan):
            return LATER_DRAFT
        return SPARSE if plan.sparse else DENSE


# By the identity of the model's config, which is all that SGLang hands on: a draft model has its own.
_OFFERED: dict[int, GraphVariants] = {}


def offer(model: object, variants: GraphVariants) -> None:
    """Offer variants for the decode graphs of a model, a transformers config."""
    _OFFERED[id(model)] = variants


@contextmanager
def withheld(model: object) -> Iterator[None]:
    """Offer no variants within the block: what it records is dense."""
    variants = _OFFERED.pop(id(model), None)
    try:
        yield
    finally:
        if variants is not None:
            _OFFERED[id(model)] = variants


def add_variants(found: object, model: object) -> object:
    """After ``create_attention_graph_variants``: return those that were offered for this model, if any."""
    return _OFFERED.get(id(model), found)


def no_post_capture_sizing(original: Callable[[object], bool], server_args: object) -> bool:
    """Around ``post_capture_kv_sizing_planned``: never with sparsity, whose buffers are sized with the KV pool."""
    return original(server_args) if hooked_settings_of(server_args) is None else False

"""A decode method of this project in process: the pages that it selects, as a server would have it select them.

The one module of the evaluation that imports the method itself: to judge a second implementation of a selection would
say nothing about the first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eval.lab.selection.recall_attention import Captured, Selection
from eval.live.counters import EvaluationError
from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.plan import plan_decode, usual_selection
from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import Settings, SparseArgumentError, build
from sglang_sparse.methods.aux_buffers import AuxBuffers, page_ends
from sglang_sparse.methods.base import ModelShape, SparseIndices
from sglang_sparse.methods.robsa.decode import Robsa
from sglang_sparse.methods.views import LatentQuery
from sglang_sparse.tools.calibration.capture import AttentionArch, ModelFacts


def method_settings(method: str, config: str | None) -> Settings:
    """A method and its config, with the limits off below which a server runs dense: selections are judged anywhere.

    Args:
        method: as for ``--sparse-method``.
        config: as for ``--sparse-config``.

    Raises:
        EvaluationError: as the server refuses them.
    """
    try:
        settings = build(method, {**read_config(config), "dense_fallback": "never"})
    except SparseArgumentError as error:
        raise EvaluationError(str(error)) from error
    if len(settings.decode.methods) > 1:
        raise EvaluationError("--sparse-config: layers has rules of several methods or fields; recall is of one")
    return settings


def require_served(settings: Settings, model: ModelFacts) -> tuple[int, ...]:
    """Refuse a model that the method refuses, or whose attention this command does not know.

    What a server refuses beyond that shows when attention is captured, see
    `eval.lab.selection.recall_attention.capture`.

    Args:
        settings: of `method_settings`.
        model: of `eval.lab.selection.recall_attention.model_facts`.

    Returns:
        The layers that run sparse.

    Raises:
        EvaluationError: says why.
    """
    try:
        reason = settings.method.refuse(model)
    except AttributeError as error:
        raise EvaluationError(f"{settings.name} judges a model by what only a server knows: {error}") from error
    if reason is None and model.attention_arch is AttentionArch.MLA:
        reason = _unknown_latents(settings)
    if reason:
        architecture = (model.hf_config.architectures or ["unknown"])[0]
        raise EvaluationError(f"--sparse-method {settings.name} does not fit {architecture}: {reason}")
    try:
        return settings.method.sparse_layers(model.num_hidden_layers)
    except ValueError as error:
        raise EvaluationError(f"--sparse-config of {settings.name}: {error}") from error


def _unknown_latents(settings: Settings) -> str | None:
    """Why the selection of an MLA model cannot be judged: of its keys transformers shows the rotary part alone."""
    if not isinstance(settings.method, Robsa):
        return "of MLA models recall is measured for robsa alone"
    if settings.method.config.insensitive == "full_score":
        return 'it scores by latent keys, which transformers shows expanded; allowed: {"insensitive": "dense"}'
    return None


def selected_share(settings: Settings, tokens: int) -> float:
    """The share of its pages that a row of so many tokens attends to."""
    (plan,) = plan_decode(settings.decode, torch.tensor([tokens])).groups
    return float(plan.n_select / plan.n_pages)


def select(settings: Settings, captured: Captured, model: ModelFacts) -> Selection:
    """What a method attends to at each of the captured queries, one decode step after the other.

    The block after the dummy one holds the first tokens and so on. As on a server, the method's buffers are refreshed
    for all pages by the prefill of the tokens before the first query, and then at the end of each step for the page
    that it writes to; at its begin too where the method asks for that.

    Args:
        settings: of `method_settings`.
        captured: of a sparse layer.
        model: that it is of. Of MLA all heads share a selection, as they share the keys; the latent part is zeros.

    Raises:
        EvaluationError: the method names a block that the row does not hold, or one twice, or a key is out of the range
            of its buffers.
    """
    method, layer, page = settings.method, captured.layer, settings.config.page_size
    rows = _MlaRows(captured, page, model) if model.rope_dim else _Rows(captured, page)
    queries, tokens, device = captured.query.shape[0], captured.key.shape[0], captured.key.device
    unit = block = method.block_size
    blocks = rows.pages * (page // block)
    shape = ModelShape(
        model.num_hidden_layers,
        captured.query.shape[1],
        rows.heads,
        rows.cache.shape[2],
        rows.cache.dtype,
        model.rope_dim,
    )
    pools = AuxBuffers(method.aux_specs(shape), (layer,), rows.pages + 1, page, str(device))
    stats = torch.zeros(4, dtype=torch.int64, device=device)
    view = allocate_view(1, rows.heads, blocks, usual_selection(method, blocks), block, stats)
    first = page // block
    view.page_table[0, :blocks] = torch.arange(first, first + blocks)
    prefilled = torch.arange(page, page + tokens - queries, device=device)
    pools.refresh({layer: rows.cache}, page_ends(prefilled, page))
    kept = torch.zeros(queries, rows.heads, tokens, dtype=torch.bool, device=device)
    counts = torch.zeros(queries, rows.heads, dtype=torch.int64, device=device)
    for row, position in enumerate(captured.positions.tolist()):
        written = torch.tensor([page + position], device=device)
        pools.refresh({layer: rows.cache}, written, before_select=True)
        (plan,) = plan_decode(settings.decode, torch.tensor([position + 1])).groups
        view.n_pages.copy_(plan.n_pages)
        view.n_select.copy_(plan.n_select)
        view.row_thresholds.copy_(plan.row_thresholds)
        found = method.select(
            replace(view, last_slots=written, logit_scale=captured.scaling), layer, rows.query(row, written), pools
        )
        pools.refresh({layer: rows.cache}, written)
        unit = block if found.unit == "page" else 1
        units = _units(found, page // unit, -(-(position + 1) // unit), blocks * block // unit)
        kept[row] = units.repeat_interleave(unit, 1)[:, :tokens]
        kept[row, :, position + 1 :] = False
        counts[row] = found.counts[0]
    if int(pools.overflow):
        raise EvaluationError(
            f"{int(pools.overflow)} values of layer {layer} are out of the range of the method's buffers, which spoils "
            f"the selection; this model needs {' and '.join(pools.remedies)}"
        )
    return Selection(kept, counts, unit)


class _Rows:
    """A KV pool with what was captured, ``[slots, kv_heads, head_dim]``, behind a dummy page; its queries."""

    def __init__(self, captured: Captured, page: int) -> None:
        self._captured = captured
        self.pages = -(-captured.key.shape[0] // page)
        keys = self.keys()
        self.heads = keys.shape[1]
        self.cache = keys.new_zeros((self.pages + 1) * page, *keys.shape[1:])
        self.cache[page : page + keys.shape[0]] = keys

    def keys(self) -> torch.Tensor:
        """As they are in the pool."""
        return self._captured.key

    def query(self, row: int, written: torch.Tensor) -> Any:
        """What a method is asked with at the query of a row, whose token has the slot ``written``."""
        return self._captured.query[row : row + 1].contiguous()


class _MlaRows(_Rows):
    """The same of MLA: one key for all heads, latent and rotary."""

    def __init__(self, captured: Captured, page: int, model: ModelFacts) -> None:
        self._latent, self._rope = model.hf_text_config.kv_lora_rank, model.rope_dim
        super().__init__(captured, page)

    def keys(self) -> torch.Tensor:
        """Zeros and the rotary key, which is the same in all heads."""
        return torch.nn.functional.pad(self._captured.key[:, :1, -self._rope :], (self._latent, 0))

    def query(self, row: int, written: torch.Tensor) -> LatentQuery:
        """See the other."""
        rope = self._captured.query[row : row + 1, :, -self._rope :].contiguous()
        nope = rope.new_zeros(1, rope.shape[1], self._latent)
        return LatentQuery(nope, rope, self.cache[:, 0], written, self._captured.scaling, 1.0, lambda mean: mean)


def _units(found: SparseIndices, first: int, held: int, size: int) -> torch.Tensor:
    """Mask ``[kv_heads, size]`` of the units (pages or tokens) that the only row attends to.

    Args:
        found: the method's answer.
        first: id of the row's first unit.
        held: how many units the row holds.
        size: units of the longest row.
    """
    ids, counts = found.indices[0].long(), found.counts[0]
    real = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
    inside = (ids >= first) & (ids < first + held) & real
    chosen = torch.zeros(ids.shape[0], size + 1, dtype=torch.bool, device=ids.device)
    # What is not inside goes to a place of its own.
    chosen = chosen.scatter(1, torch.where(inside, ids - first, size), True)[:, :size]
    if not torch.equal(chosen.sum(1), counts.long()):
        raise EvaluationError(f"the method selects a {found.unit} twice, or one that the row does not hold")
    return chosen

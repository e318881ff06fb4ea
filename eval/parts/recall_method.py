"""A decode method of this project in process: the pages that it selects, as a server would have it select them.

The one module of the evaluation that imports the method itself: to judge a second implementation of a selection would
say nothing about the first.
"""

from __future__ import annotations

import torch

from eval.live.counters import EvaluationError
from eval.parts.recall_attention import Captured, Selection
from sglang_sparse.calibration.capture import AttentionArch, ModelFacts
from sglang_sparse.config import Settings, SparseArgumentError, build, read_config
from sglang_sparse.indices import SparseIndices
from sglang_sparse.layers import parse_layers
from sglang_sparse.method import ModelShape
from sglang_sparse.plan import plan_decode, usual_selection
from sglang_sparse.pools import AuxPools, page_ends
from sglang_sparse.view import allocate_view


def method_settings(method: str, config: str | None) -> Settings:
    """A method and its config, with the limits off below which a server runs dense: selections are judged anywhere.

    Args:
        method: as for ``--sparse-method``.
        config: as for ``--sparse-config``.

    Raises:
        EvaluationError: as the server refuses them.
    """
    try:
        return build(method, {**read_config(config), "dense_fallback": "never"})
    except SparseArgumentError as error:
        raise EvaluationError(str(error)) from error


def require_served(settings: Settings, model: ModelFacts) -> tuple[int, ...]:
    """Refuse a model that the method refuses, or whose attention this command does not know.

    What a server refuses beyond that shows when attention is captured, see `eval.parts.recall_attention.capture`.

    Args:
        settings: of `method_settings`.
        model: of `eval.parts.recall_attention.model_facts`.

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
        reason = "recall is measured for MHA and GQA models only; this one uses MLA"
    if reason:
        architecture = (model.hf_config.architectures or ["unknown"])[0]
        raise EvaluationError(f"--sparse-method {settings.name} does not fit {architecture}: {reason}")
    try:
        return parse_layers(settings.config.layers, model.num_hidden_layers)
    except ValueError as error:
        raise EvaluationError(f"--sparse-config of {settings.name}: {error}") from error


def selected_share(settings: Settings, tokens: int) -> float:
    """The share of its pages that a row of so many tokens attends to."""
    plan = plan_decode(settings.method, torch.tensor([tokens]))
    return float(plan.n_select / plan.n_pages)


def select(settings: Settings, captured: Captured, layers: int) -> Selection:
    """What a method attends to at each of the captured queries, one decode step after the other.

    The page after the dummy page holds the first tokens and so on. As on a server, the method's buffers are refreshed
    for all pages by the prefill of the tokens before the first query, and then at the end of each step for the page
    that it writes to; at its begin too where the method asks for that.

    Args:
        settings: of `method_settings`.
        captured: of a sparse layer.
        layers: how many the model has.

    Raises:
        EvaluationError: the method names a page that the row does not hold, or one twice, or a key is out of the range
            of its buffers.
    """
    method, page = settings.method, settings.config.page_size
    query, key, layer, device = captured.query, captured.key, captured.layer, captured.key.device
    (queries, q_heads, head_dim), (tokens, kv_heads, _) = query.shape, key.shape
    pages = -(-tokens // page)
    cache = key.new_zeros((pages + 1) * page, kv_heads, head_dim)
    cache[page : page + tokens] = key
    shape = ModelShape(layers, q_heads, kv_heads, head_dim, key.dtype)
    pools = AuxPools(method.aux_specs(shape), (layer,), pages + 1, page, str(device))
    stats = torch.zeros(4, dtype=torch.int64, device=device)
    view = allocate_view(1, kv_heads, pages, usual_selection(method, pages), page, stats)
    view.page_table[0, :pages] = torch.arange(1, pages + 1)
    prefilled = torch.arange(page, page + tokens - queries, device=device)
    pools.refresh({layer: cache}, page_ends(prefilled, page))
    kept = torch.zeros(queries, kv_heads, tokens, dtype=torch.bool, device=device)
    counts = torch.zeros(queries, kv_heads, dtype=torch.int64, device=device)
    unit = page
    for row, position in enumerate(captured.positions.tolist()):
        written = torch.tensor([page + position], device=device)
        pools.refresh({layer: cache}, written, before_select=True)
        plan = plan_decode(method, torch.tensor([position + 1]))
        view.n_pages.copy_(plan.n_pages)
        view.n_select.copy_(plan.n_select)
        found = method.select(view, layer, query[row : row + 1].contiguous(), pools)
        pools.refresh({layer: cache}, written)
        unit = page if found.unit == "page" else 1
        units = _units(found, page // unit, -(-(position + 1) // unit), (pages * page) // unit)
        kept[row] = units.repeat_interleave(unit, 1)[:, :tokens]
        kept[row, :, position + 1 :] = False
        counts[row] = found.counts[0]
    if int(pools.overflow):
        raise EvaluationError(
            f"{int(pools.overflow)} values of layer {layer} are out of the range of the method's buffers: a server "
            'would end here; this model needs {"summary_dtype": "bf16"}'
        )
    return Selection(kept, counts, unit)


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

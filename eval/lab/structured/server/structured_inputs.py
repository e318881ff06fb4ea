r"""For benchmarks only: a server whose every layer attends with generated queries, keys and values.

With this folder on ``PYTHONPATH``, and started from the repository's root, an SGLang server that has the key
``structured_inputs`` in SGLang's own flag ``--json-model-override-args`` replaces q, k and v of every attention layer
by the tensors of `eval.lab.structured.generator`, just before they reach the attention backend::

    PYTHONPATH=eval/lab/structured/server python -m sglang.launch_server --model-path MODEL \
        --json-model-override-args '{"structured_inputs": {"seed": 0, "recipe": {"sink": 0.4, "band": 0.2}}}'

The dense backend and a sparse one that wraps it are treated alike: what is replaced is what reaches the outermost
backend, so that summaries, selection and attention, and the KV pool, all get the same tensors. A row gets those of its
position, in every layer and request the same, on every tensor-parallel rank too. The model still computes its own, and
what it answers means nothing. Without the key nothing happens. `/server_info` has what is replaced under
``internal_states[0].structured_inputs``: a benchmark must look there, because SGLang ignores an unknown key, and only
logs a plugin that it cannot load.

The tensors are made once, for as many positions as a request can have (``--context-length``), outside of SGLang's
memory sizing. Once a pass three gathers fetch its rows, by the positions on the device, so that CUDA graphs can hold
them; layers after the first add nothing but, where the model itself wrote KV, a second write.

For MLA the absorbed form gets everything. Where prefill expands the latents to heads, attention keeps the model's own
tensors, and only the latents in the pool are replaced: decode is what can be measured there.

With ``"prefill": "skip"`` prefill writes KV and leaves out attention, and MLPs that are told what batch they get. KV is
generated anyway, so decode reads the same, minutes earlier at long contexts; the time to the first token means nothing
then, and rectification neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "structured_inputs"
logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    setup = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.build_attention_backends"
    HookRegistry.register(setup, replace_inputs, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", report, HookType.AFTER)


def replace_inputs(backends: Any, *, model_runner: Any) -> None:
    """After ``build_attention_backends``, when all other wrappers are in place.

    Raises:
        RuntimeError: the key asks for what cannot be done; names what, and what is allowed.
    """
    given = getattr(model_runner.model_config.hf_config, NAME, None)
    if given is None:
        return
    from sglang.srt.layers.radix_attention import RadixAttention

    refuse_arguments(model_runner.server_args, isinstance(given, dict) and given.get("prefill") == "skip")
    layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
    install(backends.attn_backend, make_inputs(given, layers, model_runner), model_runner.model)


def install(backend: Any, inputs: Inputs, model: Any) -> None:
    """Replace what the backend's ``forward`` gets from now on, and skip prefill in it and in the model if asked to."""
    # A wrapping backend passes plain assignments on to the one that it wraps.
    object.__setattr__(backend, "forward", Overwrite(backend.forward, backend.token_to_kv_pool, inputs))
    object.__setattr__(backend, NAME, inputs.facts)
    from eval.lab.structured.prefill import SKIP, skip

    if inputs.facts["prefill"] == SKIP:
        skip(backend, model)


def report(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """After ``Scheduler.get_internal_state``: say what is replaced."""
    facts = getattr(scheduler.tp_worker.model_runner.attn_backend, NAME, None)
    if facts is not None:
        result.internal_state[NAME] = facts


def refuse_arguments(server_args: Any, skips: bool = False) -> None:
    """Refuse what runs attention elsewhere than in the one backend, needs more than positions, or decodes in prefill.

    Raises:
        RuntimeError: names the flags.
    """
    flags = ("speculative_algorithm", "enable_two_batch_overlap", "enable_pdmux", "enable_torch_compile")
    flags += ("enable_mixed_chunk",) if skips else ()
    found = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(server_args, flag)]
    if found:
        raise RuntimeError(f"{NAME} cannot replace what attention gets under {', '.join(found)}: leave that out")


@dataclass(frozen=True)
class Shape:
    """The shape that all attention layers share.

    Attributes:
        q_heads: query heads of this rank.
        kv_heads: KV heads of this rank.
        head_dim: of queries and keys; for MLA latent and RoPE dimensions.
        v_head_dim: of values; for MLA the latent dimensions.
        scale: of the logits.
        mla: whether it is multi-head latent attention in its absorbed form.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    mla: bool


def shape_of(layers: Iterable[Any], latent: int | None) -> Shape:
    """The one shape of a model's attention layers.

    Args:
        layers: its ``RadixAttention`` modules.
        latent: dimensions of the latent of an MLA model, whose layers in expanded form do not count.

    Raises:
        RuntimeError: there is none, or a layer attends otherwise than causally to all tokens.
    """
    shapes = set()
    for layer in layers:
        if latent and (layer.tp_k_head_num != 1 or layer.v_head_dim != latent):
            continue
        reasons = {
            "cross attention": layer.is_cross_attention,
            f"attention type {layer.attn_type.value}": layer.attn_type.value != "decoder",
            "a sliding window": layer.sliding_window_size > -1,
            "a soft cap on the logits": bool(layer.logit_cap),
        }
        if any(reasons.values()):
            found = " and ".join(reason for reason, present in reasons.items() if present)
            raise RuntimeError(
                f"{NAME}: layer {layer.layer_id} uses {found}, allowed is causal attention to all tokens"
            )
        sizes = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        shapes.add(Shape(*sizes, scale=layer.scaling, mla=bool(latent)))
    if len(shapes) != 1:
        raise RuntimeError(f"{NAME} needs attention layers of one shape, got {sorted(map(str, shapes)) or 'none'}")
    return shapes.pop()


@dataclass(frozen=True)
class Inputs:
    """The generated tensors, a row for each position.

    Attributes:
        q: ``[positions, q_heads, head_dim]``.
        k: ``[positions, kv_heads, head_dim]``.
        v: ``[positions, kv_heads, v_head_dim]``, for MLA a view of ``k``.
        shape: of the layers that they are for.
        facts: what `/server_info` says about them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    shape: Shape
    facts: dict[str, Any]


def make_inputs(given: Any, layers: Iterable[Any], model_runner: Any) -> Inputs:
    """Make the tensors of a server.

    Args:
        given: the value of the key: ``seed``, ``recipe`` and ``prefill``, all optional.
        layers: the model's ``RadixAttention`` modules.
        model_runner: SGLang's ``ModelRunner``.

    Raises:
        RuntimeError: the value is wrong, the model has no structure like this, or the tensors do not fit.
    """
    import torch

    from eval.lab.structured.generator import make_mla, make_qkv, read_recipe
    from eval.lab.structured.prefill import read_given

    config = model_runner.model_config
    shape = shape_of(layers, config.kv_lora_rank if config.attention_arch.name == "MLA" else None)
    positions = model_runner.req_to_token_pool.req_to_token.shape[1]
    made = {"device": model_runner.device, "dtype": model_runner.dtype, "scale": shape.scale}
    try:
        asked = read_given(given)
        recipe, made["seed"] = read_recipe(asked["recipe"]), asked["seed"]
        if shape.mla:
            rope = shape.head_dim - shape.v_head_dim
            q, k = make_mla(positions, shape.q_heads, recipe, latent=shape.v_head_dim, rope=rope, **made)
            v = k[..., : shape.v_head_dim]
        else:
            sizes = (positions, shape.q_heads, shape.kv_heads, shape.head_dim)
            q, k, v = make_qkv(*sizes, recipe, v_head_dim=shape.v_head_dim, **made)
    except ValueError as error:
        raise RuntimeError(f"{NAME}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"{NAME}: tensors for {positions} positions do not fit beside the KV pool; lower --mem-fraction-static or "
            f"--context-length: {error}"
        ) from error
    size = (q.nbytes + k.nbytes + (0 if shape.mla else v.nbytes)) / 2**20
    logger.warning("%s: every layer attends with generated tensors, %.0f MiB for %d positions", NAME, size, positions)
    facts = {**asked, "recipe": recipe.model_dump(), "positions": positions, "shape": asdict(shape)}
    return Inputs(q, k, v, shape, facts)


@dataclass(frozen=True)
class Rows:
    """The tensors of one forward pass, ``[tokens, heads, dims]``.

    Attributes:
        q: queries, without the RoPE part if that stands beside them.
        k: keys, likewise.
        v: values.
        rope: what goes by the names ``q_rope`` and ``k_rope``, if anything does.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rope: dict[str, torch.Tensor]


class Overwrite:
    """``AttentionBackend.forward`` with q, k and v of a pass replaced.

    Args:
        forward: the backend's own.
        pool: SGLang's KV pool.
        inputs: what to replace them with.
    """

    def __init__(self, forward: Callable[..., Any], pool: Any, inputs: Inputs):
        self._forward = forward
        self._pool = pool
        self._inputs = inputs
        self._layer = -1
        self._rows: Rows | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attend as the backend does, with other tensors; arguments and result are the backend's.

        Raises:
            RuntimeError: the layer is not of the one shape, or gets more than q, k and v.
        """
        if forward_batch.forward_mode.is_idle():
            return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        shape = self._inputs.shape
        more = {name for name, value in kwargs.items() if value is not None}
        if more and not (shape.mla and more == {"q_rope", "k_rope"}):
            raise RuntimeError(f"{NAME} cannot replace what layer {layer.layer_id} gets as {', '.join(sorted(more))}")
        positions = forward_batch.positions[: q.shape[0]]
        if shape.mla and layer.qk_head_dim != shape.head_dim:
            latents = self._inputs.k.index_select(0, positions)
            self._pool.set_kv_buffer(layer, forward_batch.out_cache_loc[: q.shape[0]], latents, None)
            return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
        if k is None or heads != (shape.q_heads, shape.kv_heads, shape.head_dim):
            raise RuntimeError(f"{NAME}: layer {layer.layer_id} has no keys of its own or other heads than {shape}")
        rows = self._rows_of(positions, layer.layer_id, bool(more))
        kwargs |= rows.rope
        # Saved even where the model has written keys of its own already.
        return self._forward(rows.q.view(q.shape), rows.k, rows.v, layer, forward_batch, True, **kwargs)

    def _rows_of(self, positions: torch.Tensor, layer_id: int, split: bool) -> Rows:
        """Return the inputs of all layers of a pass, gathered when the first of them asks."""
        # Layers come in ascending order, so that one that is not above the last begins another pass.
        if self._rows is None or layer_id <= self._layer:
            inputs, latent = self._inputs, self._inputs.shape.v_head_dim
            q, k = inputs.q.index_select(0, positions), inputs.k.index_select(0, positions)
            if split:
                rope = {"q_rope": q[..., latent:].contiguous(), "k_rope": k[..., latent:].contiguous()}
                k = k[..., :latent].contiguous()
                self._rows = Rows(q[..., :latent].contiguous(), k, k, rope)
            else:
                v = k[..., :latent] if inputs.shape.mla else inputs.v.index_select(0, positions)
                self._rows = Rows(q, k, v, {})
        self._layer = layer_id
        return self._rows

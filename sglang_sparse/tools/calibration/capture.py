"""The attention of a checkpoint, one layer at a time, in this process and without a server."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_sparse import __version__
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.layers import BOUNDED, parse_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The name under which transformers finds the attention function of this module.
IMPLEMENTATION = "captured"
PACKAGES = ("torch", "transformers")
# What transformers tells attention functions about a sliding window and a soft cap of the logits, and about sinks.
OTHER_ATTENTION, SINKS = ("sliding_window", "softcap"), "s_aux"


class CalibrationError(SparseArgumentError):
    """A measurement is impossible; the message is meant for the user."""

    form = "{field} {got}: allowed is {allowed}"


@dataclass(frozen=True)
class Captured:
    """The inputs of one layer's attention, after RoPE.

    Attributes:
        layer: its id.
        query: ``[queries, q_heads, head_dim]`` of the last positions.
        key: ``[tokens, kv_heads, head_dim]`` of all positions.
        value: ``[tokens, kv_heads, value_dim]``.
        scaling: factor of q·k.
        sinks: ``[q_heads]`` in the model's dtype, the logits of attention sinks in natural units, or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    sinks: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """``[queries]`` int64, the position of each query; it sees the keys up to its own."""
        tokens = self.key.shape[0]
        return torch.arange(tokens - self.query.shape[0], tokens, device=self.key.device)


class AttentionArch(Enum):
    """The members of SGLang's enumeration of the same name that are needed here."""

    MHA = "MHA"
    MLA = "MLA"


class ModelFacts:
    """The fields of SGLang's ``ModelConfig`` that methods read, as far as the checkpoint itself has them.

    SGLang is not imported for it: that would take longer than most measurements.

    Args:
        config: the checkpoint's, as transformers reads it.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        text = config.get_text_config()
        self.hf_config, self.hf_text_config = config, text
        latent = getattr(text, "kv_lora_rank", None) is not None
        self.attention_arch = AttentionArch.MLA if latent else AttentionArch.MHA
        self.num_hidden_layers: int = text.num_hidden_layers
        self.context_len: int = text.max_position_embeddings
        self.rope_dim: int = getattr(text, "qk_rope_head_dim", None) or 0
        # Gemma 4 has wider heads in the layers of full attention.
        wide = getattr(text, "global_head_dim", None) or getattr(text, "head_dim", None)
        self.head_dim: int = wide or text.hidden_size // text.num_attention_heads

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return (self.hf_config.architectures or ["unknown"])[0]

    def layers(self, spec: str | list[int]) -> tuple[int, ...]:
        """The layers that a ``layers`` field names; "all" are those that attend to all earlier tokens.

        Raises:
            SparseArgumentError: it names others, or what is no layer of the model.
        """
        named, shown = parse_layers(spec, self.num_hidden_layers), shown_layers(self.hf_config)
        others = [layer for layer in named if layer not in shown]
        if others and spec != "all":
            message, allowed = f"layer {others[0]} does not attend to all earlier tokens", f'"all", or some of {shown}'
            raise SparseArgumentError(message, field="layers", got=spec, allowed=allowed)
        return tuple(layer for layer in named if layer in shown)


def shown_layers(config: PretrainedConfig) -> list[int]:
    """The layers of a checkpoint that `capture` shows: all but those that attend within a window or a chunk; where none
    is left, all.
    """
    text = config.get_text_config()
    layers = range(text.num_hidden_layers)
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    return [layer for layer in layers if kinds[layer] not in BOUNDED] or [*layers]


@contextmanager
def loading(path: str, what: str = "") -> Iterator[None]:
    """Make what transformers raises while it loads something of a checkpoint a CalibrationError: see `load_model`."""
    try:
        yield
    # The checkpoint's own code, and the libraries that it needs, may raise anything.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" .")
        hint = "; --trust-remote-code allows it to run" if "custom code" in reason else ""
        raise CalibrationError(f"--model-path {path}: {what}{reason}{hint}", field="--model-path", got=path) from error


def model_facts(path: str, trust_remote_code: bool = False, revision: str | None = None) -> ModelFacts:
    """The facts of the checkpoint at `path`; see `load_model`.

    Raises:
        CalibrationError: there is none.
    """
    with loading(path):
        config_class, _, options = _loader(path, trust_remote_code, revision)
        return ModelFacts(config_class.from_pretrained(path, **options))


def _loader(path: str, trust_remote_code: bool, revision: str | None) -> tuple[Any, Any, dict[str, object]]:
    """Classes of transformers that read a checkpoint's config and its model, and what to give them.

    Its own code goes before that of a checkpoint, which as a rule does not let attention be captured.
    """
    import transformers

    config, _ = transformers.PretrainedConfig.get_config_dict(path, revision=revision)
    options: dict[str, object] = {"revision": revision}
    own = getattr(transformers, (config.get("architectures") or [""])[0], None)
    # Kimi-K2 gives DeepSeek-V3's architecture another type, which transformers does not know.
    if own is not None and own.config_class.model_type != config.get("model_type"):
        return own.config_class, own, options
    options["trust_remote_code"] = trust_remote_code and own is None
    return transformers.AutoConfig, transformers.AutoModelForCausalLM, options


def device_and_dtype() -> tuple[str, torch.dtype]:
    """The device and the element type that a checkpoint runs with."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def versions() -> dict[str, str]:
    """Those of the packages that what is measured depends on."""
    return {"sglang-sparse": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES}


def load_model(
    path: str, device: str, dtype: torch.dtype, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """A causal language model of transformers whose attention can be captured.

    A single device holds all of it, unless accelerate is installed, which spreads it over all GPUs and, if these cannot
    hold it, CPU memory.

    Args:
        path: folder or name of the checkpoint.
        device: "cuda" or "cpu".
        dtype: of what is not quantized.
        trust_remote_code: whether Python code of the checkpoint may run where transformers has none for the model;
            where it must and may not that is an error, and no question on stdin.
        revision: of a name.

    Raises:
        CalibrationError: it cannot be loaded, or computes attention in its own way.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    spread = device == "cuda" and importlib.util.find_spec("accelerate") is not None
    with loading(path):
        config_class, model_class, options = _loader(path, trust_remote_code, revision)
        model = model_class.from_pretrained(
            path,
            config=config_class.from_pretrained(path, **options),
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            device_map="auto" if spread else None,
            **options,
        )
    _complete_scale(model)
    # A model spread by accelerate must not be moved.
    return (model if spread else model.to(device)).eval()


def _complete_scale(model: Any) -> None:
    """Multiply by YaRN's mscale², which DeepSeek-V2 lacks in transformers, unlike V3 there, and unlike it in SGLang."""
    if model.config.model_type != "deepseek_v2":
        return
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    rope = model.config.rope_parameters
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        for layer in model.base_model.layers:
            attention = layer.self_attn
            attention.scaling = (
                attention.qk_head_dim**-0.5 * yarn_get_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
            )


@torch.inference_mode()
def capture(
    model: Any, tokens: Sequence[int], queries: int, visit: Callable[[Captured], None], *, sinks: bool = False
) -> None:
    """Run a prompt through a model of `load_model` and show every layer's attention to `visit` before it goes on.

    Nothing of a layer is kept, so that memory holds one of them.

    Args:
        model: as said.
        tokens: ids of the prompt.
        queries: how many of the last positions.
        visit: called once for each of `shown_layers`, in their order.
        sinks: whether `visit` counts attention sinks; else a model with sinks is refused.

    Raises:
        CalibrationError: another layer does not let its attention be captured, or attends to something else than all
            tokens up to its own with a softmax of q·k.
    """
    from transformers import AttentionInterface

    seen: list[int] = []

    def show(captured: Captured) -> None:
        seen.append(captured.layer)
        visit(captured)

    layers = shown_layers(model.config)
    AttentionInterface.register(IMPLEMENTATION, partial(_attend, show, queries, layers, sinks))
    ids = torch.tensor([tokens], device=model.device)
    model.base_model(input_ids=ids, use_cache=False)
    if seen != layers:
        message = f"{type(model).__name__} shows the attention of layers {seen}, it has {layers}"
        raise CalibrationError(message, field="--model-path", got=seen)


def _attend(
    show: Callable[[Captured], None],
    queries: int,
    layers: Sequence[int],
    counts_sinks: bool,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer, sinks = int(getattr(module, "layer_idx")), options.pop(SINKS, None)  # noqa: B009
    scaling = options["scaling"] = options.get("scaling") or query.shape[-1] ** -0.5
    if layer in layers:
        odd = [name for name in OTHER_ATTENTION if options.get(name) is not None]
        # Attention to all earlier tokens needs no mask.
        odd += ["a separate mask"] if attention_mask is not None else []
        odd += ["attention sinks"] if sinks is not None and not counts_sinks else []
        if odd:
            message = f"--model-path: the attention of layer {layer} has {odd[0]}, which is not measured"
            raise CalibrationError(message, field="--model-path", got=odd)
        last, keys, values = (part[0].transpose(0, 1) for part in (query[:, :, -queries:], key, value))
        show(Captured(layer, last, keys, values, scaling, None if sinks is None else sinks.detach()))
    width, own = value.shape[-1], 0
    if sinks is not None:
        query, key, value, attention_mask = _with_first_key(query, key, value, attention_mask, sinks / scaling)
        own = 1
    # Values of MLA are narrower than its keys; at one width no kernel writes out all scores.
    padded = torch.nn.functional.pad(value, (0, max(0, query.shape[-1] - width)))
    output, _ = sdpa_attention_forward(module, query, key, padded, attention_mask, **options)
    return output[:, own:, :, :width], None


def _with_first_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, products: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Put a key before all others that adds to denominators alone, and a query, which causal kernels need with it.

    Args:
        query: ``[1, q_heads, tokens, head_dim]``, which becomes wider by eight, as that of the keys: kernels that do
            not write out all scores want multiples of that.
        key: ``[1, kv_heads, tokens, head_dim]``.
        value: ``[1, kv_heads, tokens, value_dim]``; that of the first key is 0.
        mask: ``[1, 1, tokens, tokens]`` bool, true where a query sees a key, or None for causal.
        products: ``[q_heads]``, the first key's q·k with each query of a head.
    """
    pad = torch.nn.functional.pad
    own = pad(products.to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1), (0, 7))
    query, key, value = (pad(part, (0, 0, 1, 0)) for part in (torch.cat([query, own], -1), pad(key, (0, 8)), value))
    key[:, :, 0, -8] = 1
    return query, key, value, None if mask is None else pad(mask, (1, 0, 1, 0), value=True)

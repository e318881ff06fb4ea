"""Layers that may run sparse: full attention by the model's config, and plain attention in the loaded model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sglang_sparse.attention.decode import SINKS
from sglang_sparse.config.layer_rules import require_range
from sglang_sparse.config.settings import Settings
from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.hooks.model_limits import state_layers, windowed_layers
from sglang_sparse.methods.groups import DecodeGroups, PrefillGroups
from sglang_sparse.methods.layers import parse_layers

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_sparse.config.arguments import ModelConfig

G = TypeVar("G", DecodeGroups, PrefillGroups)
Rules = Mapping[str, object] | None


def fit_layers(settings: Settings, model: ModelConfig) -> Settings:
    """Refuse layers that a model lacks, or that its config gives a window, chunks or a state; leave them out of "all".

    Args:
        settings: the server's methods; not changed.
        model: SGLang's ``ModelConfig``.

    Returns:
        The settings, where "all" has become the layers of full attention if there are others.

    Raises:
        SparseArgumentError: ``got`` has the layers that a method cannot have.
    """
    # A decode method's prefill method, which comes along, names the same layers: they are refused before.
    with within(f"--sparse-config of {settings.name}"):
        decode, rules = _fitted(settings.decode, settings.rules, model)
    prefill, prefill_rules = settings.prefill, settings.prefill_rules
    if prefill:
        with within(f"--sparse-prefill-config of {settings.prefill_name}"):
            prefill, prefill_rules = _fitted(prefill, prefill_rules, model)
    return replace(settings, decode=decode, rules=rules, prefill=prefill, prefill_rules=prefill_rules)


def _fitted(groups: G, rules: Rules, model: ModelConfig) -> tuple[G, Rules]:
    bound = "has chunked attention" if model.is_local_attention_model else "has a sliding window"
    count, others = model.num_hidden_layers, dict.fromkeys(windowed_layers(model), bound)
    others |= dict.fromkeys(state_layers(model), "has a recurrent state instead of KV")
    full = ",".join(str(layer) for layer in range(count) if layer not in others) if others else "all"
    require_range(rules or {}, count)
    for config in groups.configs:
        named = [layer for layer in parse_layers(config.layers, count) if layer in others]
        if named and config.layers != "all":
            message = f"layer {named[0]} {others[named[0]]}"
            raise SparseArgumentError(message, field="layers", got=named, allowed=f'"all", or some of {full}')
    if full == "all" or groups.config.layers != "all":
        return groups, rules
    # No other method has layers then.
    fitted = groups.with_configs([groups.config.model_copy(update={"layers": full})])
    return fitted, rules and {full: rules["all"]}


def require_layers(settings: Settings, model: torch.nn.Module, model_config: Any) -> None:
    """Refuse a model with a sparse layer whose attention the kernels do not compute.

    Args:
        settings: the server's methods.
        model: the loaded ``torch.nn.Module``.

    Raises:
        SparseArgumentError: names the flag, the layer, what it has, what is allowed, and what to type.
    """
    count = model_config.num_hidden_layers
    attending = [method for method in settings.decode.methods if settings.name and not method.selects_in_model]
    layers = [layer for method in attending for layer in method.sparse_layers(count)]
    phases = [(settings.flag, "--sparse-config", settings.rules, layers)]
    if settings.prefill:
        option = "--sparse-config" if settings.comes_along else "--sparse-prefill-config"
        layers = list(parse_layers(settings.prefill.config.layers, count))
        phases.append((settings.prefill_flag, option, settings.prefill_rules, layers))
    latent = settings.method.kind_of(model_config) != "MHA"
    dims = None if latent else (model_config.head_dim, model_config.v_head_dim)
    found = _found(model, dims)
    form = f", in heads of {dims[0]} and {dims[1]} dimensions" if dims else ""
    # Others are those of another stage of pipeline parallelism.
    here = range(getattr(model, "start_layer", 0), getattr(model, "end_layer", count))
    for flag, option, rules, of_model in phases:
        layers = [layer for layer in of_model if layer in here]
        bad = {layer: has for layer in sorted(layers) if (has := found.get(layer, "no attention of SGLang's"))}
        if not bad:
            continue
        names = ",".join(map(str, bad))
        if len(bad) == len(layers):
            cure = f"no layer is like that: start without {flag}"
        elif rules:
            cure = f"give layers {names} the rule {json.dumps({names: 'dense'})} in {option}"
        else:
            left = [layer for layer in sorted(layers) if layer not in bad]
            cure = f"to leave layers {names} dense: {option} '{json.dumps({'layers': left})}'"
        layer, has = next(iter(bad.items()))
        raise SparseArgumentError(
            f"{flag}: layer {layer} has {has}",
            field="layers",
            got=list(bad),
            allowed=f"causal attention to all earlier tokens, with keys and values of its own{form}",
            hint=cure,
        )


def _found(model: torch.nn.Module, dims: tuple[int, int] | None) -> dict[int, str]:
    """Return the unsupported property of each layer by its id; empty for a supported layer."""
    found: dict[int, str] = {}
    owners: dict[int, str] = {}
    for name, layer in _attentions(model):
        owner = name.rpartition(".")[0]
        first = owners.setdefault(layer.layer_id, owner)
        reasons = _reasons(layer, dims)
        # MLA has two in a module, over the same latents.
        if first != owner:
            reasons.append(f"KV shared with {first}")
        heads = None if dims is None else (layer.tp_q_head_num,)
        for each, value in model.get_submodule(owner).named_parameters(recurse=False):
            if "sink" in each and (each, value.shape) != (SINKS, heads):
                reasons.append(f"attention sinks of another kind, {each}")
        message = f"{' and '.join(reasons)} ({name})" if reasons else ""
        found[layer.layer_id] = found.get(layer.layer_id) or message
    return found


def _attentions(model: torch.nn.Module) -> Iterator[tuple[str, RadixAttention]]:
    from sglang.srt.layers.radix_attention import RadixAttention

    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            yield name, module
    # SGLang's wrapper of a model of transformers has them in a mapping.
    for layer in getattr(model, "attention_instances", {}).values():
        yield f"attention_instances[{layer.layer_id}]", layer


def _reasons(layer: RadixAttention, dims: tuple[int, int] | None) -> list[str]:
    kind, own = layer.attn_type.value, (layer.qk_head_dim, layer.v_head_dim)
    reasons = {
        "cross attention": layer.is_cross_attention,
        f"attention of type {kind}": kind != "decoder",
        f"a sliding window of {layer.sliding_window_size} tokens": layer.sliding_window_size > -1,
        "chunked attention": layer.use_irope,
        f"a soft cap of {layer.logit_cap} on its logits": bool(layer.logit_cap) and dims is None,
        f"a soft cap by {layer.logit_capping_method}": bool(layer.logit_cap) and layer.logit_capping_method != "tanh",
        f"logits scaled by position, from {layer.xai_temperature_len} on": layer.xai_temperature_len > 0,
        f"heads of {own[0]} and {own[1]} dimensions": dims is not None and own != dims,
        "scales of its latents": dims is None and (layer.k_scale_float or 1.0) != 1.0,
    }
    return [reason for reason, present in reasons.items() if present]

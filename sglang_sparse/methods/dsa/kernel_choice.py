"""Which implementation each stage of DSA runs: SGLang's own kernels, or those of this project.

Decided once, in the main process, from the GPU, the dtypes and what is installed; the schedulers get the answer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sglang_sparse.config.settings import SparseArgumentError
from sglang_sparse.hooks import dsa_flags
from sglang_sparse.hooks.limits import Gpu, on_gpu
from sglang_sparse.methods.dsa.decode import AUTO, NATIVE, PORTABLE, REFERENCE, STAGES, Dsa, DsaConfig

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.config.settings import Settings

logger = logging.getLogger(__name__)

# Major compute capabilities that SGLang's kernels were written for: Hopper, and Blackwell for data centers.
NATIVE_MAJORS = (9, 10)
# What SGLang imports next to a GPU, whatever kernels run, and what brings it: the model and the attention backend ask
# for DeepGEMM's multiprocessors.
PACKAGES: Mapping[str, str] = {"deep_gemm": "sgl-deep-gemm", "sgl_kernel": "sglang-kernel"}
# The least that multiplies bfloat16.
LEAST_CAPABILITY = (8, 0)
# One that runs all there is.
BEST = (9, 0)
# SGLang's selection in prefill is compiled for this number of tokens.
NATIVE_TOPK = 2048
# Latent and rotated key of which SGLang keeps float8 KV with scales.
FLOAT8_LATENT = (512, 64)
# The one that keeps float8 KV without scales, and SGLang's own choice for it on Blackwell.
RAW_BACKEND = "trtllm"


@dataclass(frozen=True)
class Facts:
    """What the choice depends on.

    Attributes:
        capability: compute capability of the GPU; None without one.
        packages: those of ``PACKAGES`` that can be imported.
        reference: this project's operations run as their references here, not as Triton kernels.
        kv_dtype: ``--kv-cache-dtype`` as it was given.
        heads: query heads of a tensor-parallel rank.
        topk: the model's ``index_topk``.
        latent: the model's ``kv_lora_rank`` and ``qk_rope_head_dim``.
        raw: whether SGLang's attention would keep float8 KV without scales, see ``raw_latents``.
    """

    capability: tuple[int, int] | None
    packages: frozenset[str]
    reference: bool
    kv_dtype: str
    heads: int
    topk: int
    latent: tuple[int, int] = FLOAT8_LATENT
    raw: bool = False


def raw_latents(backends: Collection[object], blackwell: bool) -> bool:
    """Whether SGLang keeps float8 latents as a byte a number, without scales.

    Args:
        backends: ``--dsa-prefill-backend`` and ``--dsa-decode-backend``; None where it is left to SGLang.
        blackwell: whether the GPU has compute capability 10.x.
    """
    return RAW_BACKEND in backends or (None in backends and blackwell)


def absent(facts: Facts) -> str | None:
    """Say which packages are missing without which no server starts next to a GPU, or None."""
    missing = [name for name in PACKAGES if name not in facts.packages]
    if facts.capability is None or not missing:
        return None
    return (
        f"{' and '.join(f'{name} (package {PACKAGES[name]})' for name in missing)} cannot be imported; next to a GPU "
        "SGLang's model needs it, whatever kernels run; allowed: nothing before it is installed"
    )


def resolve(asked: Mapping[Any, str], facts: Facts) -> dict[str, str]:
    """Choose an implementation for every stage.

    Where a stage is left to "auto", the indexer and the attention are native if they can be, and the selection is not:
    SGLang's leaves open which of two equal tokens it takes.

    Args:
        asked: "auto", "native", "portable" or "reference" by stage.
        facts: the machine and the model.

    Returns:
        "native", "portable" or "reference" by stage.

    Raises:
        ValueError: a stage cannot run as it was asked for, or not beside what another one was asked for; says what is
            allowed.
    """
    ours = REFERENCE if facts.reference else PORTABLE
    open_to = {stage: _allowed(stage, asked[stage], ours, facts) for stage in STAGES}
    reason = None
    # The last stage varies fastest: selection is the first to give way.
    for attention, indexer, topk in itertools.product(*(open_to[stage] for stage in ("attention", "indexer", "topk"))):
        found = {"indexer": indexer, "topk": topk, "attention": attention}
        if (unfit := _unfit(found)) is None:
            return found
        reason = reason or unfit
    raise ValueError(str(reason))


def _allowed(stage: str, asked: str, ours: str, facts: Facts) -> list[str]:
    order = (ours, NATIVE) if stage == "topk" else (NATIVE, ours)
    choices = order if asked == AUTO else (asked,)
    reasons = {choice: _refuse(stage, choice, ours, facts) for choice in choices}
    allowed = [choice for choice, reason in reasons.items() if reason is None]
    if not allowed:
        same = {reason: [choice for choice in choices if reasons[choice] == reason] for reason in reasons.values()}
        said = "; ".join(f"not {' or '.join(refused)}: {reason}" for reason, refused in same.items())
        others = [choice for choice in order if choice not in choices and not _refuse(stage, choice, ours, facts)]
        raise ValueError(f"{stage}: got {asked!r}, allowed: {', '.join(others) or 'nothing'}; {said}")
    return allowed


def _refuse(stage: str, choice: str, ours: str, facts: Facts) -> str | None:
    """Why a stage cannot run in one way on this machine, or None."""
    scaled = stage == "attention" and facts.kv_dtype.startswith("fp8") and not (choice == NATIVE and facts.raw)
    if scaled and facts.latent != FLOAT8_LATENT:
        return (
            f"SGLang keeps float8 KV with scales of a latent of {FLOAT8_LATENT[0]} and a rotated key of "
            f"{FLOAT8_LATENT[1]}, and the model's have {facts.latent[0]} and {facts.latent[1]}"
        )
    if choice == NATIVE:
        return _refuse_native(stage, facts)
    if choice != ours:
        return (
            "Triton's kernels need a GPU, or TRITON_INTERPRET=1 in the environment"
            if choice == PORTABLE
            else "this machine runs the kernels; SGLANG_SPARSE_REFERENCE=1 in the environment forces the references"
        )
    if facts.capability is not None and facts.capability < LEAST_CAPABILITY:
        return f"it needs compute capability {_dotted(LEAST_CAPABILITY)} or later, and this GPU has " + _dotted(
            facts.capability
        )
    return None


def _refuse_native(stage: str, facts: Facts) -> str | None:
    if facts.capability is None:
        return "this machine has no GPU"
    majors = " and ".join(f"{major}.x" for major in NATIVE_MAJORS)
    # SGLang pads the heads of a rank to one of these.
    padded = 128 if facts.capability[0] == NATIVE_MAJORS[-1] else 64
    reasons = {
        f"SGLang's kernels are for compute capabilities {majors}, and this GPU has "
        f"{_dotted(facts.capability)}": facts.capability[0] not in NATIVE_MAJORS,
        f"SGLang's selection takes {NATIVE_TOPK} tokens, and the model's index_topk is {facts.topk}": stage == "topk"
        and facts.topk != NATIVE_TOPK,
        f"SGLang's kernels take a divisor or a multiple of {padded} query heads a rank, and there are "
        f"{facts.heads}": stage == "attention" and facts.heads % padded != 0 and padded % facts.heads != 0,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _unfit(found: Mapping[str, str]) -> str | None:
    """Why stages do not go together, or None."""
    if found["topk"] == NATIVE and found["indexer"] != NATIVE:
        return f"topk: native needs a native indexer, whose logits it takes; the indexer is {found['indexer']}"
    if found["attention"] != NATIVE and found["indexer"] == NATIVE:
        return (
            f"attention: {found['attention']} needs the indexer of the same kind, which counts what it attends to; "
            "the indexer is native"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def settle(args: Arguments, settings: Settings, gpu: Gpu = None) -> Settings:
    """Put the choice into a server's config, and into those arguments of SGLang's that follow from it.

    Args:
        args: the server's, before SGLang resolves what depends on the model.
        settings: the methods; not changed.
        gpu: of the server's machine; None: it is this one.

    Returns:
        The methods with the choice.

    Raises:
        SparseArgumentError: the choice that was asked for cannot be made, or an argument contradicts it.
    """
    config = settings.config
    if not isinstance(config, DsaConfig):
        return settings
    dsa_flags.require_dtype(args, settings, _model(args).dtype, on_gpu(gpu))
    facts = _facts(args, gpu)
    if reason := absent(facts):
        raise SparseArgumentError(f"{settings.flag}: {reason}")
    try:
        found = resolve(config.implementation, facts)
    except ValueError as error:
        raise SparseArgumentError(f"--sparse-config of {settings.name}: implementation: {error}") from error
    other = facts.capability is not None and facts.capability[0] != BEST[0]
    float8 = facts.kv_dtype.startswith("fp8") and set(found.values()) != {PORTABLE}
    if facts.capability is not None and (other or float8 or args.tp_size > 1):
        stages = ", ".join(f"{stage} {name}" for stage, name in found.items())
        logger.warning(
            "sglang_sparse: dsa was measured on one GPU of compute capability %d.x alone, and over float8 KV with "
            "all stages portable alone; this GPU has %s, --kv-cache-dtype is %s, --tp-size %d, and it runs %s",
            *(BEST[0], _dotted(facts.capability), facts.kv_dtype, args.tp_size, stages),
        )
    chosen = config.model_copy(update={"implementation": found})
    args.sparse_config = chosen.model_dump_json()
    dsa_flags.require_stages(args, settings, found, on_gpu(gpu))
    if on_gpu(gpu) and found["attention"] != NATIVE:
        dsa_flags.take_slot(args, settings, found["attention"])
    return replace(settings, method=Dsa(chosen))


def _facts(args: Any, asked: Gpu) -> Facts:
    """Those of this machine. A GPU that is asked about and not here is the best one: what it refuses, all others do."""
    import torch

    from sglang_sparse_kernels import dispatch

    gpu, here = on_gpu(asked), torch.cuda.is_available()
    # Where the operations would run decides how.
    reference = dispatch.use_reference(torch.empty(0, device="meta" if gpu else "cpu")) if gpu == here else not gpu
    model = _model(args)
    usual = torch.cuda.get_device_capability() if here else BEST
    capability = (asked if isinstance(asked, tuple) else usual) if gpu else None
    blackwell = capability is not None and capability[0] == NATIVE_MAJORS[-1]
    return Facts(
        capability,
        frozenset(name for name in PACKAGES if gpu != here or find_spec(name)),
        reference,
        args.kv_cache_dtype,
        model.num_attention_heads // args.tp_size,
        model.hf_text_config.index_topk,
        (model.hf_text_config.kv_lora_rank, model.hf_text_config.qk_rope_head_dim),
        raw_latents((args.dsa_prefill_backend, args.dsa_decode_backend), blackwell),
    )


def _model(args: Arguments) -> Any:
    # SGLang caches what ``get_model_config`` returns, and its own arguments are not resolved yet.
    return args.new_model_config()

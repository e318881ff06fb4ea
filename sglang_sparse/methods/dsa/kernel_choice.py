"""Which implementation each stage of DSA runs: SGLang's own kernels, or those of this project.

Decided once, in the main process, from the GPU, the dtypes and what is installed; the schedulers get the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_sparse.methods.dsa.decode import AUTO, NATIVE, PORTABLE, REFERENCE, STAGES

if TYPE_CHECKING:
    pass

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
        return f"it needs compute capability {dotted(LEAST_CAPABILITY)} or later, and this GPU has " + dotted(
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
        f"{dotted(facts.capability)}": facts.capability[0] not in NATIVE_MAJORS,
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


def dotted(capability: tuple[int, int]) -> str:
    """Write a compute capability as NVIDIA does."""
    return ".".join(map(str, capability))

"""Choice of DSA's kernels: SGLang's own, or those of this project.

Decided once, in the main process, from the GPU, the dtypes and what is installed; the schedulers get the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.dsa.decode import AUTO, NATIVE, PORTABLE

# Major compute capabilities that SGLang's kernels were written for: Hopper, and Blackwell for data centers.
NATIVE_MAJORS = (9, 10)
# What SGLang imports next to a GPU, whatever kernels run, and what brings it: the model and the attention backend ask
# for DeepGEMM's multiprocessors.
PACKAGES: Mapping[str, str] = {"deep_gemm": "sgl-deep-gemm", "sgl_kernel": "sglang-kernel"}
# The least that multiplies bfloat16.
LEAST_CAPABILITY = (8, 0)
# One that runs all there is.
BEST = (9, 0)
# Latent and rotated key of which SGLang keeps float8 KV with scales.
FLOAT8_LATENT = (512, 64)
# The one that keeps float8 KV without scales, and SGLang's own choice for it on Blackwell.
RAW_BACKEND = "trtllm"


@dataclass(frozen=True)
class Facts:
    """The facts that the choice depends on.

    Attributes:
        capability: compute capability of the GPU; None without one.
        packages: those of ``PACKAGES`` that can be imported.
        kv_dtype: ``--kv-cache-dtype`` as it was given.
        heads: query heads of a tensor-parallel rank.
        latent: the model's ``kv_lora_rank`` and ``qk_rope_head_dim``.
        raw: whether SGLang's attention would keep float8 KV without scales, see ``raw_latents``.
    """

    capability: tuple[int, int] | None
    packages: frozenset[str]
    kv_dtype: str
    heads: int
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


def resolve(asked: str, facts: Facts) -> str:
    """Choose the kernels of a server that starts: "auto" stays where SGLang's run, and is "portable" elsewhere.

    Args:
        asked: "auto" or "portable"; whether "native" runs, SGLang judges.
        facts: the machine and the model.

    Returns:
        A key of ``STAGES``.

    Raises:
        ValueError: nothing that was asked for can run; says why, and what is allowed.
    """
    tried = (AUTO, PORTABLE) if asked == AUTO else (asked,)
    reasons = {choice: _refuse(choice, facts) for choice in tried}
    for choice, reason in reasons.items():
        if reason is None:
            return choice
    whys = [f"not {choice}: {reason}" for choice, reason in reasons.items()]
    others = [AUTO] if asked == PORTABLE and not _refuse(AUTO, facts) else []
    others += [NATIVE] if facts.capability is not None and facts.capability[0] in NATIVE_MAJORS else []
    allowed = ", ".join(others) or "nothing"
    refused = f"got {asked!r}, allowed: {allowed}; {'; '.join(whys)}"
    raise SparseArgumentError(refused, field="implementation", got=asked)


def _refuse(choice: str, facts: Facts) -> str | None:
    """Return the reason why a choice cannot run on this machine, or None."""
    scaled = facts.kv_dtype.startswith("fp8") and not (choice != PORTABLE and facts.raw)
    if scaled and facts.latent != FLOAT8_LATENT:
        return (
            f"SGLang keeps float8 KV with scales of a latent of {FLOAT8_LATENT[0]} and a rotated key of "
            f"{FLOAT8_LATENT[1]}, and the model's have {facts.latent[0]} and {facts.latent[1]}"
        )
    if choice == PORTABLE:
        if facts.capability is not None and facts.capability < LEAST_CAPABILITY:
            return (
                f"it needs compute capability {dotted(LEAST_CAPABILITY)} or later, and this GPU has "
                f"{dotted(facts.capability)}"
            )
        return None
    return _refuse_native(facts)


def _refuse_native(facts: Facts) -> str | None:
    if facts.capability is None:
        return "this machine has no GPU"
    majors = " and ".join(f"{major}.x" for major in NATIVE_MAJORS)
    # SGLang pads the heads of a rank to one of these.
    padded = 128 if facts.capability[0] == NATIVE_MAJORS[-1] else 64
    reasons = {
        f"SGLang's kernels are for compute capabilities {majors}, and this GPU has "
        f"{dotted(facts.capability)}": facts.capability[0] not in NATIVE_MAJORS,
        f"SGLang's kernels take a divisor or a multiple of {padded} query heads a rank, and there are "
        f"{facts.heads}": facts.heads % padded != 0 and padded % facts.heads != 0,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def dotted(capability: tuple[int, int]) -> str:
    """Write a compute capability as NVIDIA does."""
    return ".".join(map(str, capability))

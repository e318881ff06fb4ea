"""Refusals with deterministic inference, where a row's output is a function of the row alone.

Methods, kernels and rectification keep to that rule, see "Deterministic inference" in ``docs/operations.md``. Flags
that decide about a row by its neighbours are refused, and those that are not proven yet.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import deterministic
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks.flag_predicates import require_none, uses_dp_attention
from sglang_sparse.methods.roles import prompt_selectors
from sglang_sparse.methods.support import FlagLimit, above_one, given, other_than

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.config.settings import Settings

_OTHER_RANKS = "a rank runs passes for the rows of others"

DETERMINISTIC_LIMITS = (
    FlagLimit(
        "--speculative-algorithm",
        given("speculative_algorithm"),
        "the tokens of a pass depend on the drafts that were accepted before; not proven yet, leave it out",
    ),
    FlagLimit(
        "LoRA",
        given("enable_lora", "lora_paths"),
        "SGLang chooses kernels of adapters by the tokens of a pass; leave out --enable-lora and --lora-paths",
    ),
    FlagLimit(
        "mixed chunk",
        given("enable_mixed_chunk"),
        "a row would decode in another pass whenever a prompt is prefilled; leave out --enable-mixed-chunk",
    ),
    FlagLimit(
        "priority preemption",
        lambda args: (args.enable_priority_scheduling and not args.disable_priority_preemption) or None,
        "a preempted request is prefilled again, which makes its sparse KV exact; add --disable-priority-preemption",
    ),
    FlagLimit("data-parallel attention", uses_dp_attention, f"{_OTHER_RANKS}; leave out --enable-dp-attention"),
    FlagLimit("pipeline parallelism", above_one("pp_size"), "not proven yet; allowed: --pp-size 1"),
    FlagLimit("--disaggregation-mode", other_than("disaggregation_mode", "null"), "not proven yet; allowed: null"),
)


def require(args: Arguments, settings: Settings) -> None:
    """Refuse what makes a row's output depend on other rows, on a server with deterministic inference.

    Args:
        args: the server's arguments, before SGLang resolves them.
        settings: the methods.

    Raises:
        SparseArgumentError: names the flag or the field, its value, the reason, and what to type.
    """
    if not deterministic(args):
        return
    where = "with deterministic inference"
    if settings.method.selects_in_model:
        message = f"{settings.flag} {where}: SGLang would attend to everything and not say so: nothing of DSA would run"
        raise SparseArgumentError(message, field="--sparse-method", got=settings.name)
    require_none(args, DETERMINISTIC_LIMITS, f"{settings.flag} {where} cannot run with")
    if settings.prefill:
        message = f"{settings.prefill_flag} {where}: sparse prefill is not proven yet"
        allowed = "leave out --sparse-prefill-method"
        if settings.comes_along:
            field = settings.decode.configs[0].phase_fields[0]
            allowed = f"--sparse-config of decode alone, {json.dumps({field: {'decode': 1000}})}"
        raise SparseArgumentError(message, field="--sparse-prefill-method", got=settings.prefill_name, allowed=allowed)
    for config in settings.decode.configs:
        if (got := config.crossover_tokens) not in (0, "auto"):
            message = f"{settings.flag} {where}: whether a row runs sparse would depend on the tokens of the others"
            raise SparseArgumentError(message, field="crossover_tokens", got=got, allowed='0 or "auto"')
    if any(method.compacts for method in prompt_selectors(settings.decode.methods)):
        message = f"{settings.flag} {where}: when a prompt is compacted depends on the memory that others take"
        allowed = '{"eviction": "visibility"}'
        raise SparseArgumentError(message, field="eviction", got="compact", allowed=allowed)

"""Predicates on a server's arguments for the tables of limits, and the refusal of the flags that a table finds.

A judge returns None where nothing of its kind is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import DRAFTERS, drafts_itself
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.support import FlagLimit, Judge, above_one, is_decode_server

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments

# What SGLang's own kernels of DSA do not serve either.
_NEVER = {"KV cache dtype"}


def lossless(args: Arguments) -> str | None:
    """The speculative algorithm, if the sparse method drafts."""
    return args.speculative_algorithm if drafts_itself(args) else None


def drafter(args: Arguments, served: bool) -> str | None:
    """The speculative algorithm, if it is one of those that prefill methods serve, or one of the others."""
    name = args.speculative_algorithm
    return name if name and not drafts_itself(args) and (name.upper() in DRAFTERS) is served else None


def drafting(args: Arguments) -> str | None:
    """The speculative algorithm, if it is one of those that prefill methods serve."""
    return drafter(args, served=True)


def uses_dp_attention(args: Arguments) -> object | None:
    """Return what asks for data-parallel attention, by its new flag or its old one."""
    return args.enable_dp_attention or above_one("attn_dp_size")(args)


def uses_ranks_or_stages(args: Arguments) -> object | None:
    """Return what makes ranks of attention run passes together, or stages one after the other."""
    return uses_dp_attention(args) or above_one("pp_size")(args)


def without_tree(args: Arguments) -> str | None:
    """A decode server without the flag that keeps its prefix cache."""
    return None if args.disaggregation_decode_enable_radix_cache else is_decode_server(args)


def environment(*names: str) -> Judge:
    """Return what names the first of some variables of SGLang's environment that is set."""

    def found(_: object) -> str | None:
        from sglang.srt.environ import envs

        return next((name for name in names if getattr(envs, name).get()), None)

    return found


def refused_flags(args: Arguments, limits: Iterable[FlagLimit]) -> dict[FlagLimit, object]:
    """Return the limits of a table that refuse a server, each with what it has got."""
    got = {limit: limit.got(args) for limit in limits}
    return {limit: value for limit, value in got.items() if value is not None}


def listed(found: Mapping[FlagLimit, object]) -> str:
    """Say what was got for each of some limits, and why it is refused."""
    return "; ".join(f"{limit.name} (got {value!r}): {limit.reason}" for limit, value in found.items())


def require_none(
    args: Arguments, limits: Iterable[FlagLimit], origin: str, other: tuple[str, str] = ("", ""), hint: str = ""
) -> None:
    """Refuse flags that a table limits; ``other`` is what is allowed instead: where, and what."""
    if found := refused_flags(args, limits):
        (first, got), (where, allowed) = next(iter(found.items())), other
        hint = "" if any(limit.name in _NEVER for limit in found) else hint
        message = f"{origin} {listed(found)}"
        raise SparseArgumentError(message, field=first.name, got=got, allowed=allowed, where=where, hint=hint)

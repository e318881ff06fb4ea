"""All checks of a server's start, in its order; and where "auto" gives way to SGLang's own DSA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.config.machine import Gpu
from sglang_sparse.config.settings import of_role, only_role
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks import deterministic, dsa_flags, refusals

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.config.settings import Settings


def refusal(args: Arguments, settings: Settings, gpu: Gpu, stand_in: bool = False) -> str | None:
    """Return why a server would not start, or None.

    Args:
        args: its arguments as SGLang would resolve them.
        settings: the methods.
        gpu: its machine's GPU.
        stand_in: whether the model's folder is a sample config without weights.
    """
    try:
        settings = refusals.fit_prefill(args, judge_flags(args, settings, gpu))
        refusals.require_after(args, judge_model(args, settings, gpu, stand_in), gpu)
    except SparseArgumentError as error:
        return str(error)
    return None


def judge_flags(args: Arguments, settings: Settings, gpu: Gpu = None) -> Settings:
    """Refuse arguments that are wrong before SGLang resolves them.

    Args:
        args: the server's arguments.
        settings: the methods.
        gpu: the machine's GPU; None for this machine's.

    Returns:
        The methods, see ``dsa_flags.give_way``.

    Raises:
        SparseArgumentError: see ``refusals.require_before`` and ``deterministic.require``.
    """

    def judge(own: Settings) -> Settings:
        # What is left to the other server of a pair asks nothing of this one, which is SGLang's own.
        if of_role(own, only_role(args)) is None:
            refusals.require_drafter(args, here=False)
            return own
        refusals.require_before(args, own, gpu)
        deterministic.require(args, own)
        return own

    return dsa_flags.give_way(settings, judge, gpu)


def judge_model(args: Arguments, settings: Settings, gpu: Gpu = None, stand_in: bool = False) -> Settings:
    """Refuse a model, and choose the kernels for it; what passes through is checked once SGLang has judged it.

    Returns:
        The methods, see ``dsa_flags.give_way``.

    Raises:
        SparseArgumentError: see ``refusals.require_model`` and ``dsa_flags.choose_kernels``.
    """

    def judge(own: Settings) -> Settings:
        if own.passes_through:
            return own
        return dsa_flags.choose_kernels(args, refusals.require_model(args, own, stand_in), gpu)

    return dsa_flags.give_way(settings, judge, gpu)

"""SGLang's own arguments beside DSA: those that would go unheeded are refused, and those that follow are set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_sparse.config.settings import SparseArgumentError, settings_of
from sglang_sparse.methods.dsa.decode import NATIVE, Dsa

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.config.settings import Settings

logger = logging.getLogger(__name__)

# The backend of SGLang in whose place the portable attention stands.
SLOT = "tilelang"
# What chooses among SGLang's own kernels for a stage.
STAGE_FLAGS: Mapping[str, str] = {"dsa_topk_backend": "topk", "dsa_paged_mqa_logits_backend": "indexer"}


def require_dtype(args: Arguments, settings: Settings, dtype: Any, gpu: bool) -> None:
    """Refuse a model that next to a GPU would not run in bfloat16, as its checkpoint or ``--dtype`` has it.

    Args:
        args: the server's.
        settings: the methods.
        dtype: the model's.
        gpu: whether the server has a GPU; elsewhere the platform decides.

    Raises:
        SparseArgumentError: names the dtype.
    """
    found = str(dtype).removeprefix("torch.")
    if gpu and found != "bfloat16":
        raise SparseArgumentError(
            f"{settings.flag}: --dtype is {args.dtype} and the model runs in {found}, which the kernels do not take; "
            "allowed: --dtype bfloat16"
        )


def require_stages(args: Arguments, settings: Settings, found: Mapping[str, str], gpu: bool) -> None:
    """Refuse what chooses among kernels of SGLang's that do not run.

    Args:
        args: the server's, as they were given.
        settings: the methods.
        found: the implementation of each stage.
        gpu: whether the server has a GPU.

    Raises:
        SparseArgumentError: names the flag or variable, and what is allowed.
    """
    import msgspec
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    record: Any = ServerArgs
    fields = {field.name: field for field in msgspec.structs.fields(record)}
    given = {
        f"--{name.replace('_', '-')}": (getattr(args, name), fields[name].default, stage)
        for name, stage in STAGE_FLAGS.items()
    }
    given["SGLANG_DSA_TOPK_BROADCAST"] = (envs.SGLANG_DSA_TOPK_BROADCAST.get(), False, "indexer")
    for name, (got, default, stage) in given.items():
        if got != default and found[stage] != NATIVE:
            native = f', or {{"implementation": {{"{stage}": "native"}}}}' if gpu else ""
            raise SparseArgumentError(
                f"{settings.flag}: {name} is {got} and the {stage} is {found[stage]}, which does not heed it; "
                f"allowed: {default}{native}"
            )


def take_slot(args: Any, settings: Settings, attention: str) -> None:
    """Put an attention that is not SGLang's in the place of one of its backends.

    Args:
        args: the server's; changed.
        settings: the methods.
        attention: its implementation.

    Raises:
        SparseArgumentError: another backend was asked for.
    """
    for name in ("dsa_prefill_backend", "dsa_decode_backend"):
        if getattr(args, name) not in (None, SLOT):
            raise SparseArgumentError(
                f"{settings.flag}: --{name.replace('_', '-')} is {getattr(args, name)} and the attention is "
                f'{attention}; allowed: no such flag, or {{"implementation": {{"attention": "native"}}}}'
            )
        setattr(args, name, SLOT)
    if args.kv_cache_dtype == "auto":
        # SGLang would take float8 on Blackwell.
        args.kv_cache_dtype = "bfloat16"


def keep_slot(original: Callable[..., dict[str, Any]], args: Any) -> dict[str, Any]:
    """Around ``_dsa_split_backend_resolution``: nothing where ``take_slot`` has put the attention there.

    SGLang would leave it there, but for float8 latents, which its own backend there reads on some GPUs alone.

    Args:
        original: SGLang's function.
        args: the server's, as SGLang's view of what is resolved so far.

    Returns:
        What SGLang declares of its backends.
    """
    settings = settings_of(args)
    if settings is None or not isinstance(settings.method, Dsa) or settings.method.native("attention"):
        return original(args)
    return {}


def leave_graphs(args: Arguments, settings: Settings) -> None:
    """Switch off those CUDA graphs of prefill that the indexer cannot be in.

    A breakable one runs SGLang's own indexer eagerly, between its pieces; the portable indexer has no such place, and
    what counts beside the native one cannot be compiled.

    Args:
        args: the server's, resolved.
        settings: the methods, as ``kernel_choice.settle`` left them.
    """
    graphs = args.cuda_graph_config
    if not isinstance(settings.method, Dsa) or graphs is None or graphs.prefill.backend == "disabled":
        return
    if settings.method.native("indexer") and graphs.prefill.backend == "breakable":
        return
    logger.warning(
        "sglang_sparse: prefill runs without CUDA graphs (%s); the indexer cannot be in them", graphs.prefill.backend
    )
    from sglang.srt.model_executor.cuda_graph_config import with_phase

    args.cuda_graph_config = with_phase(graphs, "prefill", backend="disabled")

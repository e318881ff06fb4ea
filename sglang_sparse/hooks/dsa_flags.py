"""SGLang's own arguments in a DSA server: refuse those without effect, and set those that follow from the config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sglang_sparse.config.files import checkpoint_config
from sglang_sparse.config.machine import Gpu, capability, on_gpu
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.methods.dsa import kernel_choice
from sglang_sparse.methods.dsa.decode import AUTO, NATIVE, PORTABLE, Dsa, DsaConfig
from sglang_sparse.methods.groups import DecodeGroups

if TYPE_CHECKING:
    import torch

    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.config.settings import Settings

logger = logging.getLogger(__name__)

# SGLang's backend that the portable attention replaces.
SLOT = "tilelang"
# Flags that choose among SGLang's own kernels for a stage.
STAGE_FLAGS: Mapping[str, str] = {"dsa_topk_backend": "topk", "dsa_paged_mqa_logits_backend": "indexer"}


def require_dtype(args: Arguments, settings: Settings, dtype: torch.dtype, gpu: bool) -> None:
    """Refuse a model that would not run in bfloat16 on a GPU, by its checkpoint or ``--dtype``.

    Args:
        args: the server's.
        settings: the methods.
        dtype: the model's.
        gpu: whether the server has a GPU; without one the platform decides.

    Raises:
        SparseArgumentError: names the dtype.
    """
    found = str(dtype).removeprefix("torch.")
    if gpu and found != "bfloat16":
        message = (
            f"{settings.flag}: --dtype is {args.dtype} and the model runs in {found}, which the kernels do not take"
        )
        raise SparseArgumentError(message, field="--dtype", got=found, allowed="--dtype bfloat16")


def require_stages(args: Arguments, settings: Settings, found: Mapping[str, str], gpu: bool) -> None:
    """Refuse flags and variables that choose among SGLang's kernels for a stage that does not use them.

    Args:
        args: the server's, as they were given.
        settings: the methods.
        found: by stage, whose kernels run it.
        gpu: whether the server has a GPU.

    Raises:
        SparseArgumentError: names the flag or variable and the allowed values.
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
            native = ', or {"implementation": "native"}' if gpu else ""
            message = f"{settings.flag}: {name} is {got} and the {stage} is {found[stage]}, which ignores it"
            raise SparseArgumentError(message, field=name, got=got, allowed=f"{default}{native}")


def replace_tilelang_backend(args: Arguments, settings: Settings) -> None:
    """Let the portable attention replace SGLang's tilelang backend.

    Args:
        args: the server's; changed.
        settings: the methods.

    Raises:
        SparseArgumentError: another backend was asked for.
    """
    for name in ("dsa_prefill_backend", "dsa_decode_backend"):
        if (got := getattr(args, name)) not in (None, SLOT):
            flag, allowed = f"--{name.replace('_', '-')}", 'no such flag, or {"implementation": "native"}'
            message = f"{settings.flag}: {flag} is {got} and the attention is portable"
            raise SparseArgumentError(message, field=flag, got=got, allowed=allowed)
        setattr(args, name, SLOT)
    if args.kv_cache_dtype == "auto":
        # SGLang would take float8 on Blackwell.
        args.kv_cache_dtype = "bfloat16"


def keep_replaced_backend(original: Callable[..., dict[str, object]], args: object) -> dict[str, object]:
    """Around ``_dsa_split_backend_resolution``: declare nothing if the portable attention has replaced the backend.

    SGLang would change it for float8 latents, which its own tilelang backend reads on some GPUs only.

    Args:
        original: SGLang's function.
        args: the server's, as SGLang's view of the arguments resolved so far.

    Returns:
        SGLang's declarations of its backends.
    """
    settings = hooked_settings_of(args)
    if settings is None or not isinstance(settings.method, Dsa) or settings.method.native("attention"):
        return original(args)
    return {}


def disable_prefill_graphs(args: Arguments, settings: Settings) -> None:
    """Switch off CUDA graphs of prefill that cannot contain the indexer.

    A breakable graph runs SGLang's own indexer eagerly, between its pieces. It has no such gap for the portable
    indexer, and the counters of the native one cannot be compiled.

    Args:
        args: the server's, resolved.
        settings: the methods after ``choose_kernels``.
    """
    graphs = args.cuda_graph_config
    if settings.passes_through or not isinstance(settings.method, Dsa):
        return
    if graphs is None or graphs.prefill.backend == "disabled":
        return
    if settings.method.native("indexer") and graphs.prefill.backend == "breakable":
        return
    logger.warning(
        "sglang_sparse: prefill runs without CUDA graphs (%s); the indexer cannot be in them", graphs.prefill.backend
    )
    from sglang.srt.model_executor.cuda_graph_config import with_phase

    args.cuda_graph_config = with_phase(graphs, "prefill", backend="disabled")


def native_instead(settings: Settings, gpu: Gpu = None) -> DsaConfig | None:
    """Return the config of "native" where "auto" was asked for on a GPU on which all of SGLang's own kernels run.

    Args:
        settings: the methods.
        gpu: the server machine's GPU; None for this machine's.
    """
    config, found = settings.config, capability(gpu) or kernel_choice.BEST
    runs = on_gpu(gpu) and found[0] in kernel_choice.NATIVE_MAJORS and settings.prefill is None
    if not runs or not isinstance(config, DsaConfig) or config.implementation != AUTO:
        return None
    return config.model_copy(update={"implementation": NATIVE})


def give_way(settings: Settings, judge: Callable[[Settings], Settings], gpu: Gpu = None) -> Settings:
    """Judge a server's methods; where "auto" is refused, SGLang's own kernels may serve what was asked for.

    Args:
        settings: the methods; not changed.
        judge: completes or refuses them.
        gpu: the server machine's GPU; None for this machine's.

    Returns:
        What ``judge`` makes of them, or of the same with "native".

    Raises:
        SparseArgumentError: ``judge`` refuses what was asked for, and no GPU or configuration is there for "native".
    """
    try:
        return judge(settings)
    except SparseArgumentError as error:
        config = native_instead(settings, gpu)
        if config is None:
            raise
        judged = judge(replace(settings, decode=DecodeGroups(settings.decode.names, [Dsa(config)])))
        logger.info('sglang_sparse: dsa runs with "implementation": "native", as "auto" is refused: %s', error)
        return judged


def choose_kernels(args: Arguments, settings: Settings, gpu: Gpu = None) -> Settings:
    """Choose the kernels of each stage, and write the choice to the config and to SGLang's arguments.

    Args:
        args: the server's, before SGLang resolves arguments that depend on the model.
        settings: the methods; not changed.
        gpu: the server machine's GPU; None for this machine's.

    Returns:
        The methods with the choice.

    Raises:
        SparseArgumentError: the requested choice is impossible, or an argument contradicts it.
    """
    config = settings.config
    if not isinstance(config, DsaConfig) or settings.passes_through:
        return settings
    require_dtype(args, settings, _model(args).dtype, on_gpu(gpu))
    facts = _facts(args, gpu)
    if reason := kernel_choice.absent(facts):
        raise SparseArgumentError(f"{settings.flag}: {reason}", field="sglang")
    with within(f"--sparse-config of {settings.name}: implementation"):
        chosen = config.model_copy(update={"implementation": kernel_choice.resolve(config.implementation, facts)})
    if on_gpu(gpu):
        _require_drafter(args, settings)
    other = facts.capability is not None and facts.capability[0] != kernel_choice.BEST[0]
    method = Dsa(chosen)
    float8 = facts.kv_dtype.startswith("fp8") and chosen.implementation != PORTABLE
    if facts.capability is not None and (other or float8 or args.tp_size > 1):
        stages = ", ".join(f"{stage} {name}" for stage, name in method.stages.items())
        logger.warning(
            "sglang_sparse: dsa was measured on one GPU of compute capability %d.x alone, and over float8 KV with "
            "all stages portable alone; this GPU has %s, --kv-cache-dtype is %s, --tp-size %d, and it runs %s",
            *(kernel_choice.BEST[0], kernel_choice.dotted(facts.capability), facts.kv_dtype, args.tp_size, stages),
        )
    args.sparse_config = chosen.model_dump_json()
    require_stages(args, settings, method.stages, on_gpu(gpu))
    if on_gpu(gpu) and not method.native("attention"):
        replace_tilelang_backend(args, settings)
    return replace(settings, decode=DecodeGroups(settings.decode.names, [method]))


def _require_drafter(args: Arguments, settings: Settings) -> None:
    """Refuse drafts by an indexer, as the model's own layer has: a drafter keeps SGLang's kernels.

    Those would read the layout of the KV pool, and run in the place, that belong to this project's.
    """
    if not args.speculative_algorithm:
        return
    path, selects = args.speculative_draft_model_path, True
    if path and path != args.model_path:
        try:
            selects = checkpoint_config(path, args.speculative_draft_model_revision).get("index_topk") is not None
        except OSError:
            # SGLang says so.
            selects = False
    if selects:
        flag = "--speculative-algorithm"
        message = f"{settings.flag} cannot run with {flag} {args.speculative_algorithm} and these kernels: what drafts "
        message += "has an indexer, which SGLang's would run"
        allowed = '{"implementation": "native"}, or a --speculative-draft-model-path without an indexer'
        raise SparseArgumentError(message, field=flag, got=args.speculative_algorithm, allowed=allowed)


def _facts(args: Arguments, asked: Gpu) -> kernel_choice.Facts:
    """Return this machine's facts. For a GPU elsewhere assume the best one: all others refuse what it refuses."""
    import torch

    gpu, here = on_gpu(asked), torch.cuda.is_available()
    model = _model(args)
    # Whether the ranks can be divided so, SGLang judges.
    ranks = max(1, args.tp_size // max(1, args.dp_size if args.enable_dp_attention else args.attn_dp_size))
    usual = torch.cuda.get_device_capability() if here else kernel_choice.BEST
    found = (asked if isinstance(asked, tuple) else usual) if gpu else None
    blackwell = found is not None and found[0] == kernel_choice.NATIVE_MAJORS[-1]
    return kernel_choice.Facts(
        found,
        frozenset(name for name in kernel_choice.PACKAGES if gpu != here or find_spec(name)),
        args.kv_cache_dtype,
        model.num_attention_heads // ranks,
        (model.hf_text_config.kv_lora_rank, model.hf_text_config.qk_rope_head_dim),
        kernel_choice.raw_latents((args.dsa_prefill_backend, args.dsa_decode_backend), blackwell),
    )


def _model(args: Arguments) -> Any:
    # SGLang caches the result of ``get_model_config``, and its own arguments are not resolved yet.
    return args.new_model_config()

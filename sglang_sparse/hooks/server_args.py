"""Add the flags to SGLang's ``ServerArgs``, and validate them before anything is built."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_sparse.config import arguments
from sglang_sparse.config.arguments import CHAIN, CHAINS, Arguments, drafts_itself
from sglang_sparse.config.files import checkpoint_config, read_config
from sglang_sparse.config.settings import Settings, build, of_role, only_role, page_size_fields, settings_of
from sglang_sparse.config.versions import UnsupportedSGLangError, require_supported_sglang
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks import apply, dsa_flags, refusals
from sglang_sparse.hooks.judge import judge_flags, judge_model
from sglang_sparse.methods import registry
from sglang_sparse.methods.support import is_decode_server

logger = logging.getLogger(__name__)

_CONFIG = "inline JSON, or a .json, .toml or .yaml file"


class SparseServerArgs(ServerArgs, dict=True):  # type: ignore[call-arg]
    """SGLang's ``ServerArgs`` with four more fields, which replaces it."""

    sparse_method: A[str | None, Arg(help=f"Sparse decode method: {', '.join(registry.decode_methods())}.")] = None
    sparse_prefill_method: A[
        str | None, Arg(help=f"Sparse prefill method: {', '.join(registry.prefill_methods())}.")
    ] = None
    sparse_config: A[str | None, Arg(help=f"Config of the decode method: {_CONFIG}.")] = None
    sparse_prefill_config: A[str | None, Arg(help=f"Config of the prefill method: {_CONFIG}.")] = None

    def resolve_once(self) -> None:
        """Resolve SGLang's arguments, and check the sparse flags before and after.

        Raises:
            SparseArgumentError: a sparse flag, config field or combination cannot be served.
            UnsupportedSGLangError: the SGLang version is not supported, or one of its functions moved.
        """
        if getattr(self, "_resolution_finished", False) or getattr(self, "_resolution_failed", False):
            return super().resolve_once()
        args = arguments.of(self)
        _refuse_orphans(args)
        if not args.sparse_method and not args.sparse_prefill_method:
            return super().resolve_once()
        require_supported_sglang()
        apply.verify()
        settings = resolve(args)
        # Before the configs below name every field, so that only the user's own fields cause warnings.
        of_prefill = settings.prefill.warnings() if settings.prefill else ()
        settings = judge_flags(args, settings)
        _publish_config(args, settings)
        if args.sparse_prefill_method:
            _publish_prefill_config(args, settings)
        if not settings.passes_through:
            args.page_size = settings.config.page_size if args.page_size is None else args.page_size
            _choose_chain(args)
        if not _keep_phase(args, settings):
            return super().resolve_once()
        super().resolve_once()
        if args.model_path.lower() not in ("none", "dummy"):
            # Now includes settings that depend on the model.
            settings = settings_of(args) or settings
            refusals.require_after(args, settings)
            dsa_flags.disable_prefill_graphs(args, settings)
        for text in (*settings.decode.warnings(), *of_prefill):
            logger.warning("sglang_sparse: %s", text)
        # SGLang turns the paths into the flag later.
        if (args.enable_lora or args.lora_paths) and (calibrated := _calibrated(settings)):
            message = (
                "sglang_sparse: the calibration of %s is of the base model; requests with an adapter run by it, too"
            )
            logger.warning(message, calibrated)


def _calibrated(settings: Settings) -> str:
    """Name the methods that have a calibration."""
    groups = (settings.decode, *([settings.prefill] if settings.prefill else ()))
    found = [pair for group in groups for pair in zip(group.names, group.configs, strict=True)]
    return ", ".join(dict.fromkeys(name for name, config in found if getattr(config, "calibration", None)))


def _keep_phase(args: Arguments, settings: Settings) -> bool:
    """Say which method is left to the other server of a disaggregated pair; returns whether any is for this one.

    What is left to the other one still decides the page size, which both must share.
    """
    mode = only_role(args)
    kept = of_role(settings, mode)
    if kept is settings:
        return True
    left = settings.prefill_name if mode == "decode" else settings.name
    if left:
        runs = f"; this one runs {kept.flag}" if kept else "; this one runs dense"
        logger.info("sglang_sparse: --disaggregation-mode %s: %s is for the other server%s", mode, left, runs)
    if kept is None:
        args.sparse_method = args.sparse_prefill_method = args.sparse_config = args.sparse_prefill_config = None
    return kept is not None


def add_fields() -> None:
    """Replace SGLang's ``ServerArgs`` by `SparseServerArgs`.

    Raises:
        RuntimeError: SGLang already has fields of these names.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    taken = sorted(name for name in SparseServerArgs.__annotations__ if hasattr(ServerArgs, name))
    if taken:
        raise RuntimeError(f"SGLang's ServerArgs already has {', '.join(taken)}")
    register_resolution_hook("handle_model_source_paths")(refuse_model)
    HookRegistry.register("sglang.srt.server_args.ServerArgs", SparseServerArgs, HookType.REPLACE)
    # SGLang does not propagate a replacement to class attributes.
    engine: Any = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None and engine.Engine.server_args_class is ServerArgs:
        engine.Engine.server_args_class = SparseServerArgs


def _publish_config(server_args: Arguments, settings: Settings) -> None:
    if settings.name:
        server_args.sparse_config = json.dumps(settings.resolved)


def _publish_prefill_config(server_args: Arguments, settings: Settings) -> None:
    if settings.prefill:
        server_args.sparse_prefill_method = settings.prefill_name
        server_args.sparse_prefill_config = json.dumps(settings.prefill_resolved)


def refuse_model(record: object, previous: Callable[[object], None]) -> None:
    """Around SGLang's step ``handle_model_source_paths``: check the model before SGLang resolves arguments for it.

    Raises:
        SparseArgumentError: the method does not fit the model.
    """
    previous(record)
    self = arguments.of(record)
    settings = settings_of(self)
    if settings is not None and not settings.passes_through:
        fitted = refusals.fit_prefill(self, settings)
        if fitted is not settings:
            logger.info("sglang_sparse: %s sets decode alone; prefill of this model is dense", settings.flag)
        settings = judge_model(self, fitted)
        _publish_config(self, settings)
        # The prefill method may have come with the decode method.
        _publish_prefill_config(self, settings)


def resolve(server_args: Arguments) -> Settings:
    """Read and validate the user's configs, with the model's config.json if they need it.

    Raises:
        SparseArgumentError: see ``config.build``.
    """
    fields = read_config(server_args.sparse_config) if server_args.sparse_method else page_size_fields(server_args)
    if server_args.sparse_method and drafts_itself(server_args):
        fields = _unrectified(server_args.sparse_method, fields)
    prefill = read_config(server_args.sparse_prefill_config, "--sparse-prefill-config")
    names = server_args.sparse_method or None, server_args.sparse_prefill_method or None
    return build(names[0], fields, names[1], prefill, checkpoint=lambda: _config_json(server_args))


def _unrectified(method: str, fields: dict[str, object]) -> dict[str, object]:
    """Rectify nothing by default where a dense pass verifies all tokens; what the user asks for is refused later."""
    rectifies = "rectify_interval" in registry.load_decode_method(method).config_class.model_fields
    return {"rectify_interval": 0, **fields} if rectifies else fields


def _choose_chain(args: Arguments) -> None:
    """Draft chains where the user leaves all numbers to SGLang, which would draft trees for some models."""
    given = args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens
    if args.sparse_method and (args.speculative_algorithm or "").upper() in CHAINS and given == (None, None, None):
        args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens = CHAIN


def _config_json(server_args: Arguments) -> dict[str, object]:
    try:
        return checkpoint_config(server_args.model_path, server_args.revision)
    except OSError as error:
        path = server_args.model_path
        message = f"cannot read config.json of {path}: {error}"
        raise SparseArgumentError(message, field="--model-path", got=path) from error


def _refuse_orphans(server_args: Arguments) -> None:
    refusals.require_drafter(server_args)
    for config, method in (("sparse_config", "sparse_method"), ("sparse_prefill_config", "sparse_prefill_method")):
        if getattr(server_args, config) is not None and not getattr(server_args, method):
            flag, needed = (f"--{name.replace('_', '-')}" for name in (config, method))
            message = f"{flag} needs {needed}, which was not given"
            raise SparseArgumentError(message, field=flag, got=getattr(server_args, config))


def keep_prefill_graphs(original: Callable[[object], None], record: object) -> None:
    """Around ``apply_cuda_graph_disaggregation_roles``: leave a decode server the graphs of rectifying passes.

    SGLang switches graphs of prefill off there, as only the other server of a pair prefills. A server that changes its
    role keeps the graphs of both, so that none is recorded once it serves.
    """
    args = arguments.of(record)
    settings = settings_of(args)
    if not is_decode_server(args) or settings is None or not (settings.rectifies or args.enable_pd_role_switch):
        original(record)


def prepare_server_args(original: Callable[[list[str]], SparseServerArgs], argv: list[str]) -> SparseServerArgs:
    """Around ``prepare_server_args``: on the command line a refusal is one message, not a traceback.

    Raises:
        SystemExit: with status 2, as argparse does for its own errors.
    """
    try:
        server_args = original(argv)
        ours = any(getattr(server_args, name) is not None for name in SparseServerArgs.__annotations__)
        args = arguments.of(server_args)
        if ours or drafts_itself(args):
            if (args.smg_grpc_mode or args.grpc_mode) and args.tokenizer_path is None:
                # SGLang's launcher does so before it resolves, and cannot afterwards.
                args.tokenizer_path = args.model_path
            server_args.resolve_once()
        return server_args
    except (SparseArgumentError, UnsupportedSGLangError) as error:
        print(f"sglang_sparse: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None

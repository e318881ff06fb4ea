"""The flags on SGLang's ``ServerArgs``, and their validation before anything is built."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from sglang_sparse import dsa_flags, hooks, implementation, refusals, registry
from sglang_sparse.config import Settings, SparseArgumentError, build, page_size_fields, settings_of
from sglang_sparse.config_value import read_config
from sglang_sparse.versions import UnsupportedSGLangError, require_supported_sglang

if TYPE_CHECKING:
    from sglang_sparse.config import SparseServerArgs

SOURCE = "sglang_sparse"

logger = logging.getLogger(__name__)


def _help() -> dict[str, str]:
    decode = ", ".join(registry.decode_methods())
    prefill = ", ".join(registry.prefill_methods())
    return {
        "sparse_method": f"Sparse attention method of decode: {decode}.",
        "sparse_prefill_method": f"Sparse attention method of prefill: {prefill}.",
        "sparse_config": "Config of the decode method: inline JSON, or a .json, .toml or .yaml file.",
        "sparse_prefill_config": "Config of the prefill method, likewise.",
    }


def add_server_args() -> None:
    """Add the four fields to SGLang's ``ServerArgs`` dataclass in place.

    In place, because the class is bound by name in many modules and is an attribute of ``Engine``. Decorating a
    dataclass again loses two things that are put back here: the ``Field`` objects of fields with a default factory,
    and the generated methods, which ``dataclass`` does not overwrite.

    Raises:
        RuntimeError: SGLang has fields of these names itself.
    """
    from sglang.srt.arg_groups import arg_utils
    from sglang.srt.server_args import ServerArgs

    existing = dict(ServerArgs.__dataclass_fields__)
    new = _help()
    if all(name in existing for name in new):
        return
    taken = [name for name in new if name in existing or hasattr(ServerArgs, name)]
    if taken:
        raise RuntimeError(f"SGLang's ServerArgs already has {', '.join(taken)}")
    for field in existing.values():
        if field.default_factory is not dataclasses.MISSING:
            setattr(ServerArgs, field.name, field)
    for name, text in new.items():
        ServerArgs.__annotations__[name] = arg_utils.A[Optional[str], arg_utils.Arg(help=text)]  # noqa: UP045
        setattr(ServerArgs, name, None)
    documentation = ServerArgs.__doc__
    generated = ("__init__", "__repr__", "__eq__", "__hash__", "__match_args__", "__replace__")
    for name in (*generated, "__dataclass_fields__", "__dataclass_params__"):
        if name in ServerArgs.__dict__:
            delattr(ServerArgs, name)
    dataclasses.dataclass(ServerArgs)
    ServerArgs.__doc__ = documentation
    arg_utils.namespace_of.cache_clear()
    arg_utils.resolvable_fields.cache_clear()
    tokenizer_manager: Any = sys.modules.get("sglang.srt.managers.tokenizer_manager")
    if tokenizer_manager is not None:
        tokenizer_manager._SERVER_ARGS_FIELDS = frozenset(field.name for field in dataclasses.fields(ServerArgs))


def validated_post_init(original: Callable[..., None], self: SparseServerArgs) -> None:
    """Around ``ServerArgs.__post_init__``: validate what can be before SGLang resolves its own arguments, and the
    rest after.

    Raises:
        SparseArgumentError: a sparse flag, config field or combination cannot be served.
        UnsupportedSGLangError: the SGLang version is not supported, or one of its seams moved.
    """
    _refuse_orphans(self)
    if not self.sparse_method and not self.sparse_prefill_method:
        return original(self)
    require_supported_sglang()
    hooks.verify()
    settings = resolve(self)
    if settings.name:
        self.sparse_config = json.dumps(settings.resolved)
    if self.sparse_prefill_method:
        _say_prefill(self, settings)
    if self.page_size is None:
        self.page_size = settings.config.page_size
    refusals.require_before(self, settings)
    original(self)
    if self.model_path.lower() not in ("none", "dummy"):
        # What the model decides is in it by now.
        settings = settings_of(self) or settings
        refusals.require_after(self, settings)
        dsa_flags.leave_graphs(self, settings)
    for text in settings.method.warnings():
        logger.warning("sglang_sparse: %s", text)


def _say_prefill(server_args: SparseServerArgs, settings: Settings) -> None:
    if settings.prefill:
        server_args.sparse_prefill_method = settings.prefill_name
        server_args.sparse_prefill_config = json.dumps(settings.prefill_resolved)


def refuse_model(_: None, self: SparseServerArgs) -> None:
    """After ``ServerArgs._handle_model_source_paths``: the model is at hand, and SGLang has not judged it yet.

    Raises:
        SparseArgumentError: the method does not fit the model.
    """
    settings = settings_of(self)
    if settings is not None:
        fitted = refusals.fit_prefill(self, settings)
        if fitted is not settings:
            logger.info("sglang_sparse: %s sets decode alone; prefill of this model is dense", settings.flag)
        settings = fitted
        refusals.require_model(self, settings)
        # It may have come with the decode method.
        _say_prefill(self, settings)
        implementation.settle(self, settings)


def resolve(server_args: SparseServerArgs) -> Settings:
    """Read and validate the configs that a user gave, with the model's config.json where they ask for it.

    Raises:
        SparseArgumentError: see ``config.build``.
    """
    fields = read_config(server_args.sparse_config) if server_args.sparse_method else page_size_fields(server_args)
    prefill = read_config(server_args.sparse_prefill_config, "--sparse-prefill-config")
    names = server_args.sparse_method or None, server_args.sparse_prefill_method or None
    return build(names[0], fields, names[1], prefill, checkpoint=lambda: _config_json(server_args))


def _config_json(server_args: SparseServerArgs) -> dict[str, Any]:
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(server_args.model_path, revision=server_args.revision)[0]
    except OSError as error:
        raise SparseArgumentError(f"cannot read config.json of {server_args.model_path}: {error}") from error


def _refuse_orphans(server_args: SparseServerArgs) -> None:
    for config, method in (("sparse_config", "sparse_method"), ("sparse_prefill_config", "sparse_prefill_method")):
        if getattr(server_args, config) is not None and not getattr(server_args, method):
            flag, needed = (f"--{name.replace('_', '-')}" for name in (config, method))
            raise SparseArgumentError(f"{flag} needs {needed}, which was not given")


def prepare_server_args(original: Callable[[list[str]], SparseServerArgs], argv: list[str]) -> SparseServerArgs:
    """Around ``prepare_server_args``: on the command line a refusal is one message, not a traceback.

    Raises:
        SystemExit: with status 2, as argparse does for its own errors.
    """
    try:
        return original(argv)
    except (SparseArgumentError, UnsupportedSGLangError) as error:
        print(f"sglang_sparse: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None

"""Tests of which functions of SGLang are hooked on which machine, and when."""

import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import save_file
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_sparse import plugin
from sglang_sparse.config.settings import build as config_of
from sglang_sparse.config.versions import SUPPORTED_SGLANG
from sglang_sparse.hooks import apply as hooks
from sglang_sparse.hooks import model_runner
from sglang_sparse.hooks.refusals import require_weights

PLAIN = {"enable_deterministic_inference": False, "rl_on_policy_target": None}


@pytest.mark.parametrize("gpu", [False, True])
def test_a_gpu_machine_imports_nothing_for_methods_that_do_not_run(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    here = [hook for hook in hooks.HOOKS if hook.gpu in (None, gpu)]
    expected = [hook for hook in here if not gpu or hook.method is None]
    assert hooks.active.__wrapped__() == tuple(expected)
    assert "sglang.srt.model_executor.model_runner.ModelRunner.load_model" in [hook.target for hook in expected]


def test_hooks_reach_every_name_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def original() -> None: ...
    def wrapped() -> None: ...
    def again() -> None: ...

    assert hook_registry._propagate_patch.__module__ == "sglang_sparse.hooks.bindings"
    modules = [ModuleType(name) for name in ("owner", "user", "later")]
    for module in modules:
        module.name = module.alias = original  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        expected = 2 if module.__name__ != "owner" else 0
        assert hook_registry._propagate_patch(original, wrapped, modules[0]) == expected
    assert [(module.name, module.alias) for module in modules] == [(original,) * 2, (wrapped,) * 2, (wrapped,) * 2]
    # A second hook, of a name that a module has imported, replaces the first one everywhere.
    assert hook_registry._propagate_patch(wrapped, again, modules[1]) == 2
    assert [module.name for module in modules] == [original, wrapped, again]


@pytest.mark.parametrize(("method", "config"), [("dsa", "{}"), ("resa", "{}"), (None, None)])
def test_a_gpu_server_hooks_what_its_own_method_needs_before_the_model(
    method: str | None, config: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: hooked.append(target))
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: HookRegistry._patched.update(hooked))
    args = {"sparse_method": method, "sparse_prefill_method": None, "sparse_config": config, "load_format": "dummy"}
    runner = SimpleNamespace(
        server_args=SimpleNamespace(**args, **PLAIN), model_config=None, model=None, is_draft_worker=False
    )
    monkeypatch.setattr(model_runner, "require_layers", lambda *_: None)
    loaded: list[list[str]] = []
    model_runner.hook_method(lambda _: loaded.append(list(hooked)), runner)
    expected = [hook.target for hook in hooks.HOOKS if hook.method == "dsa" and hook.gpu is not False]
    assert loaded == [expected if method == "dsa" else []]
    assert len(expected) == 7 and not any(target.endswith("forward_native") for target in expected)
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    if method == "dsa":
        with pytest.raises(RuntimeError, match="forward_cuda"):
            model_runner.hook_method(lambda _: None, runner)


def test_weights_that_came_with_the_load_are_judged_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name alone: nothing is at hand before."""
    flags = {"sparse_method": "dsa", "sparse_prefill_method": None, "sparse_config": "{}", "load_format": "auto"}
    args: Any = SimpleNamespace(**flags, **PLAIN)
    text = SimpleNamespace(index_n_heads=32, index_head_dim=128)
    names = {"model_path": "someone/model", "revision": None, "num_hidden_layers": 2}
    config = SimpleNamespace(**names, hf_text_config=text, hf_config=SimpleNamespace(architectures=["Deepseek"]))
    names = {"model_config": config, "model": None, "is_draft_worker": False}
    runner, here = SimpleNamespace(server_args=args, **names), []
    monkeypatch.setattr(model_runner, "require_layers", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: here[-1] if here else None)
    monkeypatch.setattr(hooks, "verify", lambda _: None)
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)

    def download(_: object) -> None:
        save_file({"model.layers.0.self_attn.o_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
        here.append(str(tmp_path / "config.json"))

    settings = config_of("dsa", {})
    require_weights(args, settings, config)
    assert "whether the weights of someone/model hold its indexers is not known" in caplog.text
    with refused("--model-path", "Deepseek"):
        model_runner.hook_method(download, runner)
    args.sparse_method, args.sparse_config = "resa", config_of("resa", {}).config.model_dump_json()
    model_runner.hook_method(download, runner)


@pytest.mark.parametrize("hook", [hook for hook in hooks.HOOKS if hook.gpu], ids=lambda hook: hook.function)
def test_what_only_a_gpu_calls_has_the_arguments_that_its_hook_takes(hook: hooks.Hook) -> None:
    theirs = inspect.signature(pkgutil.resolve_name(hook.target)).parameters
    ours = pkgutil.resolve_name(f"sglang_sparse.{hook.function}")
    # The function itself comes first.
    mine = list(inspect.signature(ours).parameters.values())[1:]
    assert [value.default for value in mine] == [value.default for value in theirs.values()]
    named = [value.name for value in mine if value.default is not inspect.Parameter.empty]
    assert named == [name for name in theirs if name in named]


def test_what_the_gpu_path_reads_of_sglang_is_there() -> None:
    backend = pkgutil.resolve_name("sglang.srt.layers.attention.dsa_backend")
    fields = set(backend.DSAMetadata.__dataclass_fields__)
    assert {"real_page_table", "dsa_seqlens_expanded", "token_to_batch_idx", "topk_indices_offset"} <= fields
    assert "self.use_fused_topk = " in inspect.getsource(backend.DeepseekSparseAttnBackend.__init__)
    indexer = pkgutil.resolve_name("sglang.srt.layers.attention.dsa.dsa_indexer.Indexer")
    assert callable(indexer._weights_proj_bf16_in_fp32_out) and callable(indexer._get_q_k_bf16)


def test_sglang_refuses_float8_latents_in_one_place_which_is_hooked() -> None:
    """``dsa_flags.keep_replaced_backend`` stands around what calls the one function that refuses them."""
    overrides = pkgutil.resolve_name("sglang.srt.arg_groups.overrides")
    name = "_check_dsa_backend_constraints("
    found = [inspect.getsource(source).count(name) for source in (overrides, overrides._dsa_split_backend_resolution)]
    # In the whole file its definition, and a function that nobody calls, besides.
    assert found == [4, 2]
    (hooked,) = (hook for hook in hooks.HOOKS if hook.function == "hooks.dsa_flags:keep_replaced_backend")
    assert hooked.target == f"{overrides.__name__}._dsa_split_backend_resolution"


def test_an_sglang_that_takes_no_hook_is_named_with_the_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs what a plugin raises and serves dense; where sparsity is asked for, the process ends instead."""

    def register() -> None:
        raise ValueError("no resolution step of this name")

    monkeypatch.setattr(hooks, "register", register)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--sparse-method", "resa"])
    with pytest.raises(
        SystemExit, match=rf"no resolution step of this name.*pip install sglang=={SUPPORTED_SGLANG[-1]}"
    ):
        plugin.register()
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    with pytest.raises(ValueError, match="no resolution step"):
        plugin.register()

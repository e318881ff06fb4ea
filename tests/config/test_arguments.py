"""Arguments that a server resolves, and those refused that need a file or a patch; see ``test_wording.py``."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_configs import CONFIGS, write_config
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs, prepare_server_args
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_sparse.config import settings as config
from sglang_sparse.config import versions
from sglang_sparse.hooks import apply as hooks
from sglang_sparse.hooks import refusals
from sglang_sparse.methods import registry


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")


def resolve(model: str, **kwargs: object) -> ServerArgs:
    return ServerArgs(model_path=model, **{"sparse_method": "resa", **kwargs})


def test_defaults_resolve(qwen3: str) -> None:
    args = resolve(qwen3)
    assert args.page_size == 16
    assert json.loads(args.sparse_config)["active_ratio"] == 0.1


def test_bad_config_files(qwen3: str, tmp_path: Path) -> None:
    for name, text in (("a.toml", "active_ratio ="), ("a.yaml", "active_ratio: [1"), ("a.json", "{")):
        path = tmp_path / name
        path.write_text(text)
        with refused("--sparse-config", str(path)):
            resolve(qwen3, sparse_config=str(path))
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with refused("--sparse-config", str(binary)):
        resolve(qwen3, sparse_config=str(binary))
    not_a_mapping = tmp_path / "list.yaml"
    not_a_mapping.write_text("- 1\n")
    with refused("--sparse-config", [1]):
        resolve(qwen3, sparse_config=str(not_a_mapping))


@pytest.mark.parametrize("suffix", ["json", "toml", "yaml"])
def test_config_files_and_mappings_say_the_same(qwen3: str, tmp_path: Path, suffix: str) -> None:
    text = {"json": '{"active_ratio": 0.25}', "toml": "active_ratio = 0.25", "yaml": "active_ratio: 0.25"}[suffix]
    path = tmp_path / f"config.{suffix}"
    path.write_text(text)
    from_file = resolve(qwen3, sparse_config=str(path))
    from_mapping = resolve(qwen3, sparse_config={"active_ratio": 0.25})
    assert json.loads(from_file.sparse_config) == json.loads(from_mapping.sparse_config)
    assert json.loads(from_file.sparse_config)["active_ratio"] == 0.25


def test_what_only_names_hidden_states_drafts_nothing(qwen3: str) -> None:
    named: dict[str, object] = {"enable_return_aux_hidden_states": True, "speculative_algorithm": "EAGLE3"}
    for method in ("resa", "rocketkv"):
        assert resolve(qwen3, sparse_method=method, **named).sparse_method == method


def test_rocketkv_fits_the_model(qwen3: str) -> None:
    assert resolve(qwen3, sparse_method="rocketkv", sparse_config={"eviction": "compact", "topr": 64}).sparse_config


def test_heads_too_small_for_centroids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "head_dim": 16}))
    with refused("--model-path", "Qwen3ForCausalLM"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path), sparse_config={"summary": "minmax"}).sparse_method == "resa"


def test_mixed_chunk_without_compaction(qwen3: str) -> None:
    visibility: dict[str, object] = {"sparse_method": "rocketkv", "sparse_config": {"eviction": "visibility"}}
    compact = {**visibility, "sparse_config": {"eviction": "compact"}}
    assert resolve(qwen3, enable_mixed_chunk=True, **visibility).enable_mixed_chunk
    assert resolve(qwen3, **compact).sparse_method == "rocketkv"


def test_full_prefill_graphs(qwen3: str) -> None:
    args: Any = resolve(qwen3)
    args.cuda_graph_config = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
    with refused("--cuda-graph-backend-prefill", "full"):
        refusals.require_after(args, config.settings_of(args))


def test_a_third_party_method_that_leads_nowhere(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DECODE_METHODS", {"broken": "no_such_package:Method"})
    with refused("--sparse-method", "broken"):
        resolve(qwen3, sparse_method="broken")


def test_unsupported_sglang_names_both_versions(
    qwen3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "installed_sglang", lambda: "0.5.17")
    with pytest.raises(versions.UnsupportedSGLangError) as caught:
        resolve(qwen3)
    assert (caught.value.got, caught.value.allowed) == ("0.5.17", ("0.5.23",))
    with pytest.raises(SystemExit) as ended:
        prepare_server_args(["--model-path", qwen3, "--sparse-method", "resa"])
    assert ended.value.code == 2
    assert str(caught.value) in capsys.readouterr().err


def test_a_moved_seam_is_named(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = hooks.HOOKS[0].target
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(RuntimeError, match=target.replace(".", r"\.")):
        resolve(qwen3)


def test_command_line_prints_one_message(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare_server_args(["--model-path", qwen3, "--sparse-method", "reza"])
    assert ended.value.code == 2
    with refused("--sparse-method", "reza") as caught:
        resolve(qwen3, sparse_method="reza")
    assert capsys.readouterr().err.strip() == f"sglang_sparse: error: {caught.value}"


def test_flags_in_sglangs_own_config_file(qwen3: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model-path: {qwen3}\nsparse-method: resa\nsparse-config: '{{\"active_ratio\": 0.2}}'\n")
    args = prepare_server_args(["--config", str(path)])
    assert json.loads(args.sparse_config)["active_ratio"] == 0.2


def test_what_a_server_has_told_its_method_outlives_another_server(tmp_path: Path) -> None:
    """A process may hold the arguments of several servers: the method of one is not made anew by the next."""
    model = write_config(tmp_path, "qwen3")
    first, second = (
        ServerArgs(model_path=model, sparse_method="resa", sparse_config={"active_ratio": ratio})
        for ratio in (0.3, 0.4)
    )
    method = config.settings_of(first).method
    assert config.settings_of(second).method is not method
    assert config.settings_of(first).method is method

"""Bad input: each case ends with one message that says what was wrong, what was got and what is allowed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_configs import CONFIGS, write_config
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


def refused(model: str, **kwargs: object) -> str:
    with pytest.raises(ValueError) as caught:
        resolve(model, **kwargs)
    return str(caught.value)


def test_defaults_resolve(qwen3: str) -> None:
    args = resolve(qwen3)
    assert args.page_size == 16
    assert json.loads(args.sparse_config)["active_ratio"] == 0.1


def test_unknown_method_names_the_list_and_the_nearest(qwen3: str) -> None:
    message = refused(qwen3, sparse_method="reza")
    assert "got 'reza'" in message and "allowed: dsa, resa" in message and "did you mean 'resa'" in message


def test_unknown_prefill_method(qwen3: str) -> None:
    for method in ("resa", None):
        message = refused(qwen3, sparse_method=method, sparse_prefill_method="ankor")
        assert "--sparse-prefill-method: got 'ankor', allowed: anchor, skip_softmax; did you mean 'anchor'?" in message


def test_config_without_method(qwen3: str) -> None:
    assert "needs --sparse-method" in refused(qwen3, sparse_method=None, sparse_config="{}")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"active_ration": 0.1}', ["unknown field 'active_ration'", "did you mean 'active_ratio'", "min_pages"]),
        ('{"active_ratio": "a tenth"}', ["active_ratio: got 'a tenth'", "number"]),
        ('{"active_ratio": 0}', ["active_ratio: got 0", "greater than 0"]),
        ('{"active_ratio": 1.5}', ["active_ratio: got 1.5", "less than or equal to 1"]),
        ('{"active_ratio": NaN}', ["active_ratio: got nan"]),
        ('{"min_pages": true}', ["min_pages: got True", "integer"]),
        ('{"min_pages": 0}', ["min_pages: got 0"]),
        ('{"local_pages": 20}', ["local_pages: got 20", "at most min_pages (16)"]),
        ('{"min_pages": 1, "local_pages": 2}', ["local_pages: got 2", "at most min_pages (1)"]),
        ('{"min_seq_len": -1}', ["min_seq_len: got -1"]),
        ('{"summary_dtype": "int8"}', ["summary_dtype: got 'int8'", "'auto', 'bf16' or 'fp8'"]),
        ('{"summary": "mean"}', ["summary: got 'mean'", "'minmax' or 'centroids'"]),
        ('{"group": "max"}', ["group: got 'max'", "'mean_query' or 'vote'"]),
        ('{"summary": "minmax", "centroids": 4}', ["centroids: got 4", "needs summary \"centroids\", got 'minmax'"]),
        ('{"centroids": 4, "page_size": 2}', ["centroids: got 4", "at most page_size (2)"]),
        ('{"centroids": 9}', ["centroids: got 9", "less than or equal to 8"]),
        ('{"dense_fallback": "sometimes"}', ["dense_fallback: got 'sometimes'", "'auto' or 'never'"]),
        ('{"page_size": 24}', ["page_size: got 24", "power of two from 1 to 64"]),
        ('{"page_size": 128}', ["page_size: got 128", "power of two from 1 to 64"]),
        ('{"rectify_interval": 1}', ["rectify_interval: got 1", "0 (never) or at least 2"]),
        ('{"rectify_interval": -1}', ["rectify_interval: got -1", "greater than or equal to 0"]),
        ('{"rectify_interval": 8.5}', ["rectify_interval: got 8.5", "integer"]),
        ('{"rectify_interval": true}', ["rectify_interval: got True", "integer"]),
        ('{"rectify_interval": 4097}', ["rectify_interval: got 4097", "context length of 4096"]),
        ('{"rectify_max_batch": 0}', ["rectify_max_batch: got 0", "greater than or equal to 1"]),
        (
            '{"rectify_interval": 0, "rectify_on_finish": true}',
            ["rectify_on_finish: got True", "rectify_interval is 0 (never)"],
        ),
        ('{"layers": "two"}', ["layers: got 'two'", '"2-"']),
        ('{"layers": "0-9"}', ["layers '0-9'", "layers 0 to 3"]),
        ('{"layers": [7]}', ["layers '7'", "layers 0 to 3"]),
        ('{"active_ratio": 0.1', ["not valid JSON"]),
        ("[1]", ["inline JSON", ".toml"]),
        ("resa.ini", ["got 'resa.ini'", ".yaml"]),
        ("missing.toml", ["cannot read 'missing.toml'"]),
    ],
)
def test_bad_config(qwen3: str, config: str, expected: list[str]) -> None:
    message = refused(qwen3, sparse_config=config)
    for part in expected:
        assert part in message


def test_bad_config_files(qwen3: str, tmp_path: Path) -> None:
    for name, text in (("a.toml", "active_ratio ="), ("a.yaml", "active_ratio: [1"), ("a.json", "{")):
        path = tmp_path / name
        path.write_text(text)
        assert f"not valid {path.suffix[1:].upper()}" in refused(qwen3, sparse_config=str(path))
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in refused(qwen3, sparse_config=str(binary))
    not_a_mapping = tmp_path / "list.yaml"
    not_a_mapping.write_text("- 1\n")
    assert "got a list, allowed: a mapping" in refused(qwen3, sparse_config=str(not_a_mapping))
    assert "got int" in refused(qwen3, sparse_config=7)


@pytest.mark.parametrize("suffix", ["json", "toml", "yaml"])
def test_config_files_and_mappings_say_the_same(qwen3: str, tmp_path: Path, suffix: str) -> None:
    text = {"json": '{"active_ratio": 0.25}', "toml": "active_ratio = 0.25", "yaml": "active_ratio: 0.25"}[suffix]
    path = tmp_path / f"config.{suffix}"
    path.write_text(text)
    from_file = resolve(qwen3, sparse_config=str(path))
    from_mapping = resolve(qwen3, sparse_config={"active_ratio": 0.25})
    assert json.loads(from_file.sparse_config) == json.loads(from_mapping.sparse_config)
    assert json.loads(from_file.sparse_config)["active_ratio"] == 0.25


def test_page_size_conflict(qwen3: str) -> None:
    message = refused(qwen3, page_size=32)
    assert "server's page size is 32" in message and "config's is 16" in message and "--page-size 16" in message


def test_an_interval_longer_than_a_chunk(qwen3: str) -> None:
    message = refused(qwen3, chunked_prefill_size=1024, sparse_config={"rectify_interval": 2048})
    assert "rectify_interval: got 2048, allowed: at most the chunked prefill size of 1024" in message


def test_mixed_chunk_without_rectification(qwen3: str) -> None:
    assert resolve(qwen3, enable_mixed_chunk=True, sparse_config={"rectify_interval": 0}).enable_mixed_chunk


def test_rocketkv_must_fit_the_model(qwen3: str) -> None:
    message = refused(qwen3, sparse_method="rocketkv", sparse_config={"topr": 65})
    assert (
        "--sparse-method rocketkv does not fit Qwen3ForCausalLM: topr is 65; allowed: at most its head_dim, 64"
        in message
    )
    for layers in ("1-", {"0": "dense", "1-": {}}):
        message = refused(qwen3, sparse_method="rocketkv", sparse_config={"eviction": "compact", "layers": layers})
        assert 'eviction is "compact" and layers is \'1-\'; allowed: "all" of its 4' in message
    assert resolve(qwen3, sparse_method="rocketkv", sparse_config={"eviction": "compact", "topr": 64}).sparse_config


def test_heads_too_small_for_centroids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "head_dim": 16}))
    message = refused(str(tmp_path))
    assert "summary: got 'centroids' and the model's head_dim is 16; allowed: an even one of at least 32" in message
    assert resolve(str(tmp_path), sparse_config={"summary": "minmax"}).sparse_method == "resa"


def test_mixed_chunk_without_compaction(qwen3: str) -> None:
    visibility: dict[str, object] = {"sparse_method": "rocketkv", "sparse_config": {"eviction": "visibility"}}
    compact = {**visibility, "sparse_config": {"eviction": "compact"}}
    assert resolve(qwen3, enable_mixed_chunk=True, **visibility).enable_mixed_chunk
    assert resolve(qwen3, **compact).sparse_method == "rocketkv"
    said = refused(qwen3, enable_mixed_chunk=True, **compact)
    assert 'allowed without compaction: {"eviction": "visibility"}' in said


def test_on_finish_without_a_prefix_cache(qwen3: str) -> None:
    message = refused(qwen3, disable_radix_cache=True, sparse_config={"rectify_on_finish": True})
    assert "rectify_on_finish has no use with --disable-radix-cache" in message


def test_dtypes_that_the_kernels_cannot_read(qwen3: str) -> None:
    message = refused(qwen3, dtype="float16", kv_cache_dtype="bf16")
    assert "KV cache dtype is bf16 and the model's is float16" in message and "allowed: auto, fp8_e4m3" in message
    assert "torch_native writes fp8 KV without its scales" in refused(qwen3, kv_cache_dtype="fp8_e4m3")


def test_full_prefill_graphs(qwen3: str) -> None:
    args: Any = resolve(qwen3)
    args.cuda_graph_config = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
    with pytest.raises(ValueError, match="'full' would not refresh the summaries; allowed: breakable"):
        refusals.require_after(args, config.settings_of(args))


def test_a_third_party_method_that_leads_nowhere(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DECODE_METHODS", {"broken": "no_such_package:Method"})
    assert "--sparse-method broken: cannot load 'no_such_package:Method'" in refused(qwen3, sparse_method="broken")


def test_gpu_only_flag_without_a_gpu(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = refused(qwen3, attention_backend="fa3")
    assert "--attention-backend fa3 needs a GPU" in message and "torch_native" in message


def test_unsupported_sglang_names_both_versions(
    qwen3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "installed_sglang", lambda: "0.5.17")
    expected = "got SGLang 0.5.17; sglang_sparse 0.2.0 works with SGLang 0.5.23: pip install sglang==0.5.23"
    assert expected in refused(qwen3)
    with pytest.raises(SystemExit) as caught:
        prepare_server_args(["--model-path", qwen3, "--sparse-method", "resa"])
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_moved_seam_is_named(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = hooks.SEAMS[-1].target
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(RuntimeError, match=target.replace(".", r"\.")):
        resolve(qwen3)


def test_command_line_prints_one_message(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare_server_args(["--model-path", qwen3, "--sparse-method", "reza"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip() == (
        "sglang_sparse: error: --sparse-method: got 'reza', allowed: dsa, resa, robsa, rocketkv, skip_softmax; did you "
        "mean 'resa'?"
    )


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

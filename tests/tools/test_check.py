"""Tests of ``sglang_sparse.check``: its answers are those of a start and of README."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import write_config
from sglang.srt.plugins import load_plugins
from third_parties import install

load_plugins()

from resolved import ServerArgs

from sglang_sparse import check
from sglang_sparse.hooks import backends, deterministic, limits, model_limits, refusals
from sglang_sparse.hooks.model_kinds import MODEL_KINDS
from sglang_sparse.methods import registry, support
from sglang_sparse.methods.dsa import decode
from sglang_sparse.methods.support import KINDS
from sglang_sparse.tools import doc_tables, dry_run, recipes, support_matrix
from sglang_sparse.tools.doc_tables import PARTS
from sglang_sparse.tools.support_matrix import FLAGS, UNRECTIFIED, Method, Place

ROOT = Path(__file__).parent.parent.parent
# Of methods; the page of their quality is of all of them.
DOCS = ROOT / "sglang_sparse" / "docs"
PAGES = sorted((DOCS / "methods").glob("*.md"))
# By document, the tables that it may not leave out.
WANTED = {
    ROOT / "README.md": {"glance"},
    DOCS / "compatibility.md": doc_tables.BLOCKS.keys(),
    **{path: {f"{part}-{path.stem}" for part in PARTS} for path in PAGES},
}
METHODS = support_matrix.methods()
RESA = Method("resa", False)


def start(method: Method, kind: str, fields: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    """Start as a server does, on this machine."""
    config = "sparse_prefill_config" if method.prefill else "sparse_config"
    asked = {"model_path": support_matrix._checkpoint(kind).name, method.option: method.name, config: dict(fields)}
    try:
        ServerArgs(**{**asked, **changes})
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", WANTED, ids=lambda path: path.stem)
def test_documents_say_what_is_asked(path: Path) -> None:
    text = path.read_text()
    assert doc_tables.fill(text) == text, "run: python -m sglang_sparse.check --markdown README.md sglang_sparse/docs"
    assert {name for _, name, *_ in doc_tables.BLOCK.findall(text)} >= WANTED[path]


def test_the_tables_are_printed_without_pytorch() -> None:
    asks = "import sys; from sglang_sparse import check; check.main([]); sys.exit('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", asks], check=True, capture_output=True, text=True).stdout
    assert all(made() in printed for made in doc_tables.BLOCKS.values())


def test_every_method_has_a_page_that_readme_links() -> None:
    assert {path.stem for path in PAGES} == {method.name for method in METHODS}
    readme = (ROOT / "README.md").read_text()
    assert all(f"(sglang_sparse/docs/methods/{path.name})" in readme for path in PAGES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the CPU platform")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_answers_are_those_of_a_start(method: Method) -> None:
    served = support_matrix.place_of(method)
    for kind in KINDS:
        found = support_matrix.answer(method, Place(kind, gpu=False))
        assert start(method, kind, {}, {}) == found.reason
        assert found.served == (start(method, kind, found.fields, {}) is None)
    for changes in FLAGS:
        if "kv_cache_dtype" in changes and method.name == "dsa":
            continue  # The platform refuses it first, in other words.
        found = support_matrix.answer(method, Place(served.kind, False, served.fields), changes)
        assert start(method, served.kind, served.fields, changes) == found.reason, changes
        assert found.served == (start(method, served.kind, {**served.fields, **found.fields}, changes) is None), changes


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the CPU platform")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_page_sizes_and_partners_are_those_of_a_start(method: Method) -> None:
    served = support_matrix.place_of(method)
    for size in support_matrix.PAGE_SIZES:
        fields = served.fields if method.prefill else {**served.fields, "page_size": size}
        refused = start(method, served.kind, fields, {"page_size": size})
        assert (size in support_matrix.page_sizes(method)) == (refused is None), refused
    for other in METHODS:
        if other.prefill != method.prefill:
            refused = start(
                method, served.kind, served.fields, {other.option: other.name, "chunked_prefill_size": 4096}
            )
            assert (other.name in support_matrix.partners(method)) == (refused is None), refused


def test_the_known_cells() -> None:
    mixed = support_matrix.answer(RESA, Place("MHA/GQA", gpu=True), {"enable_mixed_chunk": True, "pp_size": 2})
    assert mixed.served and mixed.fields == UNRECTIFIED and "cannot rectify with mixed chunk" in str(mixed.reason)
    assert not support_matrix.answer(RESA, Place("MLA", gpu=True)).served
    assert support_matrix.backends(RESA, gpu=True) == backends.DENSE_BACKENDS["MHA"]
    assert support_matrix.backends(RESA, gpu=False) == ("torch_native",)
    assert support_matrix.page_sizes(Method("dsa", False)) == (decode.INDEXER_PAGE,)
    assert "anchor" in support_matrix.partners(RESA)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_gpus_that_are_not_at_hand(method: Method) -> None:
    """The tables' answer for a GPU is that of a start there."""
    said = {gpu: doc_tables.on_gpu(method, gpu) for gpu in (*doc_tables.GPUS, (7, 5))}
    for gpu, words in said.items():
        place = dataclasses.replace(support_matrix.place_of(method), gpu=gpu)
        refused_at_all = support_matrix.refusal(method, place)
        assert words.startswith("yes") == (refused_at_all is None)
        assert (words == "no") == ((method.name, gpu) == ("dsa", (7, 5)))
        refused = [support_matrix.refusal(method, place, flag) or "" for flag in doc_tables.FLOAT8]
        too_old = any("8.9 or later, and this one has" in reason for reason in refused)
        assert ("no float8 KV" in words) == too_old == (method.name not in ("dsa", "rocketkv") and gpu < (8, 9))
    if method.name == "dsa":
        assert said[7, 5] == "no" and "(portable kernels)" in said[8, 0]
        assert "native" in said[9, 0] and "native" in said[10, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a GPU that is not here")
def test_what_the_cpu_platform_alone_refuses_is_no_limit_of_a_method() -> None:
    flag = {"kv_cache_dtype": "fp8_e4m3"}
    on_gpu = support_matrix.place_of(RESA)
    on_cpu = Place(on_gpu.kind, False, on_gpu.fields)
    assert on_gpu.gpu and "torch_native writes fp8 KV without" in str(support_matrix.refusal(RESA, on_cpu, flag))
    assert support_matrix.flag_answer(RESA, flag) == support_matrix.Answer(True)
    assert not any("torch_native" in reason for _, reason in doc_tables.refused_by(RESA))
    # What a GPU refuses, too, is a limit.
    assert not support_matrix.flag_answer(RESA, {"kv_cache_dtype": "fp8_e5m2"}).served


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a GPU that is not here")
def test_float8_latents_are_served_with_a_gpu_and_without() -> None:
    dsa = Method("dsa", False)
    places = [Place("DSA", gpu) for gpu in (True, False)]
    assert [support_matrix.refusal(dsa, place, {"kv_cache_dtype": "fp8_e4m3"}) for place in places] == [None, None]


def test_a_method_of_both_phases_has_two_columns_that_tell_them_apart() -> None:
    head, _, *rows = doc_tables.features_table().splitlines()
    assert [name for name in head.split(" | ") if "skip_softmax" in name] == [
        "skip_softmax",
        "skip_softmax (prefill) |",
    ]
    (unscaled,) = (row for row in rows if row.startswith("| `--kv-cache-dtype fp8_e4m3` |"))
    assert unscaled.endswith("| no | no | no |"), "its own prefill comes with the decode method"
    (why,) = (row for row in doc_tables.refusals_table().splitlines() if row.startswith("| multi-item scoring |"))
    assert why.split(" | ")[1] == "skip_softmax, anchor, skip_softmax (prefill)"
    flags = ("`--sparse-method skip_softmax` | prefill, decode |", "`--sparse-prefill-method skip_softmax` | prefill |")
    assert all(flag in doc_tables.methods_table() for flag in flags)


def test_a_new_limit_is_a_no_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    place, flag = Place("MHA/GQA", gpu=True), {"tp_size": 2}
    assert support_matrix.answer(RESA, place, flag).served
    limit = support.FlagLimit("tensor parallelism", lambda args: args.tp_size if args.tp_size > 1 else None, "why")
    monkeypatch.setattr(refusals, "FLAG_LIMITS", (*limits.FLAG_LIMITS, limit))
    found = support_matrix.answer(RESA, place, flag)
    assert not found.served and "tensor parallelism (got 2): why" in str(found.reason)


def test_a_new_method_is_a_row_and_a_column_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PREFILL_METHODS, "stripes", registry.PREFILL_METHODS["anchor"])
    models = "MHA/GQA, windowed MHA/GQA, chunked MHA/GQA"
    assert f"`--sparse-prefill-method stripes` | prefill | {models} |" in doc_tables.methods_table()
    head, _, *rows = doc_tables.features_table().splitlines()
    assert head.endswith("| stripes |")
    assert next(row for row in rows if row.startswith("| `--kv-cache-dtype fp8_e4m3` |")).endswith("| no |")


def test_a_method_that_cannot_be_loaded_is_a_row_with_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = doc_tables.methods_table()
    install(tmp_path, monkeypatch, "import no_such_package")
    why = "cannot load 'broken_method:Method': No module named 'no_such_package'"
    assert check.main([]) == 0
    printed = capsys.readouterr().out
    assert f"| {why} | `--sparse-method broken` |" in printed and others in printed
    assert check.main(["--model-path", write_config(tmp_path, "qwen3")]) == 0
    printed = capsys.readouterr().out
    assert f"| `--sparse-method broken` | no | {why} |" in printed
    assert "| `--sparse-method resa` | yes |" in printed


def test_every_limit_is_in_the_tables() -> None:
    rows = doc_tables.refusals_table().splitlines()
    everyone = (*limits.FLAG_LIMITS, *model_limits.MODEL_LIMITS, *limits.PREFILL_LIMITS, *limits.RECTIFY_LIMITS)
    everyone += (*limits.COMPACT_LIMITS, *limits.DECODE_LIMITS, *limits.VERIFY_LIMITS)
    everyone += (*deterministic.DETERMINISTIC_LIMITS, *(limit for kind in MODEL_KINDS for limit in kind.limits))
    drafts = doc_tables.drafts_table().splitlines()
    for limit in limits.DRAFT_LIMITS:
        assert any(limit.name in row and row.endswith(f"| {limit.reason} |") for row in drafts), limit.name
    for limit in (*everyone, *decode.INDEXER_LIMITS):
        assert any(limit.name in row and row.endswith(f"| {limit.reason} |") for row in rows), limit.name
    for limit in decode.INDEXER_LIMITS:
        assert f"| {limit.name} | dsa | {limit.reason} |" in rows
    assert any(row.startswith("| other speculative algorithms | all |") for row in rows)
    assert any(row.startswith("| speculative decoding | robsa, rocketkv, skip_softmax |") for row in rows)
    assert any(row.startswith("| multi-item scoring | ") and " resa" not in row for row in rows)


def test_arguments_with_a_method_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path, "qwen3")
    assert check.main(["--model-path", model, "--sparse-method", "resa"]) == 0
    assert '"active_ratio": 0.1' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        check.main(["--model-path", model, "--sparse-method", "resa", "--enable-pdmux"])
    assert "cannot run with PD multiplexing" in capsys.readouterr().err


def test_a_server_that_decodes_losslessly_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model-path", write_config(tmp_path, "qwen3"), "--speculative-algorithm", "SPARSE_SELF"]
    assert check.main([*asked, "--sparse-method", "resa"]) == 0
    assert '"rectify_interval": 0' in capsys.readouterr().out
    for refused, why in {
        ("--sparse-method", "resa", "--speculative-num-steps", "17"): "allowed: 1 to 16 drafts",
        ("--sparse-prefill-method", "anchor"): "needs --sparse-method",
    }.items():
        with pytest.raises(SystemExit):
            check.main([*asked, *refused])
        assert why in capsys.readouterr().err
        assert why in str(dry_run.refusal([*asked, *refused], "MHA/GQA", gpu=False))
    assert check.main(asked) == 0
    said = capsys.readouterr().out
    assert said.startswith("these arguments start no server: SPARSE_SELF needs --sparse-method")
    assert "| `--sparse-method resa` | yes |" in said
    assert "| `--sparse-prefill-method anchor` | no | --speculative-algorithm SPARSE_SELF needs" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the CPU platform")
def test_arguments_without_a_method_are_put_to_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path, "qwen3")
    assert check.main(["--model-path", model, "--enable-mixed-chunk", "--pp-size", "2"]) == 0
    said, logged = capsys.readouterr()
    assert said.startswith("these arguments start a dense server")
    assert "| `--sparse-method resa` | no | cannot rectify with mixed chunk" in said
    assert "| `--sparse-method dsa` | no | does not fit Qwen3ForCausalLM: dsa needs a model with a trained" in said
    assert "| `--sparse-prefill-method anchor` | yes |" in said
    assert said.count("| yes |") + said.count("| no |") == len(METHODS)
    assert logged.count("serving on the CPU in plain PyTorch") == 1


def test_a_model_with_dual_chunk_attention_is_told_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model-path", write_config(tmp_path, "dual_chunk")]
    assert check.main(asked) == 0
    said = capsys.readouterr().out
    override = str(recipes.load("qwen2.5-7b-1m").flags["json-model-override-args"])
    assert said.count(override) == len(METHODS) and said.count("| no |") == len(METHODS)
    asked += ["--json-model-override-args", override]
    assert check.main([*asked, "--sparse-method", "resa"]) == 0
    # SGLang fails where it finds the checkpoint's table for its own dual chunk attention.
    (tmp_path / "sparse_attention_config.json").write_text('{"0": {}}')
    assert check.main(asked) == 0
    assert capsys.readouterr().out.count("| no | SGLang ends with TypeError: 'NoneType' object") == len(METHODS)
    with pytest.raises(SystemExit):
        check.main([*asked, "--sparse-method", "resa"])
    assert capsys.readouterr().err.endswith("does not support item assignment\n")


def test_documents_are_filled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "document.md"
    path.write_text("before\n<!-- check: methods -->\nold\n<!-- check end -->\nafter\n")
    assert check.main(["--markdown", str(path)]) == 0
    block = f"<!-- check: methods -->\n{doc_tables.methods_table()}\n<!-- check end -->"
    assert path.read_text() == f"before\n{block}\nafter\n"
    with pytest.raises(ValueError, match="'kernels'; allowed: glance, methods, features, gpus, refusals"):
        doc_tables.fill("<!-- check: kernels -->\n<!-- check end -->")
    assert check.main([]) == 0
    printed = capsys.readouterr().out
    assert all(made() in printed for made in doc_tables.BLOCKS.values())

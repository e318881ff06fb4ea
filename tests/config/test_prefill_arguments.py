"""Arguments of ``--sparse-prefill-method`` that a server resolves."""

import json

import pytest
from model_configs import write_config
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config import settings as config


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")


def resolve(model: str, **kwargs: object) -> ServerArgs:
    return ServerArgs(model_path=model, **kwargs)


PREFILL = {"sparse_prefill_method": "anchor"}


def test_prefill_alone_resolves(qwen3: str) -> None:
    args = resolve(qwen3, **PREFILL, sparse_prefill_config='{"theta": 10}', chunked_prefill_size=4096)
    assert args.page_size == 16 and args.sparse_config is None
    assert json.loads(args.sparse_prefill_config)["theta"] == 10
    settings = config.settings_of(args)
    assert settings is not None and settings.name is None and settings.prefill is not None
    assert settings.prefill.group_tokens == 2048 and settings.prefill.dense_below == 8192


def test_thetas_by_layer_and_where_they_come_from_are_reported(qwen3: str) -> None:
    fields = {"theta": [12, 3.5, 0, 1e9], "calibration": {"target_recall": 0.95}}
    args = resolve(qwen3, **PREFILL, sparse_prefill_config=json.dumps(fields), chunked_prefill_size=4096)
    assert json.loads(args.sparse_prefill_config).items() >= fields.items()


@pytest.mark.parametrize(
    ("fields", "times"),
    [
        ({}, 1),
        ({"step": 8}, 1),
        ({"theta": 12.0}, 0),
        ({"calibration": {"target_recall": 0.95}}, 1),
        ({"layers": {"0": {}, "1": {"step": 8}}}, 1),
    ],
)
def test_a_threshold_that_nobody_chose_is_warned_of(
    qwen3: str, fields: dict[str, object], times: int, caplog: pytest.LogCaptureFixture
) -> None:
    resolve(qwen3, **PREFILL, sparse_prefill_config=json.dumps(fields), chunked_prefill_size=4096)
    assert sum("which nobody chose for this model" in line for line in caplog.messages) == times


@pytest.mark.parametrize("fields", [{}, {"calibration": {"target_recall": 0.95}}])
@pytest.mark.parametrize("paths", [None, ["a=adapter"]])
def test_a_calibration_is_warned_of_where_there_are_adapters(
    qwen3: str, fields: dict[str, object], paths: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    resolve(qwen3, **PREFILL, sparse_prefill_config=json.dumps(fields), chunked_prefill_size=4096, lora_paths=paths)
    warned = any("the calibration of anchor is of the base model" in line for line in caplog.messages)
    assert warned is bool(fields and paths)


def test_a_position_that_is_no_end_of_a_group_is_warned_of() -> None:
    for asked, begins in ((0, 2048), (2049, 4096), (2048, None), ("auto", None)):
        prefill = config.build(None, {}, "anchor", {"theta": 12.0, "crossover_tokens": asked}).prefill
        assert prefill is not None
        said = [f"got {asked}, and prompt tokens below {begins} run dense" in text for text in prefill.warnings()]
        assert said == ([True] if begins else [])


@pytest.mark.parametrize("decode", [{}, {"sparse_method": "resa"}])
def test_mixed_chunk_with_any_decode(qwen3: str, decode: dict[str, str]) -> None:
    args = resolve(qwen3, **PREFILL, **decode, chunked_prefill_size=2048, enable_mixed_chunk=True)
    assert args.enable_mixed_chunk

"""Bad input to ``--sparse-prefill-method``: as in ``test_arguments.py``."""

import json
from pathlib import Path

import pytest
from model_configs import CONFIGS, write_config
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config import settings as config


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")


def resolve(model: str, **kwargs: object) -> ServerArgs:
    return ServerArgs(model_path=model, **kwargs)


def refused(model: str, **kwargs: object) -> str:
    with pytest.raises(ValueError) as caught:
        resolve(model, **kwargs)
    return str(caught.value)


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


@pytest.mark.parametrize("decode", [{}, {"sparse_method": "resa", "sparse_config": '{"rectify_interval": 0}'}])
def test_mixed_chunk_with_any_decode_that_does_not_rectify(qwen3: str, decode: dict[str, str]) -> None:
    args = resolve(qwen3, **PREFILL, **decode, chunked_prefill_size=2048, enable_mixed_chunk=True)
    assert args.enable_mixed_chunk


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"sparse_prefill_config": '{"theta": -1}'}, "--sparse-prefill-config of anchor: theta: got -1"),
        ({"sparse_prefill_config": '{"theta": NaN}'}, "theta: got nan"),
        ({"sparse_prefill_config": '{"theta": "12"}'}, "theta: got '12'; must be a number from 0 to 1e+09, or a list"),
        ({"sparse_prefill_config": '{"theta": [12, true, 1, 1]}'}, "a list of one for each layer; layer 1 has True"),
        (
            {"sparse_prefill_config": '{"theta": [12, 3.5]}'},
            "does not fit Qwen3ForCausalLM: theta: got a list of 2, allowed: a number, or one for each of its 4 layers",
        ),
        (
            {"sparse_prefill_config": '{"layers": {"0-1": "dense"}}'},
            "--sparse-prefill-config of anchor: layers: no rule runs anchor; allowed: a rule that does, another "
            "--sparse-prefill-method, or none at all for dense prefill",
        ),
        ({"sparse_prefill_config": '{"layers": [true]}'}, 'layers: got [True]; must be "all", ids or ranges'),
        ({"sparse_prefill_config": '{"step": 0}'}, "step: got 0"),
        (
            {"sparse_prefill_config": '{"step": 65}'},
            "--sparse-prefill-config of anchor: step: got 65; Input should be less than or equal to 64",
        ),
        ({"sparse_prefill_config": '{"block_size": 100}'}, "block_size: got 100; must be 16, 32, 64 or 128"),
        ({"sparse_prefill_config": '{"tetha": 1}'}, "unknown field 'tetha'"),
        ({"page_size": 64, "sparse_prefill_config": '{"block_size": 32}'}, "a multiple of the page size of 64"),
        ({"page_size": 128}, "the server's page size is 128; allowed: 1, 2, 4"),
        ({"chunked_prefill_size": 3000}, "the chunked prefill size is 3000; allowed: multiples of 2048 tokens"),
        ({"kv_events_config": "{}"}, "--sparse-prefill-method anchor cannot run with KV cache events"),
        ({"enable_mixed_chunk": True, "sparse_method": "resa"}, "--sparse-method resa cannot rectify with mixed chunk"),
        ({"sparse_config": "{}"}, "--sparse-config needs --sparse-method, which was not given"),
        (
            {"sparse_prefill_config": '{"share_partial_groups": true, "check_exactness": true}'},
            "check_exactness cannot prove KV that share_partial_groups puts into the prefix cache",
        ),
    ],
)
def test_bad_prefill_arguments(qwen3: str, kwargs: dict[str, object], expected: str) -> None:
    assert expected in refused(qwen3, **{**PREFILL, "chunked_prefill_size": 4096, **kwargs})


def test_prefill_config_without_method(qwen3: str) -> None:
    message = refused(qwen3, sparse_prefill_config="{}")
    assert "--sparse-prefill-config needs --sparse-prefill-method, which was not given" in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mla", "MLA"),
        ("sliding_window", "sliding-window model"),
        ("encoder_decoder", "encoder-decoder model: cross attention has no separate pages"),
    ],
)
def test_prefill_refuses_models(tmp_path: Path, name: str, expected: str) -> None:
    message = refused(write_config(tmp_path, name), **PREFILL)
    architecture = CONFIGS[name]["architectures"][0]
    assert f"--sparse-prefill-method anchor does not fit {architecture}: " in message and expected in message

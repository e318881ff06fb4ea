"""Tests of the counters that a sparse server must have before its answers count as equal to a dense one's."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval import identity
from eval.identity import noise_of, summarise
from eval.live.client import LiveServer
from eval.live.counters import COUNTED, PREFILL_COUNTED, EvaluationError
from eval.live.record import read_rows

# Of the first nothing is sparse, of the second 8 tokens; the third is cached beyond the position that is dense.
EQUAL = [
    {"equal": True, "kl": [0.0, 0.001], "prompt_tokens": length, "cached_tokens": cached}
    for length, cached in ((5, 0), (15, 0), (13, 10))
]
CONFIG = {"crossover_tokens": 6, "dense_tail": 1}


def state(decode: int = 0, rows: int = 0, prefill: dict[str, int] | None = None, dense: int = 0) -> dict[str, Any]:
    counts = dict.fromkeys(COUNTED, 0) | {
        "decode_rows": rows,
        "sparse_layer_rows": decode,
        "dense_fallback_rows": dense,
    }
    found = {**counts, "sparse_layers": 4, "method": "resa" if decode else None}
    # A server without a prefill method says nothing of one.
    if prefill is None:
        return found
    return {**found, "prefill": dict.fromkeys(PREFILL_COUNTED, 0) | {"config": CONFIG} | prefill}


NONE_LEFT_OUT = {"sparse_tokens": 10, "pairs_attended": 55, "pairs_causal": 55}


@pytest.mark.parametrize(
    ("after", "proven"),
    [
        (state(40, 10), True),
        (state(36, 10), False),
        (state(40, 10, dense=1), False),
        # A method of prefill alone decodes dense.
        (state(rows=10, dense=10, prefill=NONE_LEFT_OUT), True),
        (state(rows=10, dense=10, prefill={**NONE_LEFT_OUT, "sparse_tokens": 0}), False),
        (state(rows=10, dense=10, prefill={**NONE_LEFT_OUT, "sparse_tokens": 9}), False),
        (state(rows=10, dense=10, prefill={**NONE_LEFT_OUT, "pairs_attended": 54}), False),
        # Of two methods both.
        (state(40, 10, prefill=NONE_LEFT_OUT), True),
        (state(36, 10, prefill=NONE_LEFT_OUT), False),
        (state(40, 10, prefill={**NONE_LEFT_OUT, "pairs_attended": 54}), False),
    ],
)
def test_each_phase_that_has_a_method_must_prove_it(after: dict[str, Any], proven: bool) -> None:
    before = state(prefill={} if "prefill" in after else None)
    found = summarise(EQUAL, before, after, 0.0)
    assert found["sparse_path_proven"] == found["passed"] == proven


def test_another_token_is_excused_by_noise_alone() -> None:
    other = {**EQUAL[0], "equal": False, "kl": [0.001], "dense_gap": 0.02, "first_difference": 3}
    assert not summarise([*EQUAL, other], state(), state(40, 10), 0.01)["passed"]
    assert summarise([*EQUAL, other], state(), state(40, 10), 0.02)["passed"]
    assert not summarise([{**EQUAL[0], "kl": [0.01]}], state(), state(40, 10), 0.0)["passed"]


def test_the_noise_of_a_file(tmp_path: Path) -> None:
    def written(command: str, noise: float, kv: str) -> Path:
        served = {"model_path": "m", "sparse_method": "robsa", "kv_cache_dtype": kv}
        header = {"kind": "header", "command": command, "servers": {"sparse": served, "dense": served}}
        summary = {"kind": "summary", "noise": noise, "mean_kl": 0.0, "sparse_path_proven": True, "equal": 1}
        rows = [header, {"kind": "prompt", "equal": True}, {"kind": "prompt", "equal": False, "dense_gap": 0.125}]
        path = tmp_path / "file.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, summary)))
        return path

    assert noise_of(written("eval.identity", 0.25, "auto")) == 0.25
    for given, message in (
        (("eval.niah", 0.25, "auto"), "has no noise"),
        (("eval.identity", 0.0, "auto"), "has no noise"),
        (("eval.identity", 0.25, "fp8_e4m3"), "the noise of float8 KV"),
    ):
        with pytest.raises(EvaluationError, match=message):
            noise_of(written(*given))


ASKED = ["--base-url", "http://sparse", "--compare-url", "http://dense", "--revision", "r", "--out"]


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    async def generate(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
        hosts.append(client.base_url.host)
        if hosts.count("sparse") > 2:
            raise EvaluationError("the server ended")
        best = [[[-0.1, len(request["text"]), None], [-3.0, 0, None]]]
        meta = {"prompt_tokens": len(hosts) % 4, "cached_tokens": 0, "output_top_logprobs": best}
        return {"output_ids": [0], "meta_info": meta}

    def facts(server: LiveServer) -> dict[str, Any]:
        sparse = server.ask(lambda http: http.base_url.host) == "sparse"
        return {"sparse": state(40, 10) if sparse else None}

    monkeypatch.setattr(identity, "generate", generate)
    monkeypatch.setattr(LiveServer, "facts", facts)
    out = tmp_path / "identity.jsonl"
    assert identity.main([*ASKED, str(out), "--prompts", "4"]) == 1
    assert [(row["kind"], row.get("prompt_tokens")) for row in read_rows(out)] == [
        ("header", None),
        ("prompt", 1),
        ("prompt", 2),
    ]


@pytest.mark.parametrize("option", ["--prompts", "--tokens"])
def test_none_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        identity.main([*ASKED, "never.jsonl", option, "0"])
    assert f"{option}: must be at least 1, got 0" in capsys.readouterr().err

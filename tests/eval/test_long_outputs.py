"""Outputs, checkpoints and settings of the drift command, without a server."""

import argparse
from typing import Any

import pytest

from eval.live.counters import EvaluationError
from eval.tasks.long_outputs import checkpoints_of, make_outputs, make_settings

CONFIG = {"active_ratio": 0.1, "rectify_interval": 32, "page_size": 16, "min_pages": 1, "dense_fallback": "never"}


def test_checkpoints() -> None:
    assert checkpoints_of("book", None, 1024) == [64, 128, 256, 512, 1024]
    assert checkpoints_of("book", None, 300) == [64, 128, 256, 300]
    assert checkpoints_of("records", None, 1024) == [256, 512, 1024]
    assert checkpoints_of("book", None, 40) == [40]
    assert checkpoints_of("book", [512, 32, 32], 1024) == [32, 512]
    for wrong in ([0], [2000], []):
        with pytest.raises(EvaluationError, match="from 1 to 1024"):
            checkpoints_of("book", wrong, 1024)


def test_settings() -> None:
    found = make_settings(CONFIG, [], [128, 32], 1024)
    assert [s.name for s in found] == ["noise", "off", "every 32", "every 128"]
    assert [s.params for s in found] == [{"sparse": False}, *({"rectify_interval": f} for f in (0, 32, 128))]
    found = make_settings(CONFIG, [0.05, 0.1], [], 1024)[1:]
    assert [s.name for s in found] == [f"{s}, ratio {r}" for r in ("0.05", "0.1") for s in ("off", "every 32")]
    assert found[1].params == {"active_ratio": 0.05, "rectify_interval": 32}
    assert [s.params for s in make_settings({}, [], [], 1024)] == [{"sparse": False}, {}]
    assert len(make_settings({**CONFIG, "rectify_interval": 0}, [], [], 1024)) == 2


@pytest.mark.parametrize(
    ("config", "ratios", "intervals", "message"),
    [
        ({"rectify_interval": 32}, [0.1], [], "no active_ratio"),
        ({"active_ratio": 0.1}, [], [8], "never rectified"),
        (CONFIG, [], [1], r"every \[1\] tokens"),
        (CONFIG, [], [-8], r"every \[-8\] tokens"),
        (CONFIG, [], [200], r"every \[200\] tokens.*shorter than the output of 200"),
        ({**CONFIG, "rectify_interval": 512}, [], [], r"the server's own 512"),
    ],
)
def test_wrong_settings(config: dict[str, Any], ratios: list[float], intervals: list[int], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        make_settings(config, ratios, intervals, 200)


def test_outputs_of_a_book() -> None:
    args = argparse.Namespace(n=3, prompt_length=50, seed=1)
    said = make_outputs("book", {"one": range(1000)}, args, [16, 64], list, lambda p, n: [[len(q)] * n for q in p])
    assert [output.index for output in said] == [0, 1, 2]
    for output in said:
        start = output.facts["start"]
        assert output.prompt == tuple(range(start, start + 50)) and output.tokens == (50,) * 64
        # The 32 positions before each checkpoint, as far as there are so many.
        assert output.positions() == [*range(16), *range(32, 64)]
        assert output.ids("book") == [f"book/{output.index}/16", f"book/{output.index}/64"]


def test_outputs_of_records() -> None:
    args = argparse.Namespace(n=2, prompt_length=200, seed=1)
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [10_000 + ord(letter) for letter in text]

    found = make_outputs("records", {"one": range(9000)}, args, [1000, 1500], encode, lambda p, n: [])
    assert [(output.index, output.checkpoints[0].end) for output in found] == [
        (0, 1000),
        (0, 1500),
        (1, 1000),
        (1, 1500),
    ]
    for output in found:
        (checkpoint,) = output.checkpoints
        assert len(output.prompt) == 200 and len(output.tokens) == checkpoint.end
        answer = "".join(chr(output.tokens[p] - 10_000) for p in output.positions())
        text = "".join(chr(token - 10_000) for token in output.tokens if token >= 10_000)
        # Told in the output and asked for at its end.
        assert answer.removesuffix("<|im_end|>").isdigit() and text.count(answer.removesuffix("<|im_end|>")) == 2
        assert 0.1 < output.facts["depth"] < 1
    # Both lengths of a prompt tell and ask the same.
    assert len(set(texts)) == len(texts)

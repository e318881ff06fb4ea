"""Time over context with its limit, and the crossover: figures by hand, and pictures that stay the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.lab import documents
from eval.lab.servers import latency_limit
from eval.lab.servers.latency_limit import curves, limit_of
from eval.lab.tables import crossover
from eval.live.counters import EvaluationError
from eval.serving.report import Point

K = 1024
CONFIG = {"page_size": 16, "active_ratio": 0.1, "min_pages": 16, "summary_dtype": "auto", "rectify_interval": 32}
ARMS = ("sparse", "dense", "dense-fp8")


def header(**arguments: Any) -> dict[str, Any]:
    arguments = {"shape": "qwen3-8b", "model_path": None, **arguments}
    return {"kind": "header", "command": "eval.bench_serving", "device": "NVIDIA H200", "arguments": arguments}


def server(arm: str, command: str = "python", config: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    facts = {"kv_cache_dtype": "auto", "dtype": "auto", "sparse": None, **facts}
    if arm == "sparse":
        facts["sparse"] = {"method": "resa", "sparse_layers": 36, "config": {**CONFIG, **(config or {})}}
    return {"kind": "server", "arm": arm, "facts": facts, "command": command}


def cell(arm: str, batch: int, context: int, tpot: float, dense: float) -> dict[str, Any]:
    row = {"kind": "summary", "task": "serving", "arm": arm, "batch": batch, "context": context, "decode_tpot": tpot}
    row |= {"decode_tpot_range": [tpot * 0.99, tpot * 1.02], "dense_decode_tpot": dense}
    return row | {"dense_decode_tpot_range": [dense * 0.98, dense * 1.01]}


CELLS = [
    cell("sparse", 1, 128 * K, 6.5e-3, 9.66e-3),
    cell("sparse", 1, 4 * K, 5.3e-3, 5.27e-3),
    cell("dense-fp8", 1, 4 * K, 5.2e-3, 5.27e-3),
    cell("dense-fp8", 1, 128 * K, 7.5e-3, 9.66e-3),
    cell("sparse", 6, 128 * K, 12.0e-3, 31.0e-3),
]
OTHERS = [
    {"kind": "summary", "task": "prefix_hit", "arm": "sparse", "context": 128 * K},
    {"kind": "summary", "task": "short_contexts", "arm": "sparse", "context": 8 * K},
]
ROWS = [header(), *map(server, ARMS), *CELLS, *OTHERS]


def limit_with(sparse: dict[str, Any], *others: dict[str, Any]) -> latency_limit.Limit:
    found = limit_of([header(), sparse, *(others or [server("dense")])])
    assert found is not None
    return found


def test_the_limit_of_8b_at_128k_by_hand() -> None:
    limit = limit_with(server("sparse"))
    # 36 layers x 8 KV heads x (128 + 128) x 2 bytes = 147,456 bytes a token: 19.327 GB, at 4.8 TB/s 4.027 ms.
    assert limit.kv_seconds(128 * K, 2) == pytest.approx(19_327_352_832 / 4.8e12) == pytest.approx(4.0265e-3, rel=1e-4)
    # 820 of 8,192 pages; of 16 keys of 2 x 16 elements of K and V a summary has 2.
    sparse = 820 / 8192 + 1 / 16
    assert limit.share(128 * K) == pytest.approx(31 / 32 * sparse + 1 / 32) == pytest.approx(0.18877, rel=1e-4)
    # Dense 5.27 ms at 4k, of which 603,979,776 bytes / 4.8 TB/s = 0.1258 ms are KV: 5.1442 ms are not attention.
    rest = limit.rest({1: [Point(4 * K, 5.27e-3, 5e-3, 6e-3), Point(128 * K, 9.66e-3, 9e-3, 10e-3)]})
    assert rest is not None and rest == pytest.approx(5.14417e-3, rel=1e-5)
    assert limit.seconds(1, 128 * K, rest) == pytest.approx(5.9043e-3, rel=1e-4)


def test_what_the_limit_depends_on() -> None:
    pages = 820 / 8192
    assert limit_with(server("sparse", config={"rectify_interval": 0})).share(128 * K) == pytest.approx(pages + 1 / 16)
    fast = {"summary_dtype": "fp8", "active_ratio": 0.05, "rectify_interval": 64}
    share = limit_with(server("sparse", config=fast)).share(128 * K)
    assert share == pytest.approx(63 / 64 * (410 / 8192 + 1 / 32) + 1 / 64)
    # An fp8 cache is half as large, and its own summaries have its type.
    eight = limit_with(server("sparse", kv_cache_dtype="fp8_e4m3"), server("dense"))
    assert (eight.itemsize, eight.dense_itemsize) == (1, 2)
    assert eight.share(128 * K) == limit_with(server("sparse")).share(128 * K)
    half = server("sparse")
    half["facts"]["sparse"]["sparse_layers"] = 18
    assert limit_with(half).share(128 * K) == pytest.approx((1 + limit_with(server("sparse")).share(128 * K)) / 2)
    # 16 pages at least, all of a short row, and never more than dense.
    assert limit_with(server("sparse")).share(100) == 1.0
    assert limit_with(server("sparse")).share(1024) == pytest.approx(31 / 32 * (16 / 64 + 1 / 16) + 1 / 32)


def test_no_limit_where_it_is_not_known() -> None:
    both = [server("sparse"), server("dense")]
    assert limit_of([header(), *both])
    assert limit_of([header(shape=None, model_path="m"), *both]) is None
    assert limit_of([header(shape="v2-lite"), *both]) is None
    assert limit_of([{**header(), "device": "cpu"}, *both]) is None
    assert limit_of([header(), server("sparse")]) is None
    assert limit_of([header(), server("sparse", "python --tp-size 2"), server("dense")]) is None
    assert limit_of([header(), server("sparse", dtype="float32"), server("dense")]) is None
    both[0]["facts"]["sparse"]["method"] = "another"
    assert limit_of([header(), *both]) is None


def test_lines_of_each_batch_size() -> None:
    one, six = curves(ROWS).items()
    assert one[0] == 1 and list(one[1]) == ["dense", "dense-fp8", "sparse", "limit"]
    assert six[0] == 6 and list(six[1]) == ["dense", "sparse", "limit"]
    assert one[1]["sparse"][0] == Point(4 * K, 5.3e-3, 5.3e-3 * 0.99, 5.3e-3 * 1.02)
    assert [point.context for point in one[1]["dense"]] == [4 * K, 128 * K]
    assert [point.seconds for point in one[1]["limit"]] == pytest.approx([5.1681e-3, 5.9043e-3], rel=1e-4)
    # The shortest context of the smallest batch says what is not attention, for all batch sizes.
    assert six[1]["limit"][0].seconds == pytest.approx(5.14417e-3 + 6 * 0.188766 * 4.02653e-3, rel=1e-5)
    # Where all contexts are long nothing says it.
    (lines,) = curves([*ROWS[:4], CELLS[-1]]).values()
    assert list(lines) == ["dense", "sparse"]
    (lines,) = curves([header(shape=None, model_path="m"), *map(server, ARMS), CELLS[0]]).values()
    assert list(lines) == ["dense", "sparse"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drawn_twice(path: Path, folder: Path) -> str:
    """The SVG that the command draws, the same each time."""
    for name in ("a", "b"):
        assert documents.main([str(path), "--out", str(folder / name)]) == 0
    first, second = ((folder / name / f"{path.stem}.svg").read_text() for name in ("a", "b"))
    assert first == second and len(first) > 5000
    return first


def test_latency_picture(tmp_path: Path) -> None:
    text = drawn_twice(write(tmp_path / "serving.jsonl", ROWS), tmp_path)
    labels = ("dense", "dense-fp8", "sparse", "limit", "batch 1", "batch 6", "4k", "128k", "time per output token, ms")
    for label in (*labels, "qwen3-8b on NVIDIA H200", "active ratio 0.1, tokens between rectifications 32"):
        assert f"<!-- {label} -->" in text or label in text, label


def test_latency_refuses_other_files(tmp_path: Path) -> None:
    other = write(tmp_path / "niah.jsonl", [{"kind": "header", "command": "eval.niah"}])
    with pytest.raises(EvaluationError, match=r"is no file of eval\.bench_serving: its header names eval\.niah"):
        latency_limit.draw(other, tmp_path / "picture")
    for rows in ([header(), server("sparse")], [header(), *OTHERS]):
        with pytest.raises(EvaluationError, match="there are no cells to draw"):
            latency_limit.draw(write(tmp_path / "serving.jsonl", rows), tmp_path / "picture")


def entry(ratio: float, shape: tuple[int, int, int] = (32, 8, 128), overhead: float = 0.0) -> dict[str, Any]:
    found: dict[str, Any] = {"method": "resa", "gpu": "NVIDIA H200", "page_size": 16, "kv_dtype": "bfloat16"}
    found |= dict(zip(("q_heads", "kv_heads", "head_dim"), shape, strict=True))
    found |= {"active_ratio": ratio, "crossover_tokens": 17408, "overhead_us": overhead, "summary_dtype": "auto"}
    found |= {"summary": "minmax", "group": "mean_query"}
    batches = [(batch, context) for batch in (4, 1) for context in (32 * K, 4 * K, 8 * K)]
    points = [
        {"batch": b, "context": c, "dense": "fa3", "dense_us": 5 + b * c / 1024, "sparse_us": 20.0} for b, c in batches
    ]
    return found | {"versions": {}, "points": points}


def test_crossover_counts_the_overhead_that_it_was_chosen_with() -> None:
    found = crossover.Entry.model_validate(entry(0.1, overhead=5.0))
    (point,) = [p for p in found.points if (p.batch, p.context) == (4, 8 * K)]
    assert point.tokens == 32 * K and found.ratio(point) == pytest.approx(37 / 25)


def test_crossover_picture_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "crossover.json"
    path.write_text(json.dumps([entry(0.1), entry(0.05), entry(0.1, (16, 8, 128)), entry(0.05, (16, 8, 128))]))
    text = drawn_twice(path, tmp_path)
    labels = ("batch 1", "batch 4", "sparse from 17408 tokens", "16k", "32x8x128, active ratio 0.1")
    for label in (*labels, "16x8x128, active ratio 0.05"):
        assert label in text, label
    assert text.count("KV tokens of the batch") == 4
    assert (
        "| NVIDIA H200 | 32x8x128 | 16 | bfloat16 | minmax, auto | mean_query | 0.1 | 0.0 | 17408 |"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has no entries"),
        ('{"kind": "header"}', "is no table of sglang_sparse.tune: Input should be a valid array"),
        ('[{"gpu": "x"}]', r"is no table of sglang_sparse.tune: 0.q_heads: Field required"),
        ("no JSON", "is no table of sglang_sparse.tune: Invalid JSON"),
        (json.dumps([{**entry(0.1), "points": []}]), "0.points: List should have at least 1 item"),
    ],
)
def test_crossover_refuses_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(EvaluationError, match=message.replace(".", r"\.")):
        crossover.draw(path, tmp_path / "picture")
    assert documents.main([str(path), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("eval.lab.documents: ")
    assert not list(tmp_path.glob("*.svg"))


def test_a_table_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert documents.main([str(tmp_path / "none.json")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_what_tune_writes_is_what_is_read(tmp_path: Path) -> None:
    from sglang_sparse.tools import tune_bench

    tune_bench.write(tmp_path / "crossover.json", [entry(0.1), entry(0.05)])
    assert [found.active_ratio for found in crossover.read(tmp_path / "crossover.json")] == [0.1, 0.05]
    names = {"batch", "context", "dense", "dense_us", "sparse_us"}
    assert names == tune_bench.Point.__dataclass_fields__.keys() == crossover.Point.model_fields.keys()

"""Legs that show what the tables of features say of GPUs: they ask it, were run, and passed."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from feature_cells import FLOAT8, ON_GPU, PROOFS, SCALED, Cell, of_leg

from eval.lab.documents import RESULTS
from eval.lab.legs.leg import LEGS
from eval.live.record import read_rows, result_files
from eval.scores.stats import verdict


def wrong_with(cell: Cell, proof: str) -> Iterator[str]:
    """What is wrong with a leg as the proof of a cell."""
    legs, done = [leg for leg in LEGS if leg.name == proof], result_files(RESULTS)
    if not legs:
        yield "there is no such test and no such leg"
    for leg in legs:
        asked = [*(leg.server.flags if leg.server else ()), *(word for one in leg.commands for word in one.arguments)]
        needed = [cell.method.removesuffix(" (prefill)"), *([cell.value] if cell.row == ON_GPU else [])]
        needed += ["fp8_e4m3"] if cell.row in (FLOAT8, SCALED) else []
        needed += ["--quantization-param-path"] if cell.row == SCALED else []
        yield from (f"the leg has no {word!r}" for word in needed if word not in asked)
        files = [done[name] for one in leg.commands if (name := one.file.removesuffix(".jsonl")) in done]
        if not files:
            yield "eval/lab/results has no file of the leg"
        if proof.startswith("identity-") and not all(read_rows(path)[-1]["passed"] for path in files):
            yield "it did not pass"
        if cell.row in (FLOAT8, SCALED) and not all(as_good(read_rows(path)) for path in files):
            yield "it may answer worse by more than a point"


def as_good(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a file of questions excludes that the sparse arm loses more than a point; others have nothing to say."""
    differences = [row["diff_interval"] for row in rows if row["kind"] == "summary" and row.get("diff_interval")]
    return all(verdict((low, high)) in ("same", "better") for low, high in differences)


def test_proofs_are_legs_that_there_are() -> None:
    wrong = {cell: [*wrong_with(cell, proof)] for cell, proof in PROOFS.items() if of_leg(proof)}
    assert not {cell: reasons for cell, reasons in wrong.items() if reasons}
    cell = Cell(ON_GPU, "robsa", "fa3")
    assert [*wrong_with(cell, "identity-robsa-triton")] == ["the leg has no 'fa3'"]
    assert [*wrong_with(cell, "identity-anchor-fa3")] == ["the leg has no 'robsa'"]
    assert [*wrong_with(cell, "identity-robsa-fa4")]
    of_needles = {"kind": "summary", "task": "single"}
    assert as_good([of_needles, {**of_needles, "diff_interval": [-0.009, 0.004]}])
    assert not as_good([{**of_needles, "diff_interval": [-0.011, 0.004]}])

"""The perplexity of sparse prefill beside its control's, paired by window."""

import math

import pytest
from suites import perplexity_rows as rows

from eval.lab.tables.prefill_controls import against, gate
from eval.live.counters import EvaluationError


def test_a_control_is_paired_with_the_method() -> None:
    """What is common to both arms, and to both files, is not the control's."""
    judged, dense, sparse = against(rows(0.01, noise=0.05), rows(0.03, noise=0.05))
    assert (judged["positions"], dense["positions"], sparse["positions"]) == ("judged", "0-100", "100-300")
    for line in (judged, sparse):
        assert line["relative"] == pytest.approx(math.expm1(0.02), abs=1e-5)
        assert line["relative_interval"] == pytest.approx([math.expm1(0.02)] * 2, abs=1e-5)
    assert dense["relative"] == pytest.approx(0, abs=1e-6) and sparse["control_change"] > sparse["change"]
    assert against(rows(0.01, "repeat"), rows(0.03, "repeat"))[0]["relative"] == pytest.approx(math.expm1(0.02), 1e-3)


def test_a_control_of_other_windows_is_refused() -> None:
    others = rows(0.03)
    for row in others:
        if row["kind"] == "item":
            row["scores"] = {"nll": row["scores"]["nll"] + 0.1}
    for control in (others, [row for row in rows(0.03) if row.get("window") != 3]):
        with pytest.raises(EvaluationError, match="book: the control's windows are not those of the method"):
            against(rows(0.01), control)


@pytest.mark.parametrize(
    ("lost", "control", "noise", "verdict"),
    [
        (0.001, 0.02, 0.0, (True, False, True)),
        # A control that passes, too, tells nothing of which keys were found.
        (0.001, 0.002, 0.0, (True, True, True)),
        (0.001, 0.001, 0.0, (True, True, False)),
        (0.02, 0.001, 0.0, (False, True, False)),
        # Of few windows neither passes, though they tell the two apart.
        (0.0, 0.002, 0.05, (False, False, True)),
    ],
)
def test_a_gate_stands_beside_its_control(lost: float, control: float, noise: float, verdict: tuple[bool, ...]) -> None:
    judged, *rest, sparse = gate(rows(lost, noise=noise), rows(control, noise=noise))
    # Where nothing changed there is nothing to tell.
    assert len(rest) == bool(noise)
    assert (judged["positions"], sparse["positions"]) == ("judged", "100-300")
    assert judged["over"] == pytest.approx(control - lost, abs=2e-6)
    for line in (judged, sparse):
        assert tuple(line[name] for name in ("passed", "control_passed", "apart")) == verdict
        low, high = line["lost_interval"]
        assert low <= line["lost"] <= high and (noise or line["lost"] == pytest.approx(lost, abs=2e-6))

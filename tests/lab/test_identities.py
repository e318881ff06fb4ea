"""The table of proofs of identity: which noise excuses another token."""

import json
from pathlib import Path
from typing import Any

from eval.lab.tables.identities import identities, judged


def line(noise: float, gap: float, kv: str = "auto", backend: str = "flashmla", **more: Any) -> dict[str, Any]:
    """Return the data that the table takes from a file with one answer that differs."""
    served = {"model_path": "m", "sparse_method": "robsa", "attention_backend": backend, "kv_cache_dtype": kv}
    return {**served, "noise": noise, "gaps": [gap], "mean_kl": 0.001, "sparse_path_proven": True, **more}


def test_float8_is_excused_by_the_noise_of_bfloat16() -> None:
    def verdicts(*lines: dict[str, Any]) -> list[tuple[float, bool]]:
        return [(row["noise"], row["passed"]) for row in judged(lines)]

    narrow, wide = line(0.3, 0.2), line(3.2, 0.5, "fp8_e4m3")
    assert verdicts(wide, narrow) == [(0.3, False), (0.3, True)]
    assert verdicts(line(3.2, 0.3, "fp8_e4m3"), narrow) == [(0.3, True), (0.3, True)]
    # Another backend's noise is none of it.
    assert verdicts(line(3.2, 0.1, "fp8_e4m3", "triton"), narrow) == [(0.0, False), (0.3, True)]
    assert verdicts(line(0.3, 0.2, sparse_path_proven=False), line(0.3, 0.2, mean_kl=0.003)) == [(0.3, False)] * 2


def test_the_table_says_what_noise_excuses(tmp_path: Path) -> None:
    served = line(0, 0)
    header = {"kind": "header", "command": "eval.identity", "servers": {"sparse": served, "dense": served}}
    summary = {"kind": "summary", "noise": 0.25, "mean_kl": 0.0, "sparse_path_proven": True, "equal": 1}
    rows = [header, {"kind": "prompt", "equal": True}, {"kind": "prompt", "equal": False, "dense_gap": 0.125}, summary]
    path = tmp_path / "file.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names, _, shown = identities([path]).splitlines()
    assert "| nats between the best two, of others at most | excused up to |" in names
    assert "| 0.125 | 0.250 |" in shown and shown.endswith("| same |")

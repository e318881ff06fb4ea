"""Legs on trained tiny models: controls, servers that leave nothing out, and what they prove of the features."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_cells import FLOAT8, ON_GPU, PROOFS, SCALED, Cell, of_leg

from eval.lab.documents import RESULTS
from eval.lab.legs.leg import LEGS
from eval.live.record import read_rows, result_files
from eval.scores.stats import verdict
from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import build
from sglang_sparse.methods.anchor import ALL_KEYS, Anchor


@pytest.mark.parametrize("label", ["lookup", "prefilled", "lookup-prefilled"])
def test_controls_have_its_config_but_for_the_tail(label: str) -> None:
    found = {}
    for leg in LEGS:
        kind, _, of = leg.name.removeprefix("needles-").partition("-")
        if of == label and leg.server is not None and leg.server.flags[0] == "--sparse-prefill-method":
            found[kind] = read_config(leg.server.flags[3])
            asked = dict(zip(leg.commands[0].arguments, leg.commands[0].arguments[1:], strict=False))
            assert asked["--form"] == ("prefilled" if "prefilled" in label else "chat")
            assert "multikey" in asked["--tasks"] and asked["--lengths"] == "32k"
    own = found.pop("anchor")
    assert found and all(config == {**own, "dense_tail": 0} for config in found.values())


def _leaves_nothing_out(option: str, name: str, text: str) -> None:
    config = read_config(text)
    if option == "--sparse-prefill-method":
        prefill = build(None, {}, name, config).prefill
        assert prefill is not None and prefill.config.dense_fallback == "never" and prefill.config.layers == "all"
        if isinstance(prefill.methods[0], Anchor):
            assert prefill.config.model_dump()["theta"] == ALL_KEYS
            return
        given = prefill.config.model_dump()["threshold_scale_factor"]
    else:
        assert option == "--sparse-method"
        settings = build(name, config)
        assert settings.config.dense_fallback == "never" and settings.method.sparse_layers(4) == (0, 1, 2, 3)
        if name != "skip_softmax":
            selected = settings.method.n_select(torch.tensor([500])).tolist()
            assert selected == [500] or (name == "rocketkv" and selected[0] >= 500)
            return
        given = settings.config.model_dump()["threshold_scale_factor"]
    # None at all would leave the rows dense.
    factors = given.values() if isinstance(given, dict) else [given]
    assert factors and all(0 < factor < 1e-20 for factor in factors)


def test_identities_are_of_servers_that_differ_by_the_method_alone() -> None:
    legs = [leg for leg in LEGS if leg.name.startswith("identity-")]
    for leg in legs:
        assert leg.server is not None
        ((command,)) = leg.commands
        dense, *noise = leg.beside
        assert all(dense.model == one.model == leg.server.model and one.flags != dense.flags for one in noise)
        urls = ["http://a", "http://b", "http://c"]
        given = dict(zip(*[iter(command.line(Path("results"), urls)[1:])] * 2, strict=True))
        assert [given["--base-url"], given["--compare-url"]] == urls[:2]
        # Stock SGLang reads scales of a file wrongly: there the dense server has methods, which it is asked not to use.
        scaled = "--quantization-param-path" in leg.server.flags
        assert given.get("--compare-custom-params") == ('{"sparse": false}' if scaled else None)
        if "--kv-cache-dtype" in leg.server.flags:
            # bfloat16's noise, of the same backend.
            assert given["--noise-from"] == f"results/{leg.name.removesuffix('-fp8')}.jsonl" and not noise
            (other,) = [one.server for one in legs if one.name == leg.name.removesuffix("-fp8")]
            assert other is not None and other.flags[:4] == leg.server.flags[:4]
        else:
            assert given["--noise-url"] == urls[2]
        flags = list(leg.server.flags)
        while flags[0].startswith("--sparse"):
            option, name, _, config = (flags.pop(0) for _ in range(4))
            _leaves_nothing_out(option, name, config)
        assert tuple(flags) == dense.flags[-len(flags) :]
        names = [part for part in dense.flags[: -len(flags)] if not part.startswith("--")]
        assert names == [*map(str, list(leg.server.flags[1 : -len(flags) : 4]))] if scaled else not names
    backends = {flag for leg in legs if leg.server for flag in leg.server.flags[4:]}
    assert {"flashmla", "flashinfer", "fa3", "triton"} <= backends
    # One over latents of each method that decodes them.
    latent = {leg.server.flags[1] for leg in legs if leg.server and leg.server.model.endswith("tiny-mla")}
    assert latent == {"robsa", "skip_softmax"}


def wrong_with(cell: Cell, proof: str) -> Iterator[str]:
    """Yield the faults of a leg as the proof of a cell."""
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

"""RoBSA: its config and calibration, what it refuses, and its selection against the definition."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.calibration.partition import RopeCalibration, fingerprint
from sglang_sparse.config import SparseArgumentError, build
from sglang_sparse.method import ModelShape
from sglang_sparse.methods.robsa import Robsa
from sglang_sparse.plan import plan_decode
from sglang_sparse.pools import AuxPools
from sglang_sparse.requests import parse_options
from sglang_sparse.view import LatentQuery, allocate_view

TINY_MLA = Path("eval/models/tiny-mla")
UNCALIBRATED = {"allow_uncalibrated": True}
LATENT, ROPE, HEADS, BLOCK = 64, 16, 4, 16


def calibration(similarities: list[float], fingerprint: str = "0" * 64) -> dict[str, Any]:
    rows = [{"layer": i, "mean": mean, "deviation": 0.0, "recall": None} for i, mean in enumerate(similarities)]
    return {
        "method": "robsa",
        "fingerprint": fingerprint,
        "model": "some-model",
        "architecture": "DeepseekV3ForCausalLM",
        "theta1": 0.9,
        "block_size": 16,
        "queries": 16,
        "prompts": [{"kind": "files", "prompts": 4, "tokens": 1024}],
        "files": ["texts.txt"],
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "versions": {},
        "layers": rows,
    }


def robsa(**fields: Any) -> Robsa:
    method = build("robsa", fields).method
    assert isinstance(method, Robsa)
    return method


def model(arch: str = "MLA", layers: int = 4, rope: int = 64, name: str = "DeepseekV3ForCausalLM") -> Any:
    return SimpleNamespace(
        attention_arch=SimpleNamespace(name=arch),
        num_hidden_layers=layers,
        hf_config=SimpleNamespace(architectures=[name], num_attention_heads=128),
        hf_text_config=SimpleNamespace(qk_rope_head_dim=rope),
        model_path=str(TINY_MLA),
        revision=None,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"theta1": 0.0}, "theta1: got 0.0"),
        ({"theta1": 1.5}, "theta1: got 1.5"),
        ({"theta2": 1.5}, "theta2: got 1.5"),
        ({"block_size": 32}, "block_size: got 32; must divide the page of 16 tokens; allowed: 16"),
        ({"block_size": 48, "page_size": 64}, "must divide the page of 64 tokens; allowed: 16, 32, 64"),
        ({"page_size": 8}, "must divide the page of 8 tokens; allowed: none at this page size"),
        ({"max_active_ratio": 1.0}, "max_active_ratio: got 1.0"),
        ({"insensitive": "sparse"}, "insensitive: got 'sparse'"),
        ({"calibration": "deepseek-v4"}, "must be a .json file of sglang_sparse.calibrate or one of deepseek-v3-paper"),
        ({"calibration": "none.json"}, "calibration: got 'none.json'; cannot be read: FileNotFoundError"),
        ({"calibration": calibration([0.9]), **UNCALIBRATED}, "there is a calibration"),
        ({"active_ratio": 0.1}, "did you mean 'max_active_ratio'"),
    ],
)
def test_bad_config(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SparseArgumentError) as caught:
        build("robsa", fields)
    assert message in str(caught.value)


def test_calibration_decides_the_layers(tmp_path: Path) -> None:
    given = calibration([0.95, 0.995, 0.99, 1.0])
    assert robsa(calibration=given).sparse_layers(4) == (1, 3)
    assert robsa(calibration=given, theta2=0.9).sparse_layers(4) == (0, 1, 2, 3)
    assert robsa(calibration=given, layers="2-").sparse_layers(4) == (3,)
    full = robsa(calibration=given, insensitive="full_score")
    assert full.sparse_layers(4) == (0, 1, 2, 3)
    assert [full.selects_by_rope(layer) for layer in range(4)] == [False, True, False, True]
    assert robsa(**UNCALIBRATED).sparse_layers(4) == (0, 1, 2, 3)
    # A file by its name, and what a scheduler is given instead.
    (tmp_path / "found.json").write_text(json.dumps({"calibration": given}))
    named = robsa(calibration=str(tmp_path / "found.json"), theta1=0.8)
    assert isinstance(named.config.calibration, RopeCalibration)
    assert robsa(**json.loads(named.config.model_dump_json())).config == named.config


def test_the_preset_warns() -> None:
    method = robsa(calibration="deepseek-v3-paper-ruler")
    assert len(method.sparse_layers(61)) == 29
    assert "not the partition behind its accuracy" in " ".join(method.warnings())
    assert method.refuse(model(layers=61)) is None
    assert "is for DeepseekV3ForCausalLM with 61 layers" in str(method.refuse(model()))
    assert robsa(**json.loads(method.config.model_dump_json())).config == method.config


def test_refused_models() -> None:
    wide = robsa(**UNCALIBRATED)
    assert wide.refuse(model()) is None and "without a calibration" in " ".join(wide.warnings())
    assert "for MHA and GQA there is resa" in str(wide.refuse(model("MHA")))
    assert "this model has 0; allowed: a multiple of 16" in str(wide.refuse(model(rope=0)))
    assert "robsa needs a calibration of this model" in str(robsa().refuse(model()))
    own = fingerprint(str(TINY_MLA))
    assert robsa(calibration=calibration([1.0] * 4, own)).refuse(model()) is None
    assert "made on other weights, some-model" in str(robsa(calibration=calibration([1.0] * 4)).refuse(model()))
    assert "of a model of 3 layers, this one has 4" in str(robsa(calibration=calibration([1.0] * 3)).refuse(model()))
    assert "no layer is left" in str(robsa(calibration=calibration([0.5] * 4, own)).refuse(model()))


def test_a_request_has_a_theta_of_its_own() -> None:
    settings = build("robsa", {**UNCALIBRATED, "min_seq_len": 0, "crossover_tokens": 0})
    rows = [parse_options(settings, params) for params in ({}, {"theta1": 0.5}, {"theta1": 1.0}, {"sparse": False})]
    plan = plan_decode(settings.method, torch.tensor([1600] * 4), rows)
    assert plan.values.tolist() == pytest.approx([0.9, 0.5, 1.0, 0.9])
    assert plan.n_pages.tolist() == [100] * 4 and plan.n_select.tolist() == [50, 50, 100, 100]
    with pytest.raises(ValueError, match=r"theta1: got 2\.0"):
        parse_options(settings, {"theta1": 2.0})
    with pytest.raises(ValueError, match="active_ratio: --sparse-method robsa has no such field"):
        parse_options(settings, {"active_ratio": 0.1})


def test_blocks_are_smaller_than_pages() -> None:
    method = robsa(page_size=64, block_size=16, min_seq_len=0, crossover_tokens=0, **UNCALIBRATED)
    plan = plan_decode(method, torch.tensor([1, 16, 17, 1600]))
    assert plan.n_pages.tolist() == [1, 1, 2, 100] and plan.n_select.tolist() == [1, 1, 1, 50]


def naive(query: torch.Tensor, keys: torch.Tensor, scaling: float, theta1: float) -> list[int]:
    """The blocks of one row, by the definition."""
    mass = (query.double() @ keys.double().T * scaling).softmax(-1).mean(0)
    blocks = [float(part.sum()) for part in mass.split(BLOCK)]
    chosen, held = {len(blocks) - 1}, 0.0
    for block in sorted(range(len(blocks)), key=lambda i: -blocks[i]):
        if held >= theta1:
            break
        chosen.add(block)
        held += blocks[block]
    return sorted(chosen)


@pytest.mark.parametrize("insensitive", ["dense", "full_score"])
@pytest.mark.parametrize(
    ("theta1", "head_scope", "rope_copy"), [(0.5, "global", "off"), (0.9, "rank", "auto"), (0.5, "global", "on")]
)
def test_selection(insensitive: str, theta1: float, head_scope: str, rope_copy: str) -> None:
    torch.manual_seed(2)
    given = calibration([0.9 if insensitive == "full_score" else 1.0])
    scope = {"head_scope": head_scope, "rope_copy": rope_copy}
    method = robsa(calibration=given, insensitive=insensitive, theta1=theta1, max_active_ratio=0.99, **scope)
    lengths = [150, 160, 333, 640]
    shape = ModelShape(1, HEADS, 1, LATENT + ROPE, torch.float32, ROPE)
    aux = AuxPools(method.aux_specs(shape), (0,), 200, BLOCK, "cpu")
    cache = torch.randn(200 * BLOCK, LATENT + ROPE)
    view = allocate_view(len(lengths), 1, 40, 40, BLOCK, torch.zeros(4, dtype=torch.int64))
    free, last = (torch.randperm(199) + 1).tolist(), []
    for row, length in enumerate(lengths):
        n_blocks = -(-length // BLOCK)
        view.page_table[row, :n_blocks] = torch.tensor([free.pop() for _ in range(n_blocks)])
        view.n_pages[row] = n_blocks
        last.append(int(view.page_table[row, n_blocks - 1]) * BLOCK + (length - 1) % BLOCK)
    view.n_select.copy_(torch.minimum(method.n_select(view.n_pages), view.n_pages))
    view.values.fill_(method.row_value)
    nope, rope = torch.randn(len(lengths), HEADS, LATENT) * 2, torch.randn(len(lengths), HEADS, ROPE) * 8
    averaged: list[torch.Tensor] = []

    def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
        averaged.append(values)
        return values

    stored = cache.clone()
    if rope_copy == "on":
        # Twice, and the dummy page with it, as padded rows are refreshed.
        for _ in range(2):
            aux.refresh({0: cache[:, None]}, torch.tensor([*range(BLOCK - 1, 200 * BLOCK, BLOCK), -1]))
        assert torch.equal(aux.buffer("rope_copy", 0).flatten(0, 1), cache[:, LATENT:])
        if insensitive == "dense":
            stored[:, LATENT:] = float("nan")
    query = LatentQuery(nope, rope, stored, torch.tensor(last), 0.1, 1.0, mean_over_ranks)
    selected = method.select(view, 0, query, aux)
    assert len(averaged) == (head_scope == "global")
    whole = torch.cat([nope, rope], -1)
    for row, length in enumerate(lengths):
        table = view.page_table[row].tolist()
        keys = cache[(view.page_table[row, :, None].long() * BLOCK + torch.arange(BLOCK)).flatten()[:length]]
        asked, seen = (whole[row], keys) if insensitive == "full_score" else (rope[row], keys[:, LATENT:])
        expected = naive(asked, seen, 0.1, theta1)
        found = selected.indices[row, 0, : int(selected.counts[row, 0])].tolist()
        assert [table.index(block) for block in found] == expected and 0 < len(expected) < len(table)
    held, attended = int(view.n_pages.sum()), int(selected.counts.sum())
    assert view.stats.tolist() == [len(lengths), attended, held, 0]

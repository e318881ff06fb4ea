"""RoBSA: its config and calibration, what it refuses, and its selection against the definition."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peak_memory import Peak
from refusals import refused
from rope_calibrations import calibration

from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse.methods.groups import DecodeGroups
from sglang_sparse.methods.robsa.calibration_file import RopeCalibration
from sglang_sparse.methods.robsa.decode import Robsa
from sglang_sparse.methods.views import LatentQuery
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

TINY_MLA = Path("eval/models/tiny-mla")
UNCALIBRATED = {"allow_uncalibrated": True}
LATENT, ROPE, HEADS, BLOCK = 64, 16, 4, 16


def robsa(**fields: Any) -> Robsa:
    method = build("robsa", fields).method
    assert isinstance(method, Robsa)
    return method


def model(arch: str = "MLA", layers: int = 4, rope: int = 64, latent: int = 512) -> Any:
    return SimpleNamespace(
        attention_arch=SimpleNamespace(name=arch),
        num_hidden_layers=layers,
        hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], num_attention_heads=128),
        hf_text_config=SimpleNamespace(qk_rope_head_dim=rope, kv_lora_rank=latent, num_attention_heads=128),
        model_path=str(TINY_MLA),
        revision=None,
        model_override_args={},
    )


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
    (tmp_path / "found.json").write_text(json.dumps({"calibration": "deepseek-v3-paper-ruler"}))
    with refused("calibration", str(tmp_path / "found.json")):
        robsa(calibration=str(tmp_path / "found.json"))
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
    assert "resa, rocketkv and skip_softmax serve MHA and GQA models" in str(wide.refuse(model("MHA")))
    assert "its qk_rope_head_dim is 48; allowed: 16, 32, 64" in str(wide.refuse(model(rope=48)))
    assert "its kv_lora_rank is 384; allowed: 64, 128, 256, 512" in str(wide.refuse(model(latent=384)))
    assert "robsa needs a calibration of this model" in str(robsa().refuse(model()))
    own = fingerprint(str(TINY_MLA))
    assert robsa(calibration=calibration([1.0] * 4, own)).refuse(model()) is None
    changed = model()
    changed.model_override_args = {"rope_scaling": None}
    assert "changes ['rope_scaling'] of its config" in str(
        robsa(calibration=calibration([1.0] * 4, own)).refuse(changed)
    )
    assert "made on other weights, some-model" in str(robsa(calibration=calibration([1.0] * 4)).refuse_weights(model()))
    assert "of a model of 3 layers, this one has 4" in str(robsa(calibration=calibration([1.0] * 3)).refuse(model()))
    assert "no layer is left" in str(robsa(calibration=calibration([0.5] * 4, own)).refuse(model()))


def test_a_request_has_a_theta_of_its_own() -> None:
    settings = build("robsa", {**UNCALIBRATED, "min_seq_len": 0, "crossover_tokens": 0})
    rows = [parse_options(settings, params) for params in ({}, {"theta1": 0.5}, {"theta1": 1.0}, {"sparse": False})]
    plan = plan_decode(settings.decode, torch.tensor([1600] * 4), rows)
    assert plan.groups[0].row_thresholds.tolist() == pytest.approx([0.9, 0.5, 1.0, 0.9])
    assert plan.groups[0].n_pages.tolist() == [100] * 4 and plan.groups[0].n_select.tolist() == [50, 50, 100, 100]
    with refused("active_ratio"):
        parse_options(settings, {"active_ratio": 0.1})


def test_blocks_are_smaller_than_pages() -> None:
    method = robsa(page_size=64, block_size=16, min_seq_len=0, crossover_tokens=0, **UNCALIBRATED)
    plan = plan_decode(DecodeGroups(["robsa"], [method]), torch.tensor([1, 16, 17, 1600]))
    assert plan.groups[0].n_pages.tolist() == [1, 1, 2, 100] and plan.groups[0].n_select.tolist() == [1, 1, 1, 50]


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


class Rows:
    """A decode batch over a random latent cache."""

    lengths = (150, 160, 333, 640)

    def __init__(self, method: Robsa) -> None:
        torch.manual_seed(2)
        shape = ModelShape(1, HEADS, 1, LATENT + ROPE, torch.float32, ROPE)
        self.method, self.aux = method, AuxBuffers(method.aux_specs(shape), (0,), 200, BLOCK, "cpu")
        self.cache = torch.randn(200 * BLOCK, LATENT + ROPE)
        self.view = allocate_view(len(self.lengths), 1, 40, 40, BLOCK, torch.zeros(4, dtype=torch.int64))
        free, last = (torch.randperm(199) + 1).tolist(), []
        for row, length in enumerate(self.lengths):
            n_blocks = -(-length // BLOCK)
            self.view.page_table[row, :n_blocks] = torch.tensor([free.pop() for _ in range(n_blocks)])
            self.view.n_pages[row] = n_blocks
            last.append(int(self.view.page_table[row, n_blocks - 1]) * BLOCK + (length - 1) % BLOCK)
        self.view.n_select.copy_(torch.minimum(method.n_select(self.view.n_pages), self.view.n_pages))
        self.view.row_thresholds.fill_(method.row_threshold)
        self.nope = torch.randn(len(self.lengths), HEADS, LATENT) * 2
        self.rope = torch.randn(len(self.lengths), HEADS, ROPE) * 8
        self.last_slots = torch.tensor(last)

    def select(self, stored: torch.Tensor, mean_over_ranks: Any = lambda mass: mass) -> list[list[int]]:
        """The logical blocks that each row selects."""
        query = LatentQuery(self.nope, self.rope, stored, self.last_slots, 0.1, 1.0, mean_over_ranks)
        selected = self.method.select(self.view, 0, query, self.aux)
        rows = zip(self.view.page_table.tolist(), selected.indices[:, 0].tolist(), selected.counts[:, 0], strict=True)
        return [[table.index(block) for block in blocks[: int(count)]] for table, blocks, count in rows]


@pytest.mark.parametrize("insensitive", ["dense", "full_score"])
@pytest.mark.parametrize(("theta1", "rope_copy"), [(0.5, "off"), (0.9, "auto"), (0.5, "on")])
def test_selection(insensitive: str, theta1: float, rope_copy: str) -> None:
    given = calibration([0.9 if insensitive == "full_score" else 1.0])
    fields = {"insensitive": insensitive, "theta1": theta1, "max_active_ratio": 0.99, "rope_copy": rope_copy}
    rows = Rows(robsa(calibration=given, **fields))
    stored = rows.cache.clone()
    if rope_copy == "on":
        # Twice, and the dummy page with it, as padded rows are refreshed.
        for _ in range(2):
            rows.aux.refresh({0: stored[:, None]}, torch.tensor([*range(BLOCK - 1, 200 * BLOCK, BLOCK), -1]))
        assert torch.equal(rows.aux.buffer("rope_copy", 0).flatten(0, 1), stored[:, LATENT:])
        assert rows.aux.specs[0].before_select, "the newest page is scored too"
        if insensitive == "dense":
            stored[:, LATENT:] = float("nan")
    found = rows.select(stored)
    whole = torch.cat([rows.nope, rows.rope], -1)
    for row, length in enumerate(rows.lengths):
        slots = (rows.view.page_table[row, :, None].long() * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        keys = rows.cache[slots]
        asked, seen = (whole[row], keys) if insensitive == "full_score" else (rows.rope[row], keys[:, LATENT:])
        assert found[row] == naive(asked, seen, 0.1, theta1) and 0 < len(found[row]) < -(-length // BLOCK)
    held, attended = int(rows.view.n_pages.sum()), sum(map(len, found))
    assert rows.view.stats.tolist() == [len(rows.lengths), attended, held, 0]


@pytest.mark.parametrize("head_scope", ["global", "rank"])
def test_the_mean_over_ranks_is_what_counts(head_scope: str) -> None:
    def other(mass: torch.Tensor) -> torch.Tensor:
        """All the mass is on the third block."""
        return torch.zeros_like(mass).index_fill_(1, torch.tensor([2]), 1.0)

    rows = Rows(robsa(head_scope=head_scope, max_active_ratio=0.99, **UNCALIBRATED))
    found = rows.select(rows.cache, other)
    forced = [[2, -(-length // BLOCK) - 1] for length in rows.lengths]
    assert (found == forced) == (head_scope == "global")


def test_a_row_that_needs_too_much_gets_all() -> None:
    rows = Rows(robsa(theta1=0.99, max_active_ratio=0.1, **UNCALIBRATED))
    found = rows.select(rows.cache)
    over = [row for row, blocks in enumerate(found) if len(blocks) > int(rows.view.n_select[row])]
    assert over and all(found[row] == [*range(-(-rows.lengths[row] // BLOCK))] for row in over)
    assert int(rows.view.stats[3]) == len(over)


@pytest.mark.parametrize("theta1", [0.3, 0.99, 1.0])
def test_a_budget_keeps_the_heaviest_blocks(theta1: float) -> None:
    budget = 7
    whole = Rows(robsa(theta1=min(theta1, 0.999), max_active_ratio=0.999, **UNCALIBRATED))
    rows = Rows(robsa(theta1=theta1, token_budget=budget * BLOCK + 3, **UNCALIBRATED))
    query = LatentQuery(rows.nope, rows.rope, rows.cache, rows.last_slots, 0.1, 1.0, lambda mass: mass)
    mass = rows.method.mass(rows.view, 0, query, rows.aux)
    for row, (found, needed) in enumerate(zip(rows.select(rows.cache), whole.select(whole.cache), strict=True)):
        newest = -(-rows.lengths[row] // BLOCK) - 1
        heaviest = mass[row, : newest + 1].topk(budget - 1).indices.tolist()
        assert found == (needed if len(needed) < budget else sorted({*heaviest, newest}))
    assert int(rows.view.stats[3]) == 0, "no row gets all of its blocks"


@pytest.mark.parametrize(
    "fields",
    [{}, {"rope_copy": "on"}, {"insensitive": "full_score"}, {"head_scope": "rank"}, {"token_budget": 8 * BLOCK}],
)
def test_a_step_takes_what_it_says(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: refreshing, selecting and attending in one layer, by the kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = calibration([0.9 if "insensitive" in fields else 1.0])
    bound = {} if "token_budget" in fields else {"max_active_ratio": 0.99}
    rows = Rows(robsa(calibration=given, **bound, **fields))

    def mean_over_ranks(mass: torch.Tensor) -> torch.Tensor:
        # The interpreter holds what it ran on in cycles.
        gc.collect()
        return mass + 0.0

    query = LatentQuery(rows.nope, rows.rope, rows.cache, rows.last_slots, 0.1, 1.0, mean_over_ranks)
    out = torch.zeros_like(rows.nope)
    with Peak() as peak:
        rows.aux.refresh({0: rows.cache[:, None]}, rows.last_slots, before_select=True)
        found = rows.method.select(rows.view, 0, query, rows.aux)
        gc.collect()
        asked, kept = (query.nope, query.rope, query.cache), (found.indices, found.counts, rows.last_slots)
        sparse_mla_decode(*asked, *kept, BLOCK, 0.1, out=out, usual_blocks=rows.view.usual_select)
    model = ModelShape(1, HEADS, 1, LATENT + ROPE, torch.float32, ROPE)
    meta = allocate_view(len(rows.lengths), 1, 40, 40, BLOCK, torch.zeros(4, dtype=torch.int64, device="meta"))
    assert peak.nbytes == rows.method.scratch_bytes(model, meta, torch.float32, torch.device("cpu"))

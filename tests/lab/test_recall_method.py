"""Selections of shipped and made-up methods in process, and what they keep of the attention."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rope_calibrations import calibration

from eval.lab.selection.recall_attention import Captured, Selection, judge
from eval.lab.selection.recall_method import ModelFacts, method_settings, require_served, select
from eval.live.counters import EvaluationError
from sglang_sparse.config.settings import Settings
from sglang_sparse.methods.base import DecodeMethod, SparseIndices
from sglang_sparse.methods.config import MethodConfig
from sglang_sparse.methods.groups import DecodeGroups
from sglang_sparse.tools.calibration.similarity import select as rope_selection

PAGE, KV_HEADS, GROUP, DIM = 16, 2, 4, 64


def captured(length: int = 205, queries: int = 40, sharp: float = 1.0) -> Captured:
    torch.manual_seed(5)
    query = sharp * torch.randn(queries, KV_HEADS * GROUP, DIM)
    return Captured(1, query, torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, DIM), DIM**-0.5)


class Named(DecodeMethod):
    """Selects what a function of the row's number of units says, for every KV head."""

    def __init__(self, choose: Callable[[int], list[int]], unit: str = "page") -> None:
        super().__init__(MethodConfig(dense_fallback="never"))
        self.choose, self.unit = choose, unit

    def aux_specs(self, model: Any) -> tuple[()]:
        return ()

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        return torch.full_like(n_pages, 2)

    def select(self, view: Any, layer_id: int, query: torch.Tensor, pools: Any) -> SparseIndices:
        held = int(view.n_pages[0])
        ids = self.choose(held)
        if self.unit == "page":
            ids = [int(view.page_table[0, i]) if i < held else i + 1 for i in ids]
        indices = torch.tensor([*ids, -1], dtype=torch.int32).expand(1, KV_HEADS, -1)
        counts = torch.full((1, KV_HEADS), len(ids), dtype=torch.int32)
        return SparseIndices(indices, counts, self.unit)  # type: ignore[arg-type]


def chosen_by(method: DecodeMethod, data: Captured) -> Selection:
    return select(Settings("named", DecodeGroups(["named"], [method])), data, Facts())


def test_resa_selects_as_its_paper_says() -> None:
    data = captured()
    paper = {"summary": "minmax", "group": "mean_query"}
    settings = method_settings("resa", json.dumps({**paper, "active_ratio": 0.2, "min_pages": 2, "local_pages": 1}))
    found = select(settings, data, Facts())
    for row, position in enumerate(data.positions.tolist()):
        pages = data.key[: position + 1].split(PAGE)
        count = max(2, math.ceil(round(0.2 * len(pages), 9)))
        for head in range(KV_HEADS):
            mean = data.query[row].view(KV_HEADS, GROUP, DIM)[head].mean(0)
            bounds = [torch.maximum(mean * p[:, head].amax(0), mean * p[:, head].amin(0)).sum() for p in pages]
            bounds[-1] = torch.tensor(math.inf)
            best = sorted(range(len(pages)), key=lambda i: -bounds[i])[:count]
            kept = [token for i in best for token in range(i * PAGE, (i + 1) * PAGE) if token <= position]
            assert found.kept[row, head].nonzero().flatten().tolist() == sorted(kept)
            assert found.counts[row, head] == count


@pytest.mark.parametrize("page", [16, 64])
def test_robsa_selects_for_all_heads_by_the_rotary_keys_that_they_share(page: int) -> None:
    torch.manual_seed(2)
    heads, dims, rope, length = 6, 48, 64, 405
    keys = torch.cat([torch.randn(length, heads, dims), torch.randn(length, 1, rope).expand(-1, heads, -1)], -1)
    data = Captured(2, 2 * torch.randn(30, heads, dims + rope), keys, torch.randn(length, heads, 32), 0.1)
    model = Facts(kv_lora_rank=512, qk_rope_head_dim=rope)
    given = json.dumps({"page_size": page, "theta1": 0.5, "max_active_ratio": 0.9, "allow_uncalibrated": True})
    settings = method_settings("robsa", given)
    assert require_served(settings, model) == (0, 1, 2, 3)
    found = select(settings, data, model)
    scores = torch.zeros(30, length)
    for row, position in enumerate(data.positions.tolist()):
        logits = torch.einsum("hd,td->ht", data.query[row, :, dims:], keys[: position + 1, 0, dims:]) * data.scaling
        scores[row, : position + 1] = logits.softmax(-1).mean(0)
    kept = rope_selection(scores, data.positions, 0.5, 16) & (torch.arange(length) <= data.positions[:, None])
    assert found.unit == 16 and found.kept.shape == (30, 1, length) and found.kept[:, 0].equal(kept)
    judged = judge(data, found, 0)
    for head in (0, heads - 1):
        logits = keys[: data.positions[7] + 1, head] @ data.query[7, head] * data.scaling
        expected = logits.softmax(0)[kept[7, : data.positions[7] + 1]].sum()
        torch.testing.assert_close(judged.mass["method"][head, 7], expected)
    total = {name: mass.sum(0) for name, mass in judged.mass.items()}
    assert (total["best"] >= total["method"] - 1e-5).all() and (total["best"] >= total["random"] - 1e-5).all()


def test_pages_and_tokens_become_masks() -> None:
    data = captured()
    found = chosen_by(Named(lambda held: [0, held - 1]), data)
    for row, position in enumerate(data.positions.tolist()):
        expected = [*range(PAGE), *range(position // PAGE * PAGE, position + 1)]
        assert found.kept[row, 1].nonzero().flatten().tolist() == expected
    assert found.unit == PAGE and (found.counts == 2).all()
    found = chosen_by(Named(lambda held: [PAGE, PAGE + 3], "token"), data)
    assert found.unit == 1 and found.kept[:, 0].nonzero()[:, 1].unique().tolist() == [0, 3]


@pytest.mark.parametrize("choose", [lambda held: [0, held], lambda held: [0, 0], lambda held: [0, -1]])
def test_wrong_selections_are_refused(choose: Callable[[int], list[int]]) -> None:
    with pytest.raises(EvaluationError, match="a page twice, or one that the row does not hold"):
        chosen_by(Named(choose), captured())


def test_keys_out_of_range_are_refused() -> None:
    data = captured()
    data.key[17, 0, 3] = 1e4
    settings = method_settings("resa", '{"min_pages": 2, "summary_dtype": "fp8"}')
    with pytest.raises(EvaluationError, match="out of the range"):
        select(settings, data, Facts())


def test_everything_keeps_everything() -> None:
    data = captured()
    judged = judge(data, chosen_by(Named(lambda held: list(range(held))), data), 0)
    for name in ("method", "best", "random"):
        torch.testing.assert_close(judged.mass[name], torch.ones(KV_HEADS * GROUP, 40))
        torch.testing.assert_close(judged.error[name], torch.zeros(KV_HEADS * GROUP, 40), atol=1e-5, rtol=0)


def test_mass_and_error_are_those_of_plain_attention() -> None:
    data = captured()
    found = chosen_by(Named(lambda held: [1, held - 1]), data)
    judged = judge(data, found, 0)
    for row, position in ((0, 165), (39, 204)):
        for head in range(KV_HEADS * GROUP):
            kv = head // GROUP
            logits = data.key[: position + 1, kv] @ data.query[row, head] * data.scaling
            weights, value = logits.softmax(0), data.value[: position + 1, kv]
            kept = found.kept[row, kv, : position + 1]
            dense = weights @ value
            sparse = logits.masked_fill(~kept, -math.inf).softmax(0) @ value
            torch.testing.assert_close(judged.mass["method"][head, row], weights[kept].sum())
            torch.testing.assert_close(judged.error["method"][head, row], (sparse - dense).norm() / dense.norm())


def test_best_is_best_and_random_is_none_of_the_worst() -> None:
    data = captured(sharp=3.0)
    found = select(method_settings("resa", '{"active_ratio": 0.2, "min_pages": 1}'), data, Facts())
    judged = judge(data, found, 0)
    by_group = {name: mass.view(KV_HEADS, GROUP, -1).sum(1) for name, mass in judged.mass.items()}
    assert (by_group["best"] >= by_group["method"] - 1e-5).all() and (
        by_group["best"] >= by_group["random"] - 1e-5
    ).all()
    assert by_group["method"].mean() > by_group["random"].mean()
    assert torch.equal(judge(data, found, 0).mass["random"], judged.mass["random"])
    assert not torch.equal(judge(data, found, 1).mass["random"], judged.mass["random"])


def test_random_pages_hold_the_newest_one() -> None:
    data = captured(sharp=0.0)
    judged = judge(data, chosen_by(Named(lambda held: [held - 1]), data), 0)
    # Without queries all tokens weigh the same.
    expected = (data.positions % PAGE + 1) / (data.positions + 1)
    torch.testing.assert_close(judged.mass["random"], expected.expand(KV_HEADS * GROUP, -1))
    torch.testing.assert_close(judged.mass["best"], (PAGE / (data.positions + 1)).expand(KV_HEADS * GROUP, -1))


class Facts(ModelFacts):
    def __init__(self, **text: Any) -> None:
        from transformers import Qwen3Config

        super().__init__(Qwen3Config(num_hidden_layers=4, architectures=["TheModel"], **text))


def test_refused_models() -> None:
    settings = method_settings("resa", '{"layers": "1-"}')
    assert require_served(settings, Facts()) == (1, 2, 3)
    mla = Facts(kv_lora_rank=512)
    with pytest.raises(EvaluationError, match="does not fit TheModel: resa needs an MHA or GQA model"):
        require_served(settings, mla)
    with pytest.raises(EvaluationError, match="of MLA models recall is measured for robsa alone"):
        require_served(Settings("named", DecodeGroups(["named"], [Named(lambda held: [0])])), mla)
    calibrated = {"calibration": calibration([0.999, 0.5, 0.999, 0.5])}
    mla = Facts(kv_lora_rank=512, qk_rope_head_dim=64)
    assert require_served(method_settings("robsa", json.dumps(calibrated)), mla) == (0, 2)
    full = json.dumps({**calibrated, "insensitive": "full_score"})
    with pytest.raises(EvaluationError, match="scores by latent keys, which transformers shows expanded"):
        require_served(method_settings("robsa", full), mla)
    with pytest.raises(EvaluationError, match="the model has layers 0 to 3"):
        require_served(method_settings("resa", '{"layers": "7"}'), Facts())


def test_methods_that_ask_for_more_than_is_known() -> None:
    class Curious(Named):
        def refuse(self, model_config: Any) -> str | None:
            return "no quantisation" if model_config.quantization else None

    with pytest.raises(EvaluationError, match=r"what only a server knows: .*quantization"):
        require_served(Settings("named", DecodeGroups(["named"], [Curious(lambda held: [0])])), Facts())

"""Parts of a server with rules by layer: what each has of its own, and what is added up over them."""

from typing import Any

import torch

from sglang_sparse import crossover, metrics, recipes
from sglang_sparse.composite import Composite, count_sizes, with_parts
from sglang_sparse.config import build
from sglang_sparse.method import ModelShape
from sglang_sparse.plan import DecodePlan, plan_decode
from sglang_sparse.pools import AuxPools
from sglang_sparse.stats import Counters
from sglang_sparse.view import allocate_view

SHAPE = ModelShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16)
SKIP = {"method": "skip_softmax", "threshold_scale_factor": {"decode": 40}}
SHARED = {"rectify_interval": 0, "crossover_tokens": 0, "min_seq_len": 0}
BOTH = {"layers": {"0": "dense", "1": {}, "2-": SKIP}, **SHARED}


def test_two_parts_of_a_method_run_with_factors_of_their_own() -> None:
    other = {**SKIP, "threshold_scale_factor": {"decode": 10}}
    method = build("skip_softmax", {"layers": {"0": other, "1-": SKIP}, **SHARED}).method
    counts = torch.zeros(sum(count_sizes(method)), dtype=torch.int64)
    view = with_parts(allocate_view(2, 2, 64, 64, 16, counts), method, 64)
    table = torch.arange(2 * 1024, dtype=torch.int32).reshape(2, 1024)
    batch: Any = type("Batch", (), {"req_pool_indices": torch.tensor([1])})
    view.load(plan_decode(method, torch.tensor([640])), batch, table)
    assert [part.values.tolist() for part in view.parts] == [[10, 0], [40, 0]]
    assert any("prefill is what --sparse-prefill-method says" in text for text in method.warnings())


def test_a_part_refuses_weights_for_all() -> None:
    method = build("resa", BOTH).method
    assert isinstance(method, Composite) and method.refuse_weights(None) is None
    method.parts[1].refuse_weights = lambda model_config: "of another model"  # type: ignore[method-assign]
    assert method.refuse_weights(None) == "of another model"


def test_what_both_kinds_of_parts_count_is_reported_together(caplog: Any) -> None:
    settings = build("resa", BOTH)
    method = settings.method
    pools = AuxPools(method.aux_specs(SHAPE), (1, 2, 3), 8, 16, "cpu")
    counted = Counters(settings, pools, SHAPE, torch.zeros(sum(count_sizes(method)), dtype=torch.int64), None)
    report = metrics.IntervalReport(counted, metrics.DeviceCopy(counted.device_stats), None, logs=False, time=0.0)
    published: list[metrics.Interval] = []
    report._metrics = type("Metrics", (), {"publish": staticmethod(published.append)})  # type: ignore[assignment]
    counted.add_decode(plan_decode(method, torch.tensor([640])))
    # ReSA counts on the device: one layer, two KV heads.
    counted.select_stats[:3] += torch.tensor([2, 8, 80])
    for time in (1.0, 2.0, 3.0):
        report.step(time)
    assert sum(one.counts["pages_attended"] for one in published) == 8 + 2 * 2 * 40
    assert sum(one.counts["pages_held"] for one in published) == 80 + 2 * 2 * 40


def test_a_recipe_charges_each_part_for_its_own_layers(tmp_path: Any) -> None:
    text = (recipes.FOLDER / "qwen3-8b-long.toml").read_text()
    rules = '{ "0-17" = {}, "18-" = { method = "skip_softmax", threshold_scale_factor = { decode = 40.0 } } }'
    config = f"config = {{ rectify_interval = 0, layers = {rules} }}"
    path = tmp_path / "own.toml"
    path.write_text(text.replace('method = "resa"', f'method = "resa"\n{config}'))
    whole, part = recipes.memory(recipes.load("qwen3-8b-long")), recipes.memory(recipes.load(str(path)))
    assert part.summaries == whole.summaries / 2 > 0


def test_the_crossover_is_that_of_the_part_that_pays_last() -> None:
    method = build("resa", {"layers": {"0": {}, "1": {"active_ratio": 0.5}}})
    entry = crossover.setup("resa", method.method.parts[0].config, SHAPE, "cpu")
    table = [{**entry, "active_ratio": ratio, "crossover_tokens": tokens} for ratio, tokens in ((0.1, 20), (0.5, 70))]
    assert crossover.find(method, SHAPE, torch.device("cpu"), table).tokens == 70


def test_a_dense_plan_has_no_parts() -> None:
    plan = plan_decode(build("resa", {**BOTH, "min_seq_len": 4096}).method, torch.tensor([10]))
    assert not plan.sparse and isinstance(plan, DecodePlan) and plan.parts == ()

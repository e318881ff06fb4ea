"""The inputs of the benchmark of MLA layers and what outputs over them are worth."""

from dataclasses import replace

import pytest
import torch
from kernel_layers import machine
from mla_layers import BASE, OWN, SHAPE, dense, exact, wrong

from eval.lab.bench_mla import measure
from eval.lab.kernels import harness
from eval.lab.kernels.harness import Implementation, kept
from eval.lab.kernels.mla import ATTEND, COPY, DENSE, FULL, MASS, ROPE, TOPP, WHOLE
from eval.lab.kernels.mla_inputs import RECIPE, Shape, Step, recipe_for, target_share
from eval.lab.kernels.mla_quality import active, quality, samples
from eval.lab.structured.generator import near_active, read_recipe
from eval.lab.structured.structure import Recipe
from eval.live.counters import EvaluationError
from sglang_sparse_kernels.common.timing import Run


@pytest.fixture(scope="module")
def step() -> Step:
    return Step(SHAPE, recipe_for(SHAPE, BASE), "cpu", 2)


def test_inputs_need_as_many_blocks_as_they_were_made_for(step: Step) -> None:
    found = active(step, ROPE)
    assert abs(found["active_share"] - 0.2) < 0.02 and found["dense_rows"] == 0
    assert found["active_blocks"] <= found["active_blocks_max"] < SHAPE.capacity == 47
    # No two rows of any layer have the same keys.
    rows = [layer.cache[step.slots(row)] for layer in step.layers for row in range(2)]
    assert not any(rows[i].equal(rows[j]) for i in range(4) for j in range(i))
    assert all(sample.similarity > 0.99 for sample in samples(step))


def test_real_dimensions_and_the_concentration_of_the_paper() -> None:
    assert (
        target_share(Shape(8, 65536), "paper") == 320 / 4096 and target_share(Shape(1, 131072), "paper") == 500 / 8192
    )
    assert target_share(Shape(1, 100), "any") is None and target_share(Shape(1, 100), 0.1) == 0.1
    for shape in (Shape(1, 65536, block_size=32), Shape(1, 65536, theta1=0.95), Shape(1, 16384), Shape(1, 65537)):
        with pytest.raises(EvaluationError, match=r"the paper does not say how many are active: it does of 32k, 48k"):
            target_share(shape, "paper")
    shape = Shape(1, 32768, heads=2, target_share=target_share(Shape(1, 32768), "paper"))
    made = Step(shape, recipe_for(shape, read_recipe(dict(RECIPE))), "cpu", 1)
    assert 200 < active(made, ROPE)["active_blocks"] < 240 and samples(made)[0].similarity > 0.99


def test_recipes() -> None:
    assert recipe_for(replace(SHAPE, target_share=None), BASE) is BASE
    with pytest.raises(EvaluationError, match=r"2x1500: no number of stripes makes 0\.020 of the blocks hold 0\.9 of"):
        recipe_for(replace(SHAPE, target_share=0.02), BASE)


def test_least_work_of_a_v3_layer() -> None:
    shape = Shape(8, 65536, target_share=320 / 4096)
    # Queries and outputs of 128 heads, and the table of pages.
    asked, table = 128 * (576 + 512) * 2, 1024 * 4
    assert shape.num_bytes(DENSE, ROPE, 320, 2) == 8 * (65536 * 576 * 2 + asked + table)
    assert shape.num_bytes(DENSE, ROPE, 320, 1) == 8 * (65536 * 576 + asked + table)
    assert shape.num_bytes(MASS, ROPE, 320, 2) == 8 * (65536 * 64 * 2 + 128 * 64 * 2 + 4096 * 8)
    assert shape.num_bytes(MASS, FULL, 320, 2) > 8 * shape.num_bytes(MASS, COPY, 320, 2)
    parts = [shape.num_bytes(op, ROPE, 320, 2) for op in (MASS, TOPP, ATTEND)]
    assert shape.num_bytes(WHOLE, ROPE, 320, 2) == sum(parts) and parts[2] == 8 * (320 * (16 * 576 * 2 + 4) + asked)
    assert shape.flops(DENSE, ROPE, 320) == 8 * 65536 * 128 * 2 * (576 + 512)
    assert shape.flops(WHOLE, ROPE, 320) == shape.flops(MASS, ROPE, 320) + shape.flops(ATTEND, ROPE, 320)
    # Each layer's selected blocks are the least that any operation streams.
    assert shape.num_layers(60 * 2**20) * parts[2] >= 3 * 60 * 2**20 and shape.num_layers(0) == 2


def test_quality_against_float64(step: Step) -> None:
    over = samples(step)
    found = {(one.op, one.name): quality(step, over, one, one.prepare(step)[0]()) for one in OWN}
    whole = found[WHOLE, ROPE]
    assert whole["relative_l2"] < 5e-3 < whole["dense_l2"] < 0.2 and whole["target_sparsity"] == 0.8
    assert 0.85 < whole["recall"] < 0.97 and whole["recall"] == found[TOPP, ROPE]["recall"]
    assert whole == found[WHOLE, COPY] and whole["agreement"] == 1 and 0.9 <= found[WHOLE, FULL]["recall"] < 0.93
    assert found[TOPP, ROPE]["agreement"] == 1 and found[MASS, COPY]["mass_error"] < 1e-5
    assert found[MASS, ROPE] == found[MASS, COPY] != found[MASS, FULL]


def test_what_is_wrong_is_refused(step: Step) -> None:
    over, by = samples(step), {(one.op, one.name): one for one in OWN}
    (good,) = dense(good=exact)
    assert quality(step, over, good, exact(step)[0]())["relative_l2"] < 5e-3
    with pytest.raises(ValueError, match=r"its output is wrong: relative L2 .* from float64 \(allowed: 0\.02\)"):
        quality(step, over, good, wrong(step)[0]())
    output = by[WHOLE, ROPE].prepare(step)[0]()
    assert output is not None
    for spoiled in (output.roll(1, 0), torch.full_like(output, torch.nan)):
        with pytest.raises(ValueError, match="its output is wrong"):
            quality(step, over, by[WHOLE, ROPE], spoiled)
    first = step.layers[0]
    with pytest.raises(ValueError, match="its masses are off by"):
        quality(step, over, by[MASS, FULL], step.mass(ROPE, first))
    masses = step.mass(ROPE, first).clone()
    masses[1, 0] = torch.nan
    with pytest.raises(ValueError, match="its masses are off by nan"):
        quality(step, over, by[MASS, ROPE], masses)
    with pytest.raises(ValueError, match="there is no output"):
        quality(step, over, by[TOPP, ROPE], None)
    by[TOPP, ROPE].prepare(step)[0]()
    first.made[ROPE].indices[0, 0, 0] = step.block_table[0, -2]
    with pytest.raises(ValueError, match=r"it shares 9\d\.\d% of its blocks .* \d+\.\d% heavier or lighter .*: 0%\)"):
        quality(step, over, by[TOPP, ROPE], first.made[ROPE].indices)
    # An operation that selects everything is right about dense attention, and no sparse one.
    (everything,) = by[WHOLE, ROPE].prepare(step)[:1]
    everything()
    first.made[ROPE].indices[:, 0] = step.block_table
    first.made[ROPE].counts.fill_(SHAPE.n_blocks)
    with pytest.raises(ValueError, match=r"it shares \d\d\.\d% of its blocks .* \d+\.\d% heavier or lighter .*: 1%\)"):
        quality(step, over, by[WHOLE, ROPE], exact(step)[0]())


def test_blocks_that_weigh_the_same_may_take_each_others_place(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(one for one in OWN if (one.op, one.name) == (WHOLE, ROPE))
    output, (first, *_), given = one.prepare(step)[0](), samples(step), step.layers[0].given[ROPE]
    chosen = torch.isin(step.block_table[0], given.indices[0, 0, : int(given.counts[0, 0])])
    mass, indices = first.mass[ROPE], given.indices.clone()
    lightest, left_out = (mass.masked_fill(~mask, 9.0).argmin() for mask in (chosen, ~chosen))
    indices[0, 0, indices[0, 0] == step.block_table[0, lightest]] = step.block_table[0, left_out]
    monkeypatch.setitem(step.layers[0].given, ROPE, replace(given, indices=indices))
    mass[left_out] = mass[lightest] * 0.999
    found = quality(step, [first], one, output)
    assert 0 < found["off_by"] < 0.01 and 0.8 < found["agreement"] < 1
    mass[left_out] = mass[lightest] * 0.98
    with pytest.raises(ValueError, match=r"differ are up to 2\.0% heavier or lighter .* \(allowed: 1%\)"):
        quality(step, [first], one, output)


def test_a_failure_leaves_the_inputs_of_others_as_they_were(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    given = [(score, layer.given[score]) for layer in step.layers for score in layer.given]
    before = [(chosen.mass.clone(), chosen.indices.clone(), chosen.counts.clone()) for _, chosen in given]

    def breaking(one: Implementation[Step]) -> Implementation[Step]:
        def prepare(step: Step) -> list[Run]:
            def run(first: Run) -> torch.Tensor | None:
                first()
                raise RuntimeError("out of registers")

            return [lambda one=one: run(one) for one in one.prepare(step)]

        return replace(one, prepare=prepare)

    plan = [breaking(one) if one.op in (MASS, WHOLE) else one for one in OWN]
    rows = harness.measure(
        *("a test", "2x1500", machine(), 2, [kept(one, Step.clear) for one in plan], step),
        lambda one: {"op": one.op},
        lambda one, output: quality(step, samples(step), one, output),
        lambda _: 1,
    )
    assert [row["op"] for row in rows if "us" in row] == [TOPP, ATTEND]
    assert all("out of registers" in row["unavailable"] for row in rows if "us" not in row)
    for (_, chosen), earlier in zip(given, before, strict=True):
        assert all(map(torch.equal, (chosen.mass, chosen.indices, chosen.counts), earlier))
    capsys.readouterr()


def test_another_share_of_active_blocks_is_refused(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    other = Step(replace(SHAPE, target_share=0.3), step.recipe, "cpu", 1)
    one = next(one for one in OWN if one.op == WHOLE)
    allowed = "allowed are 2% of all blocks more or less, and 10% of the active ones"
    with pytest.raises(ValueError, match=rf"19\.\d\d% .* were made for 30\.00%: {allowed}"):
        quality(other, samples(other), one, one.prepare(other)[0]())
    # A tenth of 6.1 % is less than two points, a tenth of 30 % is more.
    assert near_active(0.065, 0.061) and not near_active(0.054, 0.061)
    assert near_active(0.285, 0.3) and not near_active(0.275, 0.3)
    # By full scores this structure needs so many; RoPE scores are nothing like them.
    unlike = Recipe(**{**BASE.model_dump(), "rope_share": 0.3})
    rows = measure(replace(SHAPE, target_share=None), unlike, [one], machine(), 2)
    assert rows[0]["similarity"] < 0.9 and "us" in rows[0] and "target_sparsity" not in rows[0]
    capsys.readouterr()

"""The profile of a decode step: steps of a trace, the charging of time, parts of a step, and its tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from profile_traces import FLASH, GRAPH, LAYER, event, replays, with_passes, write

from eval.lab.servers.profile import before_and_after, compare, part_of, short, summarise, tables
from eval.lab.servers.profile_trace import Launch, decode_steps, passes, read_trace, step_of
from eval.live.counters import EvaluationError


def test_steps_go_from_replay_to_replay(tmp_path: Path) -> None:
    launches = read_trace(write(tmp_path / "x.trace.json.gz", replays(6)))
    assert len(launches) == 66 and launches[0] == Launch(LAYER[0], 1000.0, 1010.0, 100)
    steps = decode_steps(launches, 4)
    assert [step.span_us for step in steps] == [150.0] * 4
    for step in steps:
        assert step.busy_us == 105 and step.gaps_us == [20.0, 25.0]
        assert step.uses[FLASH].us == 20 and step.uses[FLASH].calls == 2 and step.uses["reduce_argmax"].calls == 1
    with pytest.raises(
        EvaluationError, match="holds 5 whole decode steps that are alike, wanted 6: give more --tokens"
    ):
        decode_steps(launches, 6)


def test_other_graphs_are_no_steps(tmp_path: Path) -> None:
    # The tail of a replay that began before the trace, another batch size in the middle, and a small graph each step.
    events = [event(name, 900.0 + i, 1.0, 50) for i, name in enumerate(GRAPH[2:])]
    events += replays(7)
    events = [e | {"name": "nvjet_other"} if e["args"]["correlation"] == 130 else e for e in events]
    events += [
        event("tiny", 1000.0 + 150 * step + 130 + i, 1.0, 105 + 10 * step) for step in range(7) for i in range(4)
    ]
    steps = decode_steps(read_trace(write(tmp_path / "x.json.gz", events)), 4)
    assert [step.uses["tiny"].calls for step in steps] == [4] * 4 and "nvjet_other" not in steps[2].uses
    assert all("nvjet_other" not in step.uses for step in steps)
    with pytest.raises(EvaluationError, match="holds 4 whole"):
        decode_steps(read_trace(tmp_path / "x.json.gz"), 5)


def test_passes_are_what_takes_longer_than_a_step_between_two(tmp_path: Path) -> None:
    launches = read_trace(write(tmp_path / "x.json.gz", with_passes()))
    found = passes(launches, 2)
    for one in found:
        # From the end of a replay: sampling, the pass, and what is idle until the next one.
        assert one.span_us == 370 and one.uses[FLASH].us == 300 and one.uses["reduce_argmax"].calls == 1
        assert one.busy_us == 315 and LAYER[0] not in one.uses
    with pytest.raises(EvaluationError, match="holds 2 rectifying passes, wanted 3: give more --tokens"):
        passes(launches, 3)
    with pytest.raises(EvaluationError, match="holds 0 rectifying passes"):
        passes(read_trace(write(tmp_path / "y.json.gz", replays(8))), 1)


def test_time_is_charged_once() -> None:
    # The second begins early and waits, the third runs beside it, the fourth goes on beyond the step.
    launches = [Launch("a", 0, 10, 1), Launch("b", 4, 16, 1), Launch("c", 5, 12, 1), Launch("b", 20, 40, 2)]
    step = step_of(launches, 0, 30)
    assert {name: (use.us, use.duration_us, use.calls) for name, use in step.uses.items()} == {
        "a": (10, 10, 1),
        "b": (6 + 10, 12 + 20, 2),
        "c": (0, 7, 1),
    }
    assert step.busy_us == 26 and step.gaps_us == [4] and step.busy_us + sum(step.gaps_us) == step.span_us == 30


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_page_table_kernel", "page_table"),
        ("_page_summary_kernel", "page_summary"),
        ("_page_score_kernel", "page_score"),
        ("page_topk", "page_topk"),
        ("_page_topk_kernel", "page_topk"),
        ("kt_select", "kt_select"),
        ("index_topk", "index_topk"),
        ("_split_kernel", "sparse_decode, split"),
        ("_combine_kernel", "sparse_decode, combine"),
        (FLASH, "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8> > >", "attention"),
        ("void flash::prepare_varlen_num_blocks_kernel<1, true>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u>", "attention"),
        ("void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576> >", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("void (anonymous namespace)::store_kvcache<2048l, 1, false, long>", "KV write"),
        ("void (anonymous namespace)::fused_rope_store_kernel<true, 128l>", "KV write"),
        ("void (anonymous namespace)::fused_rope_kernel<true, 128l, true>", "norms, rope, activation"),
        ("void (anonymous namespace)::fused_qknorm_warp<128l, true>", "norms, rope, activation"),
        (
            "kernel_cutlass_kernel_flashinfernormkernelsfused_add_rmsnormFusedAddRMSNormKernel",
            "norms, rope, activation",
        ),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "norms, rope, activation"),
        ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16>", "norms, rope, activation"),
        ("nvjet_sm90_tst_256x8_64x6_2x1_v_bz_splitK_TNT", "matmuls"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmuls"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmuls"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float> > >", "other"),
        ("void flashinfer::sampling::TopPRenormProbKernel<1024u>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_parts_of_a_step(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_summary_and_tables(tmp_path: Path) -> None:
    steps = decode_steps(read_trace(write(tmp_path / "x.json.gz", replays(6))), 5)
    kernels, parts = summarise(steps)
    assert [row["us"] for row in kernels] == [20.0] * 5 + [5.0]
    assert {row["id"]: row["calls"] for row in kernels} == {**dict.fromkeys(LAYER, 2), "reduce_argmax": 1}
    found = {row["part"]: row for row in parts}
    assert list(found) == ["norms, rope, activation", "attention", "matmuls", "other", "busy", "idle", "step"]
    assert found["other"]["us"] == 25 and found["other"]["calls"] == 3
    assert found["idle"]["us"] == 45 and found["idle"]["gaps"] == 2 and found["idle"]["longest_gap_us"] == 25
    assert found["busy"]["us"] == 105 and found["step"]["calls"] == 11 and found["step"]["us"] == 150
    assert found["step"]["steps"] == 5 and found["busy"]["share"] == pytest.approx(0.7)
    shown = tables(kernels, parts)
    assert "| attention | 20.0 | 20.0 … 20.0 | 2 | 13.3 % |" in shown
    assert "| idle (2 gaps, the longest 25.0 µs) | 45.0 | 45.0 … 45.0 |  | 30.0 % |" in shown
    assert (
        "| `flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2` | attention | 20.0 | 20.0 | 2 | 13.3 % |"
        in shown
    )
    assert len(short("x" * 500)) == 90


def profile_file(path: Path, graph: tuple[str, ...], context: int = 64, revision: str = "r1") -> Path:
    kernels, parts = summarise(decode_steps(read_trace(write(path.with_suffix(".json.gz"), replays(4, graph))), 3))
    arguments = {"batch": 2, "context": context}
    header = {"kind": "header", "command": "eval.lab.profile_decode", "revision": revision, "arguments": arguments}
    rows: list[dict[str, Any]] = [header]
    rows += [{"kind": "item", **row} for row in kernels] + [{"kind": "summary", **row} for row in parts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_before_and_after(tmp_path: Path) -> None:
    before = profile_file(tmp_path / "before.jsonl", GRAPH)
    sparse = tuple("_split_kernel" if name == FLASH else name for name in GRAPH)
    after = profile_file(tmp_path / "after.jsonl", sparse[:9], revision="r2")
    assert compare(before, after).splitlines() == [
        "| part of a step | before (r1), µs | of the steps | calls | after (r2), µs | of the steps | calls |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| sparse_decode, split |  |  |  | 20.0 | 20.0 … 20.0 | 2 |",
        "| norms, rope, activation | 40.0 | 40.0 … 40.0 | 4 | 40.0 | 40.0 … 40.0 | 4 |",
        "| attention | 20.0 | 20.0 … 20.0 | 2 |  |  |  |",
        "| matmuls | 20.0 | 20.0 … 20.0 | 2 | 20.0 | 20.0 … 20.0 | 2 |",
        "| other | 25.0 | 25.0 … 25.0 | 3 | 15.0 | 15.0 … 15.0 | 2 |",
        "| busy | 105.0 | 105.0 … 105.0 | 11 | 95.0 | 95.0 … 95.0 | 10 |",
        "| idle | 45.0 | 45.0 … 45.0 |  | 55.0 | 55.0 … 55.0 |  |",
        "| step | 150.0 | 150.0 … 150.0 | 11 | 150.0 | 150.0 … 150.0 | 10 |",
    ]
    by_part, by_kernel = before_and_after(before, after).split("\n\n")
    assert by_part == compare(before, after)
    assert "| `_split_kernel` | sparse_decode, split | 20.0 | 20.0 | 2 | 13.3 % |" in by_kernel.splitlines()
    assert "Flash" not in by_kernel, "the kernels are those of the later file"
    with pytest.raises(EvaluationError, match=r"profiles 2 x 64 tokens, .* 2 x 128"):
        compare(before, profile_file(tmp_path / "longer.jsonl", GRAPH, context=128))

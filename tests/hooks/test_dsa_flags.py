"""SGLang's own arguments in a DSA server: those without effect are refused by name, and others are set."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

from sglang_sparse.config.settings import build
from sglang_sparse.hooks import dsa_flags
from sglang_sparse.methods.dsa.decode import STAGES
from sglang_sparse.tools import dry_run


@pytest.mark.parametrize(
    ("choice", "graphs", "left"),
    [
        ("portable", "breakable", "disabled"),
        ("portable", "disabled", "disabled"),
        ("native", "breakable", "breakable"),
        ("native", "full", "full"),
        ("auto", "breakable", "breakable"),
        ("auto", "full", "disabled"),
    ],
)
def test_prefill_graphs_that_the_indexer_cannot_be_in(
    choice: str, graphs: str, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    args: Any = SimpleNamespace(cuda_graph_config=CudaGraphConfig(prefill=PhaseConfig(backend=graphs)))
    dsa_flags.disable_prefill_graphs(args, build("resa", {}))
    assert args.cuda_graph_config.prefill.backend == graphs
    dsa_flags.disable_prefill_graphs(args, build("dsa", {"implementation": choice}))
    assert args.cuda_graph_config.prefill.backend == left
    assert ("prefill runs without CUDA graphs" in caplog.text) == (graphs != left)


DSA = build("dsa", {})
DEFAULTS = {"dsa_topk_backend": "sgl-kernel", "dsa_paged_mqa_logits_backend": "auto", "dtype": "auto"}
NATIVE, PORTABLE = STAGES["native"], STAGES["portable"]


@pytest.mark.parametrize(
    ("given", "stage", "field", "got", "allowed"),
    [
        ({"dsa_topk_backend": "flashinfer"}, "topk", "--dsa-topk-backend", "flashinfer", "sgl-kernel"),
        ({"dsa_paged_mqa_logits_backend": "cutedsl"}, "indexer", "--dsa-paged-mqa-logits-backend", "cutedsl", "auto"),
        ({}, "indexer", "SGLANG_DSA_TOPK_BROADCAST", True, "False"),
    ],
)
def test_what_only_sglangs_own_stage_heeds(
    given: dict[str, str], stage: str, field: str, got: object, allowed: str
) -> None:
    args: Any = SimpleNamespace(**{**DEFAULTS, **given})
    with envs.SGLANG_DSA_TOPK_BROADCAST.override(not given):
        with refused(field, got) as caught:
            dsa_flags.require_stages(args, DSA, {**NATIVE, stage: "portable"}, True)
        assert caught.value.allowed == f'{allowed}, or {{"implementation": "native"}}'
        with refused(field, got) as caught:
            dsa_flags.require_stages(args, DSA, PORTABLE, False)
        assert caught.value.allowed == allowed
        dsa_flags.require_stages(args, DSA, {**PORTABLE, stage: "native"}, True)
    defaults: Any = SimpleNamespace(**DEFAULTS)
    dsa_flags.require_stages(defaults, DSA, PORTABLE, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_model_that_is_not_bfloat16(dtype: torch.dtype) -> None:
    args: Any = SimpleNamespace(**DEFAULTS)
    name = str(dtype).removeprefix("torch.")
    with refused("--dtype", name):
        dsa_flags.require_dtype(args, DSA, dtype, True)
    dsa_flags.require_dtype(args, DSA, dtype, False)
    dsa_flags.require_dtype(args, DSA, torch.bfloat16, True)


OWN_KERNELS = ["--model-path", "MODEL", "--sparse-method", "dsa", "--sparse-config", '{"implementation": "portable"}']


@pytest.mark.parametrize(
    "flags",
    [
        ["--dp-size", "2"],
        ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
        ["--pp-size", "2"],
        ["--enable-hierarchical-cache"],
        ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "DRAFTER"],
    ],
)
def test_what_changes_no_selection_runs_beside_dsas_own_kernels(flags: list[str]) -> None:
    assert dry_run.refusal([*OWN_KERNELS, *flags], "DSA", (8, 0)) is None


@pytest.mark.parametrize(("gpu", "refused"), [((8, 0), True), ((12, 0), True), ((9, 0), False)])
def test_a_layer_that_drafts_needs_sglangs_kernels(gpu: tuple[int, int], refused: bool) -> None:
    said = dry_run.refusal([*OWN_KERNELS, "--speculative-algorithm", "EAGLE"], "DSA", gpu)
    told = "cannot run with --speculative-algorithm EAGLE on a GPU of compute capability"
    assert (said is not None and told in said) if refused else said is None


@pytest.mark.parametrize("flag", ["--enable-lmcache", "--enable-two-batch-overlap", "--enable-lora"])
def test_what_those_kernels_lack_sglangs_own_may_serve(flag: str) -> None:
    said = dry_run.refusal([*OWN_KERNELS, flag], "DSA", (8, 0))
    assert said is not None and f"{flag.removeprefix('--enable-').split('-')[0]}" in said.lower()
    assert said.endswith('; or leave the flag to SGLang by {"implementation": "native"}, on Hopper and Blackwell')

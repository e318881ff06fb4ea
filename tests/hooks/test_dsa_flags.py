"""SGLang's own arguments in a DSA server: those without effect are refused by name, and others are set."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from sglang.srt.environ import envs

from sglang_sparse.config.settings import build
from sglang_sparse.hooks import dsa_flags
from sglang_sparse.hooks.judge import judge_flags
from sglang_sparse.methods.dsa.decode import STAGES
from sglang_sparse.tools import dry_run

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


SERVED: list[list[str]] = [
    ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
    ["--pp-size", "2"],
    ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "DRAFTER"],
]
WORDS = ["--model-path", "MODEL", "--sparse-method", "dsa", "--sparse-config"]


def judged(flags: list[str], gpu: tuple[int, int], choice: str = "auto") -> Any:
    """The methods of a server, judged by its flags."""
    args = dry_run.parse([*WORDS, json.dumps({"implementation": choice}), *flags])
    args.page_size = 64
    return judge_flags(args, build("dsa", {"implementation": choice}), gpu)


@pytest.mark.parametrize("flags", [*SERVED, ["--dp-size", "2"], ["--enable-hierarchical-cache"]])
def test_what_changes_no_selection_runs_with_dsas_own_kernels(flags: list[str]) -> None:
    for gpu, choice in (((8, 0), "auto"), ((8, 0), "portable"), ((9, 0), "portable")):
        assert not judged(flags, gpu, choice).passes_through
        assert dry_run.refusal([*WORDS, json.dumps({"implementation": choice}), *flags], "DSA", gpu) is None


@pytest.mark.parametrize("flags", SERVED)
def test_auto_leaves_it_to_sglangs_kernels_where_they_run(flags: list[str]) -> None:
    assert judged(flags, (9, 0)).passes_through and not judged([], (9, 0)).passes_through


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--enable-lmcache"], "LMCache"),
        (["--enable-two-batch-overlap"], "two-batch overlap"),
        (["--enable-lora"], "LoRA"),
        (["--dwdp-size", "2"], "distributed weights"),
        (["--speculative-algorithm", "NGRAM"], "NGRAM"),
    ],
)
def test_other_flags_are_refused_by_name(flags: list[str], field: str) -> None:
    with refused(field):
        judged(flags, (8, 0))


@pytest.mark.parametrize("gpu", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("drafter", [[], ["--speculative-draft-model-path", "eval/models/tiny-dsa"]])
def test_what_drafts_has_no_indexer(gpu: tuple[int, int], drafter: list[str]) -> None:
    flags = ["--speculative-algorithm", "EAGLE", *drafter]
    args = dry_run.parse([*WORDS, '{"implementation": "portable"}', *flags])
    with refused("--speculative-algorithm", "EAGLE"):
        dsa_flags._require_drafter(args, build("dsa", {"implementation": "portable"}))
    assert dry_run.refusal([*WORDS, '{"implementation": "portable"}', *flags], "DSA", gpu) is not None


@pytest.mark.parametrize("flags", ["--tp-size 1 --attn-dp-size 2", "--tp-size 2 --dp-size 4 --enable-dp-attention"])
def test_ranks_that_cannot_be_divided_are_left_to_sglang(flags: str) -> None:
    """SGLang's own message says why, later in the start."""
    assert dry_run.refusal([*WORDS, '{"implementation": "portable"}', *flags.split()], "DSA", (8, 0)) is None

"""Tests of the kernel benchmarks' refusals, before anything is measured."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from eval.lab import bench_dsa, bench_framework, bench_kernels, bench_mla, bench_prefill

KERNELS = [
    ("--shapes 8y64k", "--shapes: a shape is batch x tokens, such as 8x64k or 1x100, got '8y64k'"),
    ("--shapes ,", "--shapes must be one at least, got []"),
    ("--ops page_top", "--ops: there is no 'page_top'"),
    ("--peers fa2", "--peers: there is no 'fa2'"),
    ("--page-size 12", "--page-size must be one of 1, 2, 4, 8, 16, 32, 64, got 12"),
    ("--active-ratio 0", "--active-ratio must be more than 0 and at most 1, got 0.0"),
    ("--n-min 0", "--n-min must be 1 or more, got 0"),
    ("--rounds 1", "--rounds must be 2 or more, got 1"),
    ("--context-length 64k", "--context-length must be 131072 or more, got 65536"),
    ("--topk-shapes 2x500", "--topk-shapes: a shape is blocks of a cluster (1, 2, 4, 8) x threads of a block"),
    (
        '--recipe {"sinks":1}',
        "--recipe: recipe: sinks: Extra inputs are not permitted, got 1; its fields are sink,",
    ),
    ("", "measured on a CUDA device, and torch finds none"),
]
MLA = [
    ("--shapes 8y64k", "--shapes: a shape is batch x tokens"),
    ("--shapes 8x16k", "--active: of 8x16k with blocks of 16 at theta1 0.9 the paper does not say"),
    ("--peers fa2", "--peers: there is no 'fa2', there are flashmla, fa3, flashinfer, triton, flashmla-fp8"),
    ("--ops dense", "--ops: there is no 'dense', there are dense_mla, block_mass"),
    ("--latent 100", "--latent must be 64, 128, 256 or 512, got 100"),
    ("--rope 16", "--rope must be 32 or 64, got 16"),
    ("--block-size 32 --page-size 16", "--block-size must be 16, 32 or 64, at most a page, got 32"),
    ("--theta1 0", "--theta1 must be more than 0 and at most 1, got 0.0"),
    ("--rounds 1", "--rounds must be 2 or more, got 1"),
    ("--recipe {}", "measured on a CUDA device, and torch finds none"),
    ('--recipe {"sink":0.5}', "--recipe: recipe: shares: Value error, sink, band, stripes and background must add"),
]
DSA = [
    ("--shapes 8y64k", "--shapes: a shape is batch x tokens"),
    ("--shapes 1024x8k", "--shapes: 1024x8k attends to 2097152 tokens with --topk 2048, and the cache has 2097088"),
    ("--prefill 2x32k", "--prefill must be one row of at least the 8192 tokens of --chunk, got 2x32k"),
    ("--prefill 1x4k", "--prefill must be one row of at least the 8192 tokens of --chunk, got 1x4k"),
    ("--shapes= --prefill=", "--shapes and --prefill are both empty; allowed: one shape at least"),
    ("--peers trtllm", "--peers: there is no 'trtllm', there are native, native-v1, native-flashmla-sparse"),
    ("--ops topk", "--ops: there is no 'topk', there are dsa_decode_selection, dsa_prefill_selection"),
    ("--topk 0", "--topk must be 1 or more, got 0"),
    ("--latent 100", "--latent must be 64, 128, 256 or 512, got 100"),
    ("--rope 20", "--rope must be 16, 32 or 64, got 20"),
    ("--heads 0", "--heads must be 1 or more, got 0"),
    ("--index-heads 65", "--index-heads must be 1 to 64, got 65"),
    ("--rounds 1", "--rounds must be 2 or more, got 1"),
    ("--replays 1", "--replays must be 2 or more, got 1"),
    ("--seed 1", "measured on a CUDA device, and torch finds none"),
]
FRAMEWORK = [
    ("--ops page_topk", "--ops: there is no 'page_topk', there are dense_decode, rocketkv_predict"),
    ("--page-size 2", "--page-size must be 4, 8, 16, 32 or 64, got 2"),
    ("--prompt-budget 35", "--prompt-budget must be 36 or more, got 35"),
    ("--topr 129", "--topr must be 1 to 128, got 129"),
    ("--skipped 1", "--skipped must be between 0 and 1, got 1.0"),
    ('--recipe {"stripe":1}', "--recipe: recipe: stripe: Extra inputs are not permitted"),
]
PREFILL = [
    ("--peers fa9", "--peers: there is no 'fa9', there are fa3, fa3-contiguous, flashinfer, flexprefill"),
    ("--dense-below 4k", "--dense-below must be a multiple of --chunk, which is 8192, got 4096"),
    ("--lengths 4k,8k --positions 4k", "--positions must be as many as a prompt has, got 4096"),
    ("--heads 32,8", "--heads must be three numbers"),
    ("--lengths 100", "--lengths must be lengths above 128"),
    ("--rounds 1", "--rounds must be 2 or more, got 1"),
    ("--method skip_softmax --values 0,1", "--values must be one at least, above 0, got [0.0, 1.0]"),
]
BENCHES = {
    bench_kernels: KERNELS,
    bench_mla: MLA,
    bench_dsa: DSA,
    bench_framework: FRAMEWORK,
    bench_prefill: PREFILL,
}


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [(bench, *case) for bench, cases in BENCHES.items() for case in cases],
)
def test_bad_input(
    bench: ModuleType,
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "bench.jsonl"
    assert bench.main(["--out", str(out), *options.split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{bench.__name__}: ") and message in line and not out.exists()

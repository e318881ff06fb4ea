"""What DSA's page and the report to SGLang say of its selection: it loses tokens, where this project's does not."""

import re
from pathlib import Path

import pytest
import torch

from sglang_sparse_kernels.index_topk import index_topk

pytestmark = pytest.mark.gpu

TOPK, QUERIES = 2048, 64
REPORT = Path(__file__).parents[2] / "patches" / "upstream" / "fast_topk_v2.md"


@pytest.fixture(autouse=True)
def library() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("sgl_kernel", reason="SGLang's kernels are not installed")


@pytest.mark.parametrize(("length", "spread"), [(32768, 1.0), (4096, 0.01), (8192, 0.01)])
def test_ours_loses_none(length: int, spread: float) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    # With the small spread all are within one bin of SGLang's coarse histogram, of which it keeps 4,096.
    logits = 1.1 + spread * torch.randn(QUERIES, length, device="cuda", generator=generator)
    lengths = torch.full((QUERIES,), length, dtype=torch.int32, device="cuda")
    # Equal tokens may stand for each other.
    last = logits.topk(TOPK).values[:, -1:]
    assert (logits.gather(1, index_topk(logits, lengths, TOPK)[0].long()) >= last).all()


def test_the_report_reproduces(capsys) -> None:
    (reproducer,) = re.findall(r"```python\n(.*?)```", REPORT.read_text(), re.S)
    exec(compile(reproducer, str(REPORT), "exec"), {})
    right = [float(share) for share in re.findall(r"logits: ([\d.]+)", capsys.readouterr().out)]
    assert right[0] == 1
    assert len(right) == 3
    assert max(right[1:]) < 0.6

"""Neither SGLang's selection nor this project's loses tokens where many logits are nearly equal."""

import pytest
import torch

from sglang_sparse_kernels.index_topk import index_topk

pytestmark = pytest.mark.gpu

TOPK, QUERIES = 2048, 64


@pytest.mark.parametrize(("length", "spread"), [(32768, 1.0), (4096, 0.01), (8192, 0.01), (32768, 0.01)])
def test_many_logits_near_the_last_one(length: int, spread: float) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    library = pytest.importorskip("sgl_kernel", reason="SGLang's kernels are not installed")
    generator = torch.Generator("cuda").manual_seed(length)
    # With the small spread all are within one bin of SGLang's coarse histogram, of which 0.5.17 kept 4,096.
    logits = 1.1 + spread * torch.randn(QUERIES, length, device="cuda", generator=generator)
    lengths = torch.full((QUERIES,), length, dtype=torch.int32, device="cuda")
    # Equal tokens may stand for each other.
    last = logits.topk(TOPK).values[:, -1:]
    for chosen in (index_topk(logits, lengths, TOPK)[0], library.fast_topk_v2(logits, lengths, TOPK)):
        assert (logits.gather(1, chosen.long()) >= last).all()

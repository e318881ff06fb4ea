"""What DSA's page says of SGLang 0.5.17's own selection in prefill: it loses tokens, where this project's does not."""

import pytest
import torch

from sglang_sparse_kernels.index_topk import index_topk

pytestmark = pytest.mark.gpu

TOPK, QUERIES = 2048, 64


@pytest.mark.parametrize(("length", "spread", "exact"), [(32768, 1.0, True), (4096, 0.01, True), (8192, 0.01, False)])
def test_many_logits_near_the_last_one(length: int, spread: float, exact: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    library = pytest.importorskip("sgl_kernel", reason="SGLang's kernels are not installed")
    generator = torch.Generator("cuda").manual_seed(length)
    # With the small spread all are within one bin of its coarse histogram, of which it keeps 4,096.
    logits = 1.1 + spread * torch.randn(QUERIES, length, device="cuda", generator=generator)
    lengths = torch.full((QUERIES,), length, dtype=torch.int32, device="cuda")
    # Equal tokens may stand for each other.
    last = logits.topk(TOPK).values[:, -1:]

    def in_common(chosen: torch.Tensor) -> float:
        return (logits.gather(1, chosen.long()) >= last).float().mean().item()

    assert in_common(index_topk(logits, lengths, TOPK)[0]) == 1
    native = in_common(library.fast_topk_v2(logits, lengths, TOPK))
    assert native == 1 if exact else native < 0.6

"""Negative controls of RoBSA: ``theta1`` of the blocks that a row holds, at random, or the first and the newest."""

import torch

from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.robsa.decode import Robsa
from sglang_sparse.methods.views import BatchView, LatentQuery

# By how much the mass of the first choice exceeds that of the last one: enough to order them, too little to count.
SPREAD = 1 / 64


class RandomBlocks(Robsa):
    """RoBSA whose blocks weigh the same, in an order drawn anew for each row, layer and step.

    So a request's ``theta1`` is the share of the blocks that its rows attend to, whatever is in them; the newest block
    is one of these, as RoBSA has it.
    """

    def mass(self, view: BatchView, layer_id: int, query: LatentQuery, pools: AuxBuffers) -> torch.Tensor:
        """Even masses."""
        return even(torch.rand_like(view.scores[:, 0]), view.n_pages)


class SinkWindow(RandomBlocks):
    """The first block and the newest ones.

    Source: StreamingLLM (arXiv:2309.17453), whose sinks are the first four tokens; here they are a block.
    """

    def mass(self, view: BatchView, layer_id: int, query: LatentQuery, pools: AuxBuffers) -> torch.Tensor:
        """Even masses, the first block's the highest, then the newest ones'."""
        scores = view.scores[:, 0]
        place = torch.arange(scores.shape[1], device=scores.device)
        order = (place / scores.shape[1]).masked_fill(place == 0, 1.0)
        return even(order.expand(scores.shape), view.n_pages)


def even(order: torch.Tensor, n_blocks: torch.Tensor) -> torch.Tensor:
    """Masses that add to 1 in each row and differ by little, higher where ``order`` is; 0 beyond a row's blocks.

    Args:
        order: ``[rows, max_blocks]`` float32, 0 to 1.
        n_blocks: ``[rows]`` int32; 0 of a row that pads a CUDA graph.
    """
    beyond = torch.arange(order.shape[1], device=order.device) >= n_blocks[:, None]
    mass = (1 + SPREAD * order).masked_fill(beyond, 0.0)
    return mass / mass.sum(-1, keepdim=True).clamp_min(1)

"""A negative control of RoBSA: the first block and the newest ones, ``theta1`` of all that a row holds.

Source: StreamingLLM (arXiv:2309.17453), whose sinks are the first four tokens; here they are a block.
"""

import torch
from random_blocks import RandomBlocks, even

from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.views import BatchView, LatentQuery


class SinkWindow(RandomBlocks):
    """The same without chance."""

    def mass(self, view: BatchView, layer_id: int, query: LatentQuery, pools: AuxBuffers) -> torch.Tensor:
        """Even masses, the first block's the highest, then the newest ones'."""
        scores = view.scores[:, 0]
        place = torch.arange(scores.shape[1], device=scores.device)
        order = (place / scores.shape[1]).masked_fill(place == 0, 1.0)
        return even(order.expand(scores.shape), view.n_pages)

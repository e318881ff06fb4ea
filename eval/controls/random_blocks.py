"""A negative control of RoBSA: as many blocks as it would attend to, chosen at random instead of by their mass."""

import torch

from sglang_sparse.methods.robsa import Robsa
from sglang_sparse.pools import AuxPools
from sglang_sparse.view import BatchView, LatentQuery


class RandomBlocks(Robsa):
    """RoBSA with the masses of a row's blocks shuffled; the newest block is attended to as by RoBSA."""

    def mass(self, view: BatchView, layer_id: int, query: LatentQuery, pools: AuxPools) -> torch.Tensor:
        """Draw anew for each row, layer and step."""
        mass = super().mass(view, layer_id, query, pools)
        return shuffled(mass, view.n_pages)


def shuffled(mass: torch.Tensor, n_blocks: torch.Tensor) -> torch.Tensor:
    """Masses ``[rows, max_blocks]`` in another order within the first ``n_blocks`` of each row; 0 beyond."""
    beyond = torch.arange(mass.shape[1], device=mass.device) >= n_blocks[:, None]
    order = torch.rand_like(mass).masked_fill(beyond, 2.0).argsort(-1)
    return mass.gather(-1, order).masked_fill(beyond, 0.0)

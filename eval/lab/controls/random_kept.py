"""A negative control of RocketKV: as many blocks of the prompt kept as it would keep, chosen at random."""

import torch

from sglang_sparse.methods.rocketkv import Rocketkv
from sglang_sparse.methods.roles import Prompts


class RandomKept(Rocketkv):
    """RocketKV whose first stage draws; its second one reads the best of what was drawn."""

    def keep(self, prompts: Prompts) -> torch.Tensor:
        """Draw anew for each prompt, KV head and layer."""
        rows, heads, device = len(prompts.lengths), prompts.key_cache.shape[1], prompts.lengths.device
        first_visible = (prompts.lengths - self.window_tokens) // self.block_size
        scores = torch.rand(rows, heads, int(first_visible.max()), device=device)
        beyond = torch.arange(scores.shape[2], device=device) >= first_visible[:, None, None]
        count = min(self.max_kept, scores.shape[2])
        drawn = scores.masked_fill(beyond, -1).topk(count).indices.sort().values.int()
        return torch.nn.functional.pad(drawn, (0, self.max_kept - count))

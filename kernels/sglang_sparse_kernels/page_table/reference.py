"""The definition of the page table in plain torch."""

import torch


def load_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    n_pages: torch.Tensor,
    widest: int,
    page_size: int,
    page_table: torch.Tensor,
) -> None:
    """See ``page_table.load_page_table``."""
    requests = req_pool_indices.shape[0]
    firsts = req_to_token[:, : widest * page_size : page_size]
    table = page_table[:requests, :widest]
    held = torch.arange(widest, device=table.device) < n_pages[:requests, None]
    table.copy_(torch.where(held, firsts[req_pool_indices.long()] // page_size, table))

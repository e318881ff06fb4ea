"""Sparse attention kernels over a paged KV cache: plain torch references and Triton implementations.

One folder per operation, each usable without SGLang:

- ``page_table``: the physical page of each logical page of a batch.
- ``page_summary``: element-wise maximum and minimum of every page's keys.
- ``page_score``: upper bound of each page's attention logit for one query group.
- ``page_topk``: the highest pages of each row, exact and deterministic.
- ``sparse_decode``: decode attention over the selected pages.
- ``anchor_prefill``: prefill attention over the initial block, the own group and the keys that come near their scores.
"""

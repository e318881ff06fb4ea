"""Sparse attention kernels over a paged KV cache: plain torch references and Triton implementations.

One folder per operation, each usable without SGLang:

- ``page_table``: the physical page of each logical page of a batch.
- ``page_summary``: element-wise maximum and minimum of every page's keys.
- ``page_centroids``: means of those keys of every page that lie together.
- ``page_score``: upper bound of each page's attention logit for one query group.
- ``page_vote``: how much of the attention each page would get, by what is kept of its keys.
- ``page_topk``: the highest pages of each row, exact and deterministic.
- ``sparse_decode``: decode attention over the selected pages.
- ``block_mass``: share of each block in a row's attention, by some dimensions of query and key.
- ``block_topp``: the smallest set of the highest blocks that hold a share of the mass.
- ``sparse_mla_decode``: decode attention over the selected blocks of a latent cache.
- ``index_keys``: FP8 queries and keys of the lightning indexer, and the paged cache of the keys.
- ``index_logits``: how much each query of the lightning indexer wants each token of its row.
- ``index_topk``: the tokens that each query wants most, exact and deterministic, and their slots.
- ``anchor_prefill``: prefill attention over the initial block, the own group and the keys that come near their scores.
- ``skip_softmax_prefill``, ``skip_softmax_decode``, ``skip_softmax_mla_decode``: attention that leaves out blocks of
  keys of little weight.
- ``window_score``: how much the last queries of a prompt attend to each of its tokens.
- ``kt_select``: the highest pages of the KT cache for a group of query heads, of those that a row may attend to.
"""

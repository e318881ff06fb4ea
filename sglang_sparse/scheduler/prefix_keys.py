"""Keys of the radix tree that tell groups apart as wholes, not token by token.

KV of a sparsely prefilled group depends on all its tokens. Two prompts that part within a group have different KV from
the group's first token on, while SGLang's tree would let them share pages up to where they part. So in the tree every
token of a sparse group carries a digest of its group: keys of different groups part at the group's edge, and lookup,
insertion and splitting stay SGLang's own, page by page.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.protocols import RadixKey, RadixTree
from sglang_sparse.config.request_options import prefill_of_namespace
from sglang_sparse.scheduler import inserted_keys
from sglang_sparse.scheduler.inserted_keys import InexactTreeError
from sglang_sparse.scheduler.prefill_chunks import current_settings

if TYPE_CHECKING:
    from sglang_sparse.methods.groups import PrefillGroups

# A token id and a digest of 40 bits share 63.
TOKEN_BITS = 22
DIGEST_BYTES = 5
_TOKEN = (1 << TOKEN_BITS) - 1
# The attribute of a request that has the marked tokens of its last lookup.
ATTRIBUTE = "sglang_sparse_marked"


def with_group_digest(tokens: Sequence[int], method: PrefillGroups, before: array[int] | None = None) -> array[int]:
    """Return a copy of token ids, those of sparse groups with the digest of their group.

    Args:
        tokens: ids from the first token on. An incomplete last group is marked by what it has.
        method: says where groups begin.
        before: what this returned for the same request earlier; whole groups of the same tokens are not hashed again.
    """
    start, size, found = method.dense_below, method.group_tokens, array("q", tokens)
    if len(found) <= start:
        return found
    ids = torch.frombuffer(found, dtype=torch.int64)
    if before is not None and (known := (min(len(found), len(before)) - start) // size * size) > 0:
        earlier = torch.frombuffer(before, dtype=torch.int64)[: start + known]
        if torch.equal(earlier & _TOKEN, ids[: start + known]):
            ids[: start + known] = earlier
            start += known
    view = memoryview(found)
    digests = [
        int.from_bytes(blake2b(view[first : first + size], digest_size=DIGEST_BYTES).digest(), "big") << TOKEN_BITS
        for first in range(start, len(found), size)
    ]
    ids = ids[start:]
    ids |= torch.tensor(digests, dtype=torch.int64).repeat_interleave(size)[: len(ids)]
    return found


def token_ids(tokens: array[int]) -> list[int]:
    """Return the token ids of a key in the tree."""
    return [token & _TOKEN for token in tokens]


def require_whole_groups(method: PrefillGroups | None, ends: Sequence[int]) -> None:
    """Prove that nodes of the tree end where KV is a function of its tokens.

    Args:
        method: the prefill method of their namespace.
        ends: the positions at which they end.

    Raises:
        InexactTreeError: it does not, so that prompts that part within a group share some of it.
    """
    if method is None or method.config.share_partial_groups:
        return
    for end in ends:
        if method.boundary(end) != end:
            raise InexactTreeError(f"a node of the radix tree that ends with token {end - 1} cuts a group")


def mark_lookup(original: Callable[..., object], tree: RadixTree, params: Any) -> object:
    """Around ``UnifiedRadixCache.match_prefix``: look for a key whose groups are marked.

    SGLang may look up every waiting request in each scheduling step, so each request keeps its marked tokens.
    """
    key = tree_key(tree, params.key, getattr(params.req, ATTRIBUTE, None))
    if params.req is not None and key is not params.key:
        setattr(params.req, ATTRIBUTE, key.token_ids)
    return original(tree, replace(params, key=key))


def mark_insert(original: Callable[..., object], tree: RadixTree, params: Any) -> object:
    """Around ``UnifiedRadixCache.insert``: insert such a key, and remember it where the tree is to be checked."""
    key = tree_key(tree, params.key)
    result = original(tree, replace(params, key=key))
    settings = current_settings()
    if hasattr(tree, inserted_keys.ATTRIBUTE) or (settings is not None and settings.check_exactness):
        inserted_keys.remember_inserts(tree).add(key)
    return result


def tree_key(tree: RadixTree, key: RadixKey, before: array[int] | None = None) -> RadixKey:
    """Return a request's key, a ``RadixKey``, as it stands in the tree; for ``before`` see `marked`."""
    settings = current_settings()
    # A tree without a pool only sorts the waiting queue.
    if settings is None or settings.prefill is None or tree.req_to_token_pool is None:
        return key
    from sglang.srt.mem_cache.radix_cache import RadixKey

    method = prefill_of_namespace(settings, key.extra_key)
    if method is None or method.config.share_partial_groups:
        return key
    tokens = with_group_digest(key.raw_token_ids(), method, before)
    return RadixKey(tokens, key.extra_key, is_bigram=key.is_bigram, cache_salt=key.cache_salt)

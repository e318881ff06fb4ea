"""Keys of the radix tree that tell groups apart as wholes, not token by token.

KV of a sparsely prefilled group depends on all its tokens. Two prompts that part within a group have different KV from
the group's first token on, while SGLang's tree would let them share pages up to where they part. So in the tree every
token of a sparse group carries a digest of its group: keys of different groups part at the group's edge, and lookup,
insertion and splitting stay SGLang's own, page by page.

A tree of EAGLE keys each position by a pair, its token and the next one, on which the drafter's KV depends: a key of n
positions has n + 1 tokens. There the first token of a group keeps its own id, since the pair before it belongs to the
group that ends; its pair has the digest in its second token. Prompts that part right behind a group then have all of it
in common but the last pair, hence not its last page, so a lookup is cut at the end of a group once more.
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
from sglang_sparse.config.settings import current_settings
from sglang_sparse.scheduler import inserted_keys, sessions
from sglang_sparse.scheduler.inserted_keys import InexactTreeError

if TYPE_CHECKING:
    from sglang_sparse.methods.groups import PrefillGroups

# A token id and a digest of 40 bits share 63.
TOKEN_BITS = 22
DIGEST_BYTES = 5
_TOKEN = (1 << TOKEN_BITS) - 1
# The attribute of a request that has the marked tokens of its last lookup.
ATTRIBUTE = "sglang_sparse_marked"


def with_group_digest(
    tokens: Sequence[int], method: PrefillGroups, before: array[int] | None = None, pairs: bool = False
) -> array[int]:
    """Return a copy of token ids, those of sparse groups with the digest of their group.

    Args:
        tokens: ids from the first token on. An incomplete last group is marked by what it has.
        method: says where groups begin.
        before: what this returned for the same request earlier; whole groups of the same tokens are not hashed again.
        pairs: whether the tree keys pairs of tokens.
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
    marked = ids[start:]
    marked |= torch.tensor(digests, dtype=torch.int64).repeat_interleave(size)[: len(marked)]
    if pairs:
        ids[method.dense_below :: size] &= _TOKEN
    return found


def token_ids(key: RadixKey) -> list[int]:
    """Return the token ids of a key in the tree, one for each of its positions."""
    return [token & _TOKEN for token in key.token_ids[: len(key)]]


def require_whole_groups(method: PrefillGroups | None, ends: Sequence[int], last: int = 0) -> None:
    """Prove that nodes of the tree end where KV is a function of its tokens.

    Args:
        method: the prefill method of their namespace.
        ends: the positions at which they end.
        last: tokens at the end of a group that a node may lack: a page where the tree keys pairs of tokens.

    Raises:
        InexactTreeError: it does not, so that prompts that part within a group share some of it.
    """
    if method is None or method.config.share_partial_groups:
        return
    for end in ends:
        if method.boundary(end) != end and method.boundary(end + last) != end + last:
            raise InexactTreeError(f"a node of the radix tree that ends with token {end - 1} cuts a group")


def mark_lookup(original: Callable[..., object], tree: RadixTree, params: Any) -> object:
    """Around ``UnifiedRadixCache.match_prefix``: look for a key whose groups are marked.

    SGLang may look up every waiting request in each scheduling step, so each request keeps its marked tokens.
    """
    if sessions.continues_session(tree, params):
        return original(tree, params)
    key = tree_key(tree, params.key, getattr(params.req, ATTRIBUTE, None))
    if key is not params.key:
        if params.req is not None:
            setattr(params.req, ATTRIBUTE, key.token_ids)
        if key.is_bigram:
            key = _whole_groups(tree, key)
    return original(tree, replace(params, key=key))


def _whole_groups(tree: RadixTree, key: RadixKey) -> RadixKey:
    """Return of a key what the tree holds of it, up to the end of a group."""
    settings = current_settings()
    method = prefill_of_namespace(settings, key.extra_key) if settings else None
    found = tree.tree_core.match_full_device_prefix(key)[0]
    return key[: method.boundary(found) if method else found]


def mark_insert(original: Callable[..., object], tree: RadixTree, params: Any) -> object:
    """Around ``UnifiedRadixCache.insert``: insert such a key, and remember it where the tree is to be checked."""
    key = tree_key(tree, params.key)
    result = original(tree, replace(params, key=key))
    settings = current_settings()
    if hasattr(tree, inserted_keys.ATTRIBUTE) or (settings is not None and settings.check_exactness):
        inserted_keys.remember_inserts(tree).add(key)
    return result


def name_tokens(events: list[Any], _: RadixTree) -> list[Any]:
    """After ``UnifiedRadixCache.take_events``: a block of KV that is stored has the ids of its tokens, without digests.

    The hashes of blocks stay as they are: whoever reads them only compares them with each other.
    """
    settings = current_settings()
    if settings is not None and settings.prefill is not None:
        for event in events:
            if tokens := getattr(event, "token_ids", None):
                event.token_ids = [
                    tuple(token & _TOKEN for token in pair) if isinstance(pair, tuple) else pair & _TOKEN
                    for pair in tokens
                ]
    return events


def tree_key(tree: RadixTree, key: RadixKey, before: array[int] | None = None) -> RadixKey:
    """Return a request's key, a ``RadixKey``, as it stands in the tree; for ``before`` see `with_group_digest`."""
    settings = current_settings()
    # A tree without a pool only sorts the waiting queue.
    if settings is None or settings.prefill is None or tree.req_to_token_pool is None:
        return key
    from sglang.srt.mem_cache.radix_cache import RadixKey

    method = prefill_of_namespace(settings, key.extra_key)
    if method is None or method.config.share_partial_groups:
        return key
    pairs, tokens = tree.tree_core.is_eagle, key.raw_token_ids()
    if pairs and not key.is_bigram:
        # SGLang limits positions.
        tokens = key.token_ids[: len(tokens) + 1]
    marked = with_group_digest(tokens, method, before, pairs)
    return RadixKey(marked, key.extra_key, is_bigram=pairs, cache_salt=key.cache_salt)

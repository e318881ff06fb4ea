"""Groups in a tree of EAGLE's, whose keys are pairs of tokens: shared as wholes, and no slot lost or held twice."""

from array import array
from inspect import unwrap
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_sparse.config.settings import build
from sglang_sparse.scheduler import inserted_keys, prefill_chunks, prefix_keys
from sglang_sparse.scheduler.inserted_keys import InexactTreeError
from sglang_sparse.scheduler.prefix_keys import mark_insert, mark_lookup, require_whole_groups, with_group_digest

PAGE, GROUP, DENSE = 4, 32, 64
SETTINGS = build(None, {}, "anchor", {"block_size": 16, "step": 2, "crossover_tokens": DENSE, "dense_tail": 0})
PROMPT = array("q", range(5, 5 + 200))
METHOD: Any = SETTINGS.prefill


@pytest.fixture(params=["rust", "python"])
def tree(request, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(prefix_keys, "current_settings", lambda: SETTINGS)
    table = ReqToTokenPool(4, 400, "cpu", False)
    allocator = PagedTokenToKVPoolAllocator(1000, PAGE, torch.float32, "cpu", None, False)  # pyright: ignore
    components = (ComponentType.FULL,)
    params = CacheInitParams(
        False, table, allocator, PAGE, is_eagle=True, tree_components=components, tree_core_backend=request.param
    )
    found: Any = UnifiedRadixCache(params)
    inserted_keys.remember_inserts(found)
    return found


def insert(tree: Any, tokens: array, positions: int) -> None:
    """Insert pairs of the first positions, in new pages, as a request does. Other tests may have set our hooks."""
    slots = tree.token_to_kv_pool_allocator.alloc(positions)
    key = RadixKey(tokens[: positions + 1], is_bigram=True)
    assert len(key) == positions
    mark_insert(unwrap(UnifiedRadixCache.insert), tree, InsertParams(key=key, value=slots))


def cached(tree: Any, tokens: array, limit: int | None = None) -> int:
    key = RadixKey(tokens, limit=len(tokens) - 1 if limit is None else limit)
    asking: Any = SimpleNamespace(session=None)
    found: Any = mark_lookup(unwrap(UnifiedRadixCache.match_prefix), tree, MatchPrefixParams(key=key, req=asking))
    return found.device_prefix_len


def parting(place: int) -> array:
    other = array("q", PROMPT)
    other[place] = 3
    return other


@pytest.mark.parametrize(
    ("place", "shared"),
    # Below the crossover by pages, less the pair that has the other token; then by groups, whose last pair does.
    [(10, 8), (63, 60), (64, 60), (65, 64), (95, 64), (96, 64), (97, 96), (128, 96), (129, 128), (150, 128)],
)
def test_prompts_share_whole_groups(tree, place: int, shared: int) -> None:
    insert(tree, PROMPT, 192)
    assert cached(tree, PROMPT) == 192
    assert cached(tree, parting(place)) == shared
    # Theirs beside it: each finds all of its own again.
    insert(tree, parting(place), 192)
    assert cached(tree, PROMPT) == cached(tree, parting(place)) == 192
    assert cached(tree, PROMPT, limit=128) == 128 and cached(tree, PROMPT, limit=127) == 96
    for path in tree.sglang_sparse_inserted.paths():
        require_whole_groups(METHOD, path.ends, PAGE)
        tokens = list(PROMPT) if PROMPT[place] in prefix_keys.token_ids(path.key) else list(parting(place))
        assert prefix_keys.token_ids(path.key) == tokens[:192]
    free = tree.token_to_kv_pool_allocator.available_size()
    assert free + len(tree.all_values_flatten()) == 1000, "the second prompt's copy of what is shared is freed"


def test_a_node_lacks_no_more_than_the_last_page() -> None:
    require_whole_groups(METHOD, (10, 64, 92, 128), PAGE)
    for end in (88, 94):
        with pytest.raises(InexactTreeError, match=f"ends with token {end - 1} cuts a group"):
            require_whole_groups(METHOD, (end,), PAGE)
    with pytest.raises(InexactTreeError):
        require_whole_groups(METHOD, (92,))


def test_the_first_token_of_a_group_is_its_own() -> None:
    marked = with_group_digest(PROMPT, METHOD, pairs=True)
    plain = [place for place, pair in enumerate(zip(marked, PROMPT, strict=True)) if pair[0] == pair[1]]
    assert plain == [*range(DENSE + 1), 96, 128, 160, 192]
    again = with_group_digest(PROMPT, METHOD, before=marked, pairs=True)
    assert again == marked


@pytest.mark.parametrize(
    ("prompt", "up_to", "asked"),
    [(200, 200, 193), (200, 128, 129), (192, 192, 161), (160, 230, 129), (50, 50, 51), (50, 48, 49), (50, 60, 61)],
)
def test_a_checkpoint_has_the_token_behind_its_last_group(monkeypatch, prompt: int, up_to: int, asked: int) -> None:
    """And that is one of the prompt: SGLang inserts the prompt's own key, too, which must not be a shorter one."""
    monkeypatch.setattr(prefill_chunks, "current_settings", lambda: SETTINGS)
    monkeypatch.setattr(prefill_chunks, "keys_pairs", lambda: True)
    request: Any = SimpleNamespace(
        origin_input_ids=range(prompt), sampling_params=SimpleNamespace(custom_params=None), custom_logit_processor=None
    )
    stub: Any = SimpleNamespace(tree_core=SimpleNamespace(is_eagle=True))
    found: list[int] = []
    stub.checkpoint = MethodType(lambda _, __, *, up_to: found.append(up_to), stub)
    prefill_chunks.cache_whole_groups(lambda _, one, *, up_to: found.append(up_to), stub, request, up_to=up_to)
    assert found == [asked]


def test_only_eagles_trees_have_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    algorithms = {"EAGLE": True, "eagle3": True, "NEXTN": True, "STANDALONE": False, "NGRAM": False, None: False}
    for algorithm, pairs in algorithms.items():
        args = SimpleNamespace(speculative_algorithm=algorithm)
        monkeypatch.setattr(runtime_context, "get_server_args", lambda args=args: args)
        assert prefill_chunks.keys_pairs() is pairs

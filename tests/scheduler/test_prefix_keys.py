"""Keys of groups: prompts that part within a group have no token of it in common."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_sparse.config.settings import build
from sglang_sparse.scheduler import prefix_keys
from sglang_sparse.scheduler.inserted_keys import InexactTreeError
from sglang_sparse.scheduler.prefix_keys import (
    TOKEN_BITS,
    mark_lookup,
    require_whole_groups,
    token_ids,
    tree_key,
    with_group_digest,
)

FIELDS = {"block_size": 16, "step": 2, "crossover_tokens": 64}
PROMPT = array("q", range(5, 5 + 200))


@pytest.fixture(scope="module")
def method():
    return build(None, {}, "anchor", FIELDS).prefill


def stub_tree(pool: object, pairs: bool = False) -> Any:
    session = SimpleNamespace(will_lend_record=lambda _: False)
    return SimpleNamespace(req_to_token_pool=pool, tree_core=SimpleNamespace(is_eagle=pairs), session=session)


def common(one: array, other: array) -> int:
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


@pytest.mark.parametrize(("place", "shared"), [(10, 10), (63, 63), (64, 64), (80, 64), (95, 64), (96, 96), (150, 128)])
def test_keys_part_at_the_edge_of_the_group_in_which_prompts_do(method, place: int, shared: int) -> None:
    other = array("q", PROMPT)
    other[place] = 3
    assert common(with_group_digest(PROMPT, method), with_group_digest(other, method)) == shared


def test_complete_groups_are_the_same_in_a_longer_prompt(method) -> None:
    longer = PROMPT + array("q", [7] * 50)
    assert common(with_group_digest(PROMPT, method), with_group_digest(longer, method)) == 192
    assert common(with_group_digest(PROMPT[:128], method), with_group_digest(longer, method)) == 128


def test_a_node_that_cuts_a_group_is_no_proof(method) -> None:
    require_whole_groups(method, (10, 64, 96, 128))
    for end in (80, 100):
        with pytest.raises(InexactTreeError, match=f"ends with token {end - 1} cuts a group"):
            require_whole_groups(method, (64, end, 128))
    require_whole_groups(None, (80,))


@pytest.mark.parametrize("whole_tree", [True, False])
def test_marks_leave_all_else_of_a_key_as_it_was(method, whole_tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree without a pool only sorts the waiting queue, by the tokens themselves."""
    monkeypatch.setattr(prefix_keys, "current_settings", lambda: SimpleNamespace(prefill=method))
    for pairs in (False, True):
        key = RadixKey(PROMPT, "tenant", is_bigram=pairs, cache_salt="salt")
        found = tree_key(stub_tree(object() if whole_tree else None, pairs), key)
        assert (found.extra_key, found.is_bigram, found.cache_salt) == ("tenant", pairs, "salt")
        assert found.raw_token_ids() == (with_group_digest(PROMPT, method, pairs=pairs) if whole_tree else PROMPT)


def test_a_request_that_waits_is_hashed_once(method, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where its tokens are others, anew."""
    sizes: list[int] = []
    monkeypatch.setattr(prefix_keys, "current_settings", lambda: SimpleNamespace(prefill=method))
    digest = prefix_keys.blake2b
    monkeypatch.setattr(prefix_keys, "blake2b", lambda view, **more: sizes.append(len(view)) or digest(view, **more))
    tree, request, found = stub_tree(object()), SimpleNamespace(session=None), []

    def look(tokens: array) -> array:
        params = MatchPrefixParams(RadixKey(tokens), req=request)
        mark_lookup(lambda _, asked: found.append(asked.key), tree, params)
        return found[-1].raw_token_ids()

    for tokens, hashed in (
        (PROMPT, [32, 32, 32, 32, 8]),
        (PROMPT, [8]),
        (PROMPT + array("q", [7] * 50), [32, 26]),
        (PROMPT[:100], [4]),
        (array("q", [3]) + PROMPT[1:], [32, 32, 32, 32, 8]),
    ):
        sizes.clear()
        got = look(tokens)
        assert sizes == hashed and got == with_group_digest(tokens, method)


def test_the_tokens_come_back(method) -> None:
    before = array("q", PROMPT)
    largest = array("q", [(1 << TOKEN_BITS) - 1] * 200)
    for tokens in (PROMPT, PROMPT[:40], largest, array("q")):
        for pairs in (False, True):
            key = RadixKey(with_group_digest(tokens, method, pairs=pairs), is_bigram=pairs)
            assert token_ids(key) == list(tokens[: len(key)])
    assert before == PROMPT and min(with_group_digest(largest, method)) > 0

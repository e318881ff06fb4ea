"""The check of the radix tree, on SGLang's tree and allocator with a model that writes known KV."""

import json
from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compact_stubs import CORES, make_tree
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_sparse.attention import memory
from sglang_sparse.config.request_options import namespaced
from sglang_sparse.debug import tree_check
from sglang_sparse.debug.tree_check import check_tree, check_when_idle
from sglang_sparse.methods import aux_buffers
from sglang_sparse.methods.base import AuxSpec
from sglang_sparse.scheduler.inserted_keys import InexactTreeError, InsertedKeys, remember_inserts
from sglang_sparse_kernels.page_summary import update_page_summaries

PAGES, SIZE, HEADS, DIM = 24, 4, 1, 64
VOCABULARY = 1000
ROUNDING = 2.0**-14
# What an adapter adds.
ADAPTED = 0.5
Scheduler = Any


class Model:
    """Writes KV that depends on token and position, rounded otherwise in passes, and counts the tokens of passes."""

    def __init__(self) -> None:
        self.keys = [torch.zeros((PAGES + 1) * SIZE, HEADS, DIM) for _ in range(2)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.tokens = 0
        aux = aux_buffers.AuxBuffers(
            (AuxSpec("summary", (HEADS, 2, DIM), torch.float32, update_page_summaries),), (0, 1), PAGES + 1, SIZE, "cpu"
        )
        self.token_to_kv_pool = SimpleNamespace(
            page_size=SIZE,
            start_layer=0,
            layer_num=2,
            get_key_buffer=self.keys.__getitem__,
            get_value_buffer=self.values.__getitem__,
        )
        setattr(self.token_to_kv_pool, memory.ATTRIBUTE, aux)
        self.server_args = SimpleNamespace(sparse_method=None, disaggregation_mode="null")
        self.attn_backend = SimpleNamespace(prefill=None)
        self.lora_manager: Any = None
        self.model_config = SimpleNamespace(is_multimodal=False, model_is_mrope=False, vocab_size=VOCABULARY)
        self.req_to_token_pool = ReqToTokenPool(2, 512, "cpu", False)
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=self.req_to_token_pool.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=self.token_to_kv_pool,
            page_size=SIZE,
            device="cpu",
        )

    def forward(self, batch: Any) -> None:
        self.tokens += len(batch.input_ids)
        # SGLang's backends read the slots of a pass here.
        assert self.kv_index_translator.write_ids(batch).tolist() == batch.out_cache_loc.tolist()
        known = self.req_to_token_pool.req_to_token[0, : int(batch.seq_lens[0])]
        assert known[int(batch.positions[0]) :].tolist() == batch.out_cache_loc.tolist()
        adapted = ADAPTED if self.lora_manager and self.lora_manager.prepared == ["id"] else 0.0
        self.write(batch.input_ids, batch.positions, batch.out_cache_loc, ROUNDING + adapted)

    def write(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rounding: float = 0.0) -> None:
        for layer in (0, 1):
            content = (tokens + positions * 0.01 + layer + rounding)[:, None, None].expand(-1, HEADS, DIM)
            self.keys[layer][slots] = content.float()
            self.values[layer][slots] = -content.float()
            last = aux_buffers.page_ends(slots, SIZE)
            getattr(self.token_to_kv_pool, memory.ATTRIBUTE).refresh({layer: self.keys[layer]}, last)


@pytest.fixture(params=CORES)
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    model = Model()
    allocator = PagedTokenToKVPoolAllocator(PAGES * SIZE, SIZE, torch.float32, "cpu", None, False)  # pyright: ignore
    tree = make_tree(request.param, allocator, model.req_to_token_pool, SIZE)
    # From now on the hook on its insertions does so, as where a server is asked to check.
    remember_inserts(tree)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    return SimpleNamespace(
        tree_cache=tree,
        token_to_kv_pool_allocator=allocator,
        tp_worker=SimpleNamespace(model_runner=model),
        device_module=SimpleNamespace(current_stream=lambda: stream),
        forward_stream=stream,
        forward_stream_ctx=nullcontext(),
    )


def insert(scheduler: Scheduler, tokens: list[int]) -> None:
    """Take the prefix that the tree has, write the rest and insert all, as a request does."""
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    key, shared = RadixKey(array("q", tokens)), slots_of(scheduler, tokens)
    fresh = allocator.alloc(len(tokens) - len(shared))
    positions = torch.arange(len(shared), len(tokens))
    scheduler.tp_worker.model_runner.write(torch.tensor(tokens)[positions], positions, fresh)
    tree.insert(InsertParams(key=key, value=torch.cat([shared, fresh])))


def slots_of(scheduler: Scheduler, tokens: list[int]) -> torch.Tensor:
    tree = scheduler.tree_cache
    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    return tree.path_device_indices(found.last_device_node)[: found.device_prefix_len]


def everything(scheduler: Scheduler) -> list[torch.Tensor]:
    """Copies of all that a pass writes to."""
    model = scheduler.tp_worker.model_runner
    aux = getattr(model.token_to_kv_pool, memory.ATTRIBUTE)
    written = [*model.keys, *model.values, *(aux.buffer("summary", layer) for layer in (0, 1))]
    return [buffer.clone() for buffer in (*written, model.req_to_token_pool.req_to_token)]


def assert_unchanged(scheduler: Scheduler, before: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, everything(scheduler), before))


def test_an_empty_tree_is_exact(scheduler) -> None:
    assert check_tree(scheduler) == tree_check.TreeReport(0, 0.0)


class Adapters:
    """Of SGLang's manager what a check asks for; ``prepared`` are those of the pass."""

    def __init__(self, *loaded: str) -> None:
        self.loras, self.prepared, self.fetched = dict.fromkeys(loaded), None, set[str | None]()

    def fetch_new_loras(self, ids: set[str | None]) -> None:
        self.fetched = ids

    def prepare_lora_batch(self, batch: Any) -> None:
        assert self.fetched == {*batch.lora_ids}
        self.prepared = batch.lora_ids


def test_kv_is_recomputed_with_its_adapter(scheduler) -> None:
    """KV written with an adapter that is no longer loaded cannot be recomputed, and no request finds it."""
    model, tokens = scheduler.tp_worker.model_runner, torch.arange(8)
    insert(scheduler, tokens.tolist())
    slots = scheduler.token_to_kv_pool_allocator.alloc(8)
    model.write(tokens, tokens, slots, ADAPTED)
    key = RadixKey(array("q", tokens.tolist()), f"{namespaced(None, None, adapted=True)}id")
    scheduler.tree_cache.insert(InsertParams(key=key, value=slots))
    model.lora_manager = Adapters()
    assert check_tree(scheduler).pages_checked == 2
    model.lora_manager = Adapters("id")
    assert check_tree(scheduler).pages_checked == 2 and model.lora_manager.prepared == ["id"]
    model.write(tokens, tokens, slots)
    with pytest.raises(InexactTreeError):
        check_tree(scheduler)


def test_pages_of_images_and_behind_them_are_counted_and_the_text_before_is_proven(scheduler) -> None:
    """An image's tokens have the id of its hash, which may look like a word's in its last bits."""
    model, image = scheduler.tp_worker.model_runner, (1 << 30) + 5
    model.model_config.is_multimodal = True
    for behind in ([*range(8)], [9] * 12):
        insert(scheduler, [*range(10), image, image, *behind])
    report = check_tree(scheduler)
    assert (report.pages_checked, report.pages_behind_images, model.tokens) == (2, 6, 8)
    again = check_tree(scheduler)
    assert (again.pages_checked, again.pages_behind_images, model.tokens) == (0, 6, 8)


@pytest.mark.parametrize("forward_tokens", [6, 8, 2048])
def test_each_page_is_proven_once_and_nothing_changes(scheduler, monkeypatch, forward_tokens) -> None:
    monkeypatch.setattr(tree_check, "FORWARD_TOKENS", forward_tokens)
    insert(scheduler, [*range(20)])
    before = everything(scheduler)
    assert check_tree(scheduler) == tree_check.TreeReport(5, pytest.approx(ROUNDING, rel=0.1))
    assert scheduler.tp_worker.model_runner.tokens == 20
    assert check_tree(scheduler).pages_checked == 0
    assert scheduler.tp_worker.model_runner.tokens == 20
    assert_unchanged(scheduler, before)


def test_a_full_pool_is_proven(scheduler) -> None:
    for first in range(0, PAGES * SIZE, 32):
        insert(scheduler, [*range(first, first + 32)])
    assert scheduler.token_to_kv_pool_allocator.available_size() == 0
    assert check_tree(scheduler).pages_checked == PAGES


def test_a_pass_that_writes_nothing_proves_nothing(scheduler, monkeypatch) -> None:
    insert(scheduler, [*range(8)])
    monkeypatch.setattr(scheduler.tp_worker.model_runner, "forward", lambda batch: None)
    with pytest.raises(InexactTreeError, match="K of layer 0"):
        check_tree(scheduler)


def test_after_a_failed_comparison_everything_is_as_before(scheduler) -> None:
    insert(scheduler, [*range(16)])
    scheduler.tp_worker.model_runner.values[0][slots_of(scheduler, [*range(16)])[3]] += 0.5
    before = everything(scheduler)
    with pytest.raises(InexactTreeError):
        check_tree(scheduler)
    assert_unchanged(scheduler, before)


def test_after_a_failed_pass_everything_is_as_before(scheduler, monkeypatch) -> None:
    monkeypatch.setattr(tree_check, "FORWARD_TOKENS", 8)
    insert(scheduler, [*range(16)])
    model = scheduler.tp_worker.model_runner
    original = model.forward

    def forward(batch: Any) -> None:
        original(batch)
        if model.tokens == 16:
            raise MemoryError

    monkeypatch.setattr(model, "forward", forward)
    before = everything(scheduler)
    with pytest.raises(MemoryError):
        check_tree(scheduler)
    assert_unchanged(scheduler, before)


def test_a_split_proves_only_the_new_branch(scheduler) -> None:
    insert(scheduler, [*range(20)])
    check_tree(scheduler)
    insert(scheduler, [*range(12), 90, 91, 92, 93])
    assert check_tree(scheduler).pages_checked == 1
    assert scheduler.tp_worker.model_runner.tokens == 20 + 16


def test_an_evicted_and_reused_page_is_proven_again(scheduler) -> None:
    insert(scheduler, [*range(8)])
    check_tree(scheduler)
    scheduler.tree_cache.evict(EvictParams(num_tokens=8))
    insert(scheduler, [*range(40, 48)])
    assert check_tree(scheduler).pages_checked == 2


@pytest.mark.parametrize("proven", [False, True])
def test_wrong_kv_is_found_also_where_it_was_right_before(scheduler, proven) -> None:
    insert(scheduler, [*range(20)])
    if proven:
        check_tree(scheduler)
    scheduler.tp_worker.model_runner.values[1][slots_of(scheduler, [*range(20)])[13]] += 0.5
    with pytest.raises(
        InexactTreeError, match=r"V of layer 1 differs by 0\.5 .* 1 of the tokens 13 to 13 .* of 20 tokens"
    ):
        check_tree(scheduler)


def test_a_wrong_summary_is_found(scheduler) -> None:
    insert(scheduler, [*range(8)])
    check_tree(scheduler)
    page = int(slots_of(scheduler, [*range(8)])[4]) // SIZE
    aux = getattr(scheduler.tp_worker.model_runner.token_to_kv_pool, memory.ATTRIBUTE)
    aux.buffer("summary", 1)[page, 0, 0, 3] += 1
    with pytest.raises(InexactTreeError, match=f"summaries of 1 pages of the radix tree, page {page}"):
        check_tree(scheduler)
    # On the decode server of a pair, who reads the page summarises it first.
    scheduler.tp_worker.model_runner.server_args.disaggregation_mode = "decode"
    assert check_tree(scheduler).pages_checked == 1


@pytest.mark.parametrize(
    ("tokens", "fresh"),
    [([*range(40, 48)], 8), ([*range(12), 90, 91, 92, 93], 4), ([*range(24)], 4)],
    ids=["beside the others", "a branch of another", "behind another"],
)
def test_a_key_that_came_behind_our_back_is_noticed(scheduler, monkeypatch, tokens, fresh) -> None:
    """Nothing is known of its pages, as no core's nodes are walked; so the tree is not proven without them."""
    insert(scheduler, [*range(20)])
    assert check_tree(scheduler).pages_checked == 5
    with monkeypatch.context() as patch:
        patch.setattr(InsertedKeys, "add", lambda *_: None)
        insert(scheduler, tokens)
    said = f"holds {20 + fresh} slots, {fresh} of them of sequences that nobody has inserted"
    for _ in range(2):
        with pytest.raises(InexactTreeError, match=said):
            check_tree(scheduler)
    # A server that checks when it is idle says so, too.
    with pytest.raises(InexactTreeError, match=said):
        idle(scheduler, check=True)
    remember_inserts(scheduler.tree_cache).add(RadixKey(array("q", tokens)))
    assert check_tree(scheduler).pages_checked == fresh // SIZE


def idle(scheduler: Scheduler, check: bool) -> None:
    fields = {"active_ratio": 0.1, "page_size": 4, "check_exactness": check}
    scheduler.server_args = SimpleNamespace(sparse_method="resa", sparse_config=json.dumps(fields))
    scheduler.is_fully_idle = lambda: True
    scheduler.forward_ct = 1
    check_when_idle(None, scheduler)


def test_an_idle_server_checks_once_and_only_if_asked(scheduler, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    insert(scheduler, [*range(8)])
    idle(scheduler, check=False)
    assert scheduler.tp_worker.model_runner.tokens == 0
    idle(scheduler, check=True)
    assert scheduler.tp_worker.model_runner.tokens == 8
    assert "2 pages of the radix tree equal their recomputation" in caplog.text
    monkeypatch.setattr(tree_check, "check_tree", lambda scheduler: pytest.fail("nothing has changed"))
    idle(scheduler, check=True)

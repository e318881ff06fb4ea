"""KV that comes back from host memory, files or a store: its summaries are computed again, and no token changes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from approximate import METHODS, ask, assert_same, model_of
from server_requests import assert_nothing_leaked, plugin, random_prompts, sparse_state

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")]
MODELS = Path("eval/models")
# Two of the prompts fill the KV pool; all of them fit into host memory.
FLAGS = ("--max-total-tokens", "2048", "--context-length", "2048", "--chunked-prefill-size", "512")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "6", "--dtype", "float32")
# Summaries, or what else a page has beside its KV.
WITHOUT_ENTRIES = ("skip_softmax",)
PROMPTS = random_prompts(11, (900, 700, 801, 650, 930), 1000)


@pytest.mark.parametrize("name", METHODS)
def test_prompts_come_back_from_host_memory(serve, name: str) -> None:
    method, config, prefill = METHODS[name]
    model, page = model_of(name)
    flags = (*FLAGS, "--page-size", page)
    with serve(model, *flags, method=method, config=config, prefill=prefill) as server:
        cold = [ask(server, prompt) for prompt in PROMPTS]
        before = sparse_state(server)
        assert before["arrived_pages_summarised"] == 0
        from_host = 0
        for prompt, expected in zip(PROMPTS, cold, strict=True):
            answer = ask(server, prompt)
            assert_same(answer, expected)
            assert answer["meta_info"]["cached_tokens"] >= len(prompt) - 2 * 64
            from_host += answer["meta_info"]["cached_tokens_details"]["host"]
        after = sparse_state(server)
        assert from_host > sum(map(len, PROMPTS)) / 2
        assert after["arrived_pages_summarised"] == (0 if method in WITHOUT_ENTRIES else from_host // int(page))
        assert_nothing_leaked(server)


@pytest.mark.parametrize("method", ["resa", "rocketkv"])
def test_a_fresh_server_reads_what_another_one_has_stored(serve, tmp_path: Path, method: str) -> None:
    _, config, _ = METHODS[method]
    flags = (*FLAGS, "--page-size", "16", "--hicache-storage-backend", "file")
    flags += ("--hicache-storage-prefetch-policy", "wait_complete")
    options: dict[str, Any] = {"method": method, "config": {**config, "check_exactness": False}}
    options["env"] = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    with serve(MODELS / "tiny-gqa", *flags, **options) as server:
        cold = [ask(server, prompt) for prompt in PROMPTS]
        deadline = time.monotonic() + 60
        # A page of the last prompt among them: they are written in order.
        while len(list(tmp_path.iterdir())) < sum(len(prompt) - 64 for prompt in PROMPTS) // 16:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    with serve(MODELS / "tiny-gqa", *flags, **options) as server:
        for prompt, expected in zip(PROMPTS, cold, strict=True):
            before = sparse_state(server)["arrived_pages_summarised"]
            answer = ask(server, prompt)
            assert_same(answer, expected)
            known = answer["meta_info"]["cached_tokens_details"]
            assert known["storage"] >= len(prompt) - 64
            arrived = sparse_state(server)["arrived_pages_summarised"] - before
            assert arrived * 16 == answer["meta_info"]["cached_tokens"]
        assert_nothing_leaked(server)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name][2] is None])
def test_a_fresh_server_reads_what_is_linked(serve, tmp_path: Path, name: str) -> None:
    """Answers too, as far as they are exact, so that a second turn goes on behind them."""
    method, config, _ = METHODS[name]
    model, page = model_of(name)
    found = {"linker": "FolderLinker", "linker_module_path": "folder_linker"}
    linked = json.dumps({**found, "linker_extra_config": {"folder": str(tmp_path)}})
    flags = ("--max-total-tokens", "2048", "--context-length", "2048", "--chunked-prefill-size", "512")
    flags += ("--page-size", page, "--dtype", "float32", "--enable-unified-cache-external-linker")
    flags += ("--unified-cache-external-linker-backend", "dynamic", "--unified-cache-external-linker-config", linked)
    options: dict[str, Any] = {"method": method, "config": {**config, "check_exactness": False}}
    with serve(model, *flags, **options) as server:
        cold = [ask(server, prompt) for prompt in PROMPTS]
        assert sparse_state(server)["arrived_pages_summarised"] == 0
    with serve(model, *flags, **options) as server:
        hits = 0
        for prompt, expected in zip(PROMPTS, cold, strict=True):
            answer = ask(server, prompt)
            assert_same(answer, expected)
            hits += answer["meta_info"]["cached_tokens"]
        # A page is the largest, and RocketKV computes the last 32 tokens of a prompt anew.
        assert hits >= sum(len(prompt) - 64 for prompt in PROMPTS)
        arrived = 0 if method in WITHOUT_ENTRIES else hits // int(page)
        assert sparse_state(server)["arrived_pages_summarised"] == arrived
        turn = [*PROMPTS[0], *cold[0]["output_ids"], 11, 12]
        second = ask(server, turn)
        server.flush_cache()
        for path in tmp_path.iterdir():
            path.unlink()
        assert_same(second, ask(server, turn))
        assert_nothing_leaked(server)


def test_a_tree_that_another_plugin_has_built_holds_exact_kv_only(serve, tmp_path: Path) -> None:
    """A second turn goes on behind an answer, of which the tree has what is exact."""
    method, config, _ = METHODS["resa"]
    model, page = model_of("resa")
    flags = ("--max-total-tokens", "2048", "--context-length", "2048", "--page-size", page, "--dtype", "float32")
    backend = plugin(
        tmp_path,
        "trees",
        "from sglang.srt.mem_cache import registry",
        "from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache",
        "class Tree(UnifiedRadixCache): pass",
        "build = registry.create_unified_radix_cache",
        "registry.register_radix_cache_backend('own', build)",
        "registry.register_radix_cache_backend('other', lambda ctx: build(ctx, cache_class=Tree))",
    )
    options: dict[str, Any] = {"method": method, "config": {**config, "check_exactness": False}}
    found = []
    for more in ((), ("--radix-cache-backend", "own")):
        with serve(model, *flags, *more, **options, env=backend) as server:
            first = ask(server, PROMPTS[0])
            second = ask(server, [*PROMPTS[0], *first["output_ids"], 11, 12])
            assert ("registered('own')" in server.log()) == bool(more)
            assert_nothing_leaked(server)
            found.append((first, second))
    for answer, expected in zip(*found, strict=True):
        assert_same(answer, expected)
        assert answer["meta_info"]["cached_tokens"] == expected["meta_info"]["cached_tokens"]
    assert found[1][1]["meta_info"]["cached_tokens"] > len(PROMPTS[0])
    with (
        pytest.raises(RuntimeError, match="got a Tree as prefix cache"),
        serve(model, *flags, "--radix-cache-backend", "other", **options, env=backend),
    ):
        pass

"""A third party's method that chooses tokens, not pages, as docs/develop/method.md has it: for GQA and for MLA."""

import json
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from server_requests import ask, assert_nothing_leaked, forced, greedy, logprobs, sparse_state, spent

from launch.server import ServerProcess

pytestmark = pytest.mark.long

MODELS = Path("eval/models")
PAGE, LAYERS = 16, 4
SINKS, WINDOW, STRIDE = 1, 4, 8
FLAGS = ("--chunked-prefill-size", "256")
METHODS = [("strided", "tiny-gqa", 2), ("strided_latent", "tiny-mla", 1)]
CONFIG = {"sink_pages": SINKS, "window_pages": WINDOW, "stride": STRIDE, "dense_fallback": "never"}
TOKENS = 24
# Beyond any position, so that no token is chosen but those of whole pages.
WHOLE_PAGES = {"stride": 65536}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Some that end within a page and at its end, one that fits the window, and one with a prefix of another one."""
    rng = random.Random(4)
    long = [rng.randrange(300, 1000) for _ in range(900)]
    return [long, long[:640], long[:33], [*long[:500], *range(300, 401)]]


def each(server: ServerProcess, texts: list[list[int]], options: Mapping[str, Any] | None) -> list[list[int]]:
    return [ask(server, text, TOKENS, dict(options or {}))["output_ids"] for text in texts]


def start(serve, method: str, model: str, contributed: Path, *flags: str) -> AbstractContextManager[ServerProcess]:
    own = (*FLAGS, *flags, "--sparse-method", method, "--sparse-config", json.dumps(CONFIG))
    return serve(MODELS / model, *own, env={"PYTHONPATH": str(contributed)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="equal answers need float32")
@pytest.mark.parametrize(("method", "model", "heads"), METHODS)
def test_tokens_are_attended_to(method: str, model: str, heads: int, serve, contributed: Path, texts) -> None:
    with start(serve, method, model, contributed, "--dtype", "float32") as server:
        alone = each(server, texts, None)
        # All tokens of a row, and not those behind its newest one, are what dense attention has.
        assert each(server, texts, {"stride": 1}) == each(server, texts, {"sparse": False}) != alone
        server.flush_cache()
        assert greedy(server, texts, TOKENS, at_once=len(texts)) == alone
        window, sparse = each(server, texts[:1], WHOLE_PAGES)[0], sparse_state(server)
        answer = ask(server, texts[0], TOKENS)
        used = spent(server, sparse)
        assert answer["output_ids"] == alone[0] != window
        # SGLang may launch a step more than it needs.
        assert used["sparse_layer_rows"] == LAYERS * used["decode_rows"] >= LAYERS * (TOKENS - 1)
        lists, pages = heads * used["sparse_layer_rows"], -(-len(texts[0]) // PAGE)
        assert used["dense_fallback_rows"] == 0 and pages * lists <= used["pages_held"] <= (pages + 2) * lists
        # The newest page is not full, and each step counts whole pages.
        whole, between = SINKS + WINDOW, (pages - SINKS - WINDOW) / STRIDE
        assert whole - 1 + between - 1 < used["pages_attended"] / lists < whole + between + 1
        assert_nothing_leaked(server)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("method", "model", "heads"), METHODS)
def test_tokens_on_a_gpu(method: str, model: str, heads: int, serve, contributed: Path, texts) -> None:
    """In CUDA graphs: all tokens of a row are dense attention's, and a part of them is far from it."""
    flags = ("--attention-backend", "triton", "--dtype", "bfloat16", "--mem-fraction-static", "0.3")
    with start(serve, method, model, contributed, *flags) as server:
        tokens = ask(server, texts[0], TOKENS, {"sparse": False})["output_ids"]
        dense, every, few = (
            logprobs(forced(server, texts[0], tokens, **options))
            for options in ({"sparse": False}, {"stride": 1}, WHOLE_PAGES)
        )
        apart = [max(abs(a - b) for a, b in zip(dense, one, strict=True)) for one in (every, few)]
        assert apart[0] < 0.1 and apart[1] > 2 * apart[0], apart
        before = sparse_state(server)
        greedy(server, texts, TOKENS, at_once=len(texts))
        used = spent(server, before)
        assert 0 < used["pages_attended"] < 0.5 * used["pages_held"]
        assert_nothing_leaked(server)

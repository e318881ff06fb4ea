"""tiny-dsa as the server tests start and ask it."""

from pathlib import Path
from typing import Any

from server_requests import RETRACT, sparse_state

from eval.texts.text import read_book
from eval.texts.windows import BOOK
from launch.server import ServerProcess

MODEL = Path("eval/models/tiny-dsa")
FLAGS = ("--page-size", "64", "--chunked-prefill-size", "512", "--dtype", "float32")
TOPK, LAYERS, PAGE = 512, 4, 64
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# Requests are retracted again and again; SGLang's backend gets slots, as on a GPU.
RETRACTING = {
    **RETRACT,
    "SGLANG_DSA_FUSE_TOPK": "1",
    "SGLANG_OPT_USE_TOPK_V2": "0",
}


def long_texts() -> list[str]:
    """Three stretches of a book, each of more tokens than are chosen."""
    book = read_book(BOOK)
    return [book[first : first + 2500] for first in (0, 20000, 40000)]


def moved(server: ServerProcess, before: dict[str, Any], *names: str) -> list[int]:
    """By how much counters of a server have grown since a ``sparse_state``."""
    after = sparse_state(server)
    return [after[name] - before[name] for name in names]


def assert_only_long_rows_are_sparse(server: ServerProcess) -> None:
    """Rows of more tokens than are chosen are counted as sparse, in all layers, and others as dense."""
    before = sparse_state(server)
    server.generate(input_ids=list(range(10, 140)), sampling_params={**GREEDY, "max_new_tokens": 6})
    rows, *others = moved(server, before, "decode_rows", "dense_fallback_rows", "sparse_layer_rows")
    assert rows >= 5 and others == [rows, 0]
    before = sparse_state(server)
    server.generate(input_ids=[11 + i * i % 3900 for i in range(600)], sampling_params={**GREEDY, "max_new_tokens": 6})
    names = ("decode_rows", "dense_fallback_rows", "sparse_layer_rows", "pages_attended", "pages_held")
    rows, dense, *counted, held = moved(server, before, *names)
    assert rows >= 5 and dense == 0 and counted == [rows * LAYERS, rows * LAYERS * TOPK]
    assert 600 < held / (rows * LAYERS) < 610

"""Several servers behind a router, and several nodes of one server: all must run the same methods."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_server import ForkedServer
from server_fixtures import STRICT_MEMORY
from server_requests import assert_nothing_leaked, greedy, random_prompts, sparse_state

from launch.server import ServerProcess, free_port
from sglang_sparse.check import main

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU platform")]
MODEL = Path("eval/models/tiny-gqa")
FLAGS = ("--max-total-tokens", "8192", "--context-length", "2048", "--dtype", "float32")
RESA: dict[str, Any] = {"active_ratio": 0.2, "min_pages": 2, "dense_fallback": "never"}


def test_workers_are_compared(serve, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(MODEL, *FLAGS, config=RESA) as one:
        with serve(MODEL, *FLAGS, config=RESA) as other:
            assert main(["--workers", one.url, other.url]) == 0
            assert capsys.readouterr().out.startswith("2 workers agree (digest ")
        with serve(MODEL, *FLAGS, config=RESA | {"active_ratio": 0.3}, prefill={"theta": 4.0}) as other:
            assert main(["--workers", one.url, other.url]) == 1
            _, ratio, prefill, digest = capsys.readouterr().out.splitlines()
            assert ratio == f"  --sparse-config active_ratio: 0.2 ({one.url}); 0.3 ({other.url})"
            assert prefill == f'  --sparse-prefill-method: null ({one.url}); "anchor" ({other.url})'
            assert digest.startswith("  digest: ")
        with serve(MODEL, *FLAGS) as dense:
            assert main(["--workers", one.url, dense.url]) == 2
            assert f"--workers {dense.url}: got a server that publishes no digest" in capsys.readouterr().err


@contextmanager
def nodes(folder: Path, *configs: Mapping[str, Any] | None) -> Iterator[list[ServerProcess]]:
    """One server, with a rank on each node, and a config for each; None for a node without sparse flags.

    All are waited for at once. What ends the start of a node is in its log.
    """
    flags = (*FLAGS, "--page-size", "16", "--tp-size", str(len(configs)), "--nnodes", str(len(configs)))
    flags += ("--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank")
    sparse = [[] if one is None else ["--sparse-method", "resa", "--sparse-config", json.dumps(one)] for one in configs]
    found: list[ServerProcess] = [
        ForkedServer(MODEL, *flags, str(node), *own, log_path=folder / f"{node}.log", env=STRICT_MEMORY)
        for node, own in enumerate(sparse)
    ]
    with ThreadPoolExecutor() as pool:
        try:
            started = [pool.submit(node.start) for node in found]
            yield [one.result() for one in started]
        finally:
            for node in found:
                node.stop()


def test_nodes_of_one_server_answer_as_one_does(serve, tmp_path: Path) -> None:
    prompts = random_prompts(23, (900, 40, 333), 1000)
    with serve(MODEL, *FLAGS, config=RESA) as server:
        expected = greedy(server, prompts)
    with nodes(tmp_path, RESA, RESA) as (first, _):
        assert greedy(first, prompts) == expected
        assert sparse_state(first)["sparse_layer_rows"] > 0
        assert_nothing_leaked(first)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (RESA | {"active_ratio": 0.3}, "--sparse-config active_ratio 0.2 (rank 0 of node 0); 0.3 (rank 1 of node 1)"),
        (None, '--sparse-method "resa" (rank 0 of node 0); null (rank 1 of node 1)'),
    ],
    ids=["another config", "no sparse flags"],
)
def test_nodes_that_differ_do_not_start(tmp_path: Path, other: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(RuntimeError, match="server exited"), nodes(tmp_path, RESA, other):
        pass
    for node in range(2):
        assert f"ranks of one server differ: got {said}" in (tmp_path / f"{node}.log").read_text()

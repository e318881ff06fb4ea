"""Several servers behind a router, and several nodes of one server: all must run the same methods."""

from pathlib import Path
from typing import Any

import pytest
import torch

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

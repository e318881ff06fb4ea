"""Files as ``eval.lab.bench_decode --dense-only`` writes them."""

import json
from pathlib import Path
from typing import Any

FACTS = {"model_path": "here/qwen3-8b", "kv_cache_dtype": "auto", "dtype": "auto"}
HEADER = {"kind": "header", "command": "eval.lab.bench_decode", "dense_only": True, "batch": 1, "context": 64}
ROW = {"kind": "summary", "arm": "dense", "rounds": 3, "tpot": 0.03, "tpot_range": [0.02, 0.04]}


def peer_file(path: Path, *rows: dict[str, Any], **header: Any) -> Path:
    """Write a file with these rows, and fields of the header that are other ones."""
    server = {**FACTS, "decode_backend": "flashinfer"}
    path.write_text("".join(json.dumps(row) + "\n" for row in ({**HEADER, "server": server, **header}, *rows)))
    return path

r"""``python -m eval.lab.bench_serving``: `eval.bench_serving` with dummy weights and inputs of a known structure.

``--shape`` serves a public model's shape without its weights.

Dummy weights have no structure to find: ``--structured '{}'`` has every layer of every server attend with generated
queries, keys and values (`eval.lab.structured`), and the row says which share of the query-key pairs was left out
(``sparsity``, of the server's counters). What a prefill keeps of the attention mass stands beside it, from a file of
``eval.lab.bench_prefill`` with the same inputs, length and threshold::

    python -m eval.lab.bench_prefill --lengths 32k,64k,128k --sparsity 0.89 --dense-below 8k --out prefill.jsonl
    python -m eval.lab.bench_serving --shape qwen3-8b --both --contexts 4k,8k,32k,64k,128k \
        --chunked-prefill-size 8k,16k --sparse-method none --sparse-prefill-method anchor --structured '{}' \
        --server-args "--page-size 16" --sparsity 0.89 --recall-from prefill.jsonl --out serving.jsonl

``--sparsity`` asks for the threshold that the file has for this share at each length, and a context at which the server
left out more or less by two points is no result. Without it the threshold is the server's.

RoBSA's decode is measured over the inputs of a file of ``eval.lab.bench_mla --positions``, of which ``--structured``
takes recipe and seed, and the recall::

    python -m eval.lab.bench_mla --shapes 1x32k,1x64k,1x96k,1x128k --positions 131460 --heads 16 --peers "" \
        --recipe '{"sink_tokens": 1792}' --out mla.jsonl
    python -m eval.lab.bench_serving --shape v2-lite --sparse-method robsa --structured mla.jsonl --out serving.jsonl

``active_blocks`` and ``sparsity`` are then the mean over the layers that ran sparse, of the server's counters; a cell
whose active blocks are off those that the file's inputs are made for by two points or a tenth of them is no result.

Prefill of many long prompts takes minutes that decode's figures do not need: with ``--skip-prefill`` it writes the
generated KV and little else (`eval.lab.structured.prefill`), and the summary has no figure that prefill is part of.
"""

from __future__ import annotations

import sys

from eval import bench_serving
from eval.lab.servers.generated_inputs import GeneratedInputs


def main(arguments: list[str] | None = None) -> int:
    """Run the command, see `eval.bench_serving`."""
    return bench_serving.main(arguments, GeneratedInputs, __doc__)


if __name__ == "__main__":
    sys.exit(main())

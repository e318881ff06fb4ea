"""What a seam is, and those of the one method that has its own: a part of the table in ``seams.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Seam:
    """One hooked function of SGLang.

    Attributes:
        target: dotted path in SGLang.
        kind: SGLang's hook type.
        function: ``module:function`` of this package, imported at its first call: a server without a sparse flag
            loads no more than this table and the flags.
        process: where it acts.
        purpose: what it is for.
        method: the only method that it is for; None for several. Where there is a GPU it is hooked in the servers of
            that method alone.
        gpu: whether it acts where there is a GPU, or where there is none; None in both.
    """

    target: str
    kind: Literal["AFTER", "AROUND"]
    function: str
    process: Literal["main", "scheduler", "both"]
    purpose: str
    method: str | None = None
    gpu: bool | None = None


DSA_SEAMS = (
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native",
        "AROUND",
        "indexer:choose",
        "scheduler",
        "DSA without a GPU: choose the tokens to attend to",
        "dsa",
        gpu=False,
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        "AROUND",
        "hooks:hook_method",
        "scheduler",
        "DSA: judge weights that were not at hand before; on a GPU hook the next ones first, in its servers only",
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda",
        "AROUND",
        "indexer:choose",
        "scheduler",
        "DSA on a GPU: choose the tokens to attend to",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_indexer_metadata.DSAIndexerMetadata.topk_transform",
        "AROUND",
        "native_indexer:choose",
        "scheduler",
        "DSA on a GPU: the same tokens every time of SGLang's own logits",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.utils.resolve_paged_mqa_logits_metadata_fn",
        "AFTER",
        "native_indexer:schedule",
        "scheduler",
        "DSA on a GPU: no schedule of SGLang's logits, which GPUs that it does not serve refuse, where others are made",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._build_topk_v2_plan",
        "AROUND",
        "native_indexer:plan",
        "scheduler",
        "DSA on a GPU: no plan of SGLang's selection where another one runs",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_tilelang",
        "AROUND",
        "dsa_latents:attend",
        "scheduler",
        "DSA: attend to them",
        "dsa",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._write_mla_kv_buffer",
        "AROUND",
        "dsa_latents:write",
        "scheduler",
        "DSA: write float8 latents, which SGLang does on GPUs that have float8",
        "dsa",
    ),
    Seam(
        "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution",
        "AROUND",
        "dsa_flags:keep_slot",
        "main",
        "DSA on a GPU: float8 latents go with the backend in whose place the portable attention stands",
        gpu=True,
    ),
)

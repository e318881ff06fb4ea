"""TensorRT-LLM's options, 1.2 to 1.3, and what each of them is on an SGLang server with this plugin.

Source: ``TorchLlmArgs`` and the configs of sparse attention in its ``llmapi/llm_args.py``, and its guide to sparse
attention. What is served is not said here: see ``convert.py``, which asks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_sparse.methods.skip_softmax_checkpoint import CALIBRATE

# Options whose fields count one by one.
NESTED = ("kv_cache_config", "cuda_graph_config")
ALGORITHM = "algorithm"


@dataclass(frozen=True)
class Change:
    """What a field would become.

    Attributes:
        flags: words of a command line.
        fields: of the method's config.
        words: what to say of it, beside those.
        lost: it has no counterpart; `words` says why.
    """

    flags: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""
    lost: bool = False

    def __str__(self) -> str:
        config = f"config {json.dumps(self.fields)}" if self.fields else ""
        said = ", ".join(part for part in (shlex.join(self.flags), config, self.words) if part)
        return f"not converted: {said}" if self.lost else said


Rule = Callable[[Any], Change]


def lost(words: str) -> Change:
    """It has no counterpart, and why."""
    return Change(words=words, lost=True)


def _as(flag: str) -> Rule:
    return lambda value: Change((flag, str(value)))


def _all_as(flag: str) -> Rule:
    return lambda value: Change((flag, *map(str, value if isinstance(value, list) else [value])))


def _when(asked: object, *flags: str, otherwise: str) -> Rule:
    return lambda value: Change(flags if value is asked else (), words="" if value is asked else otherwise)


def unless(usual: object, rule: Rule, words: str = "nothing to set, it is so here") -> Rule:
    """A rule for all values but one, for which nothing has to be set."""
    return lambda value: Change(words=words) if value == usual else rule(value)


def never(words: str) -> Rule:
    """A rule for what has no counterpart, and why."""
    return lambda value: lost(words)


@dataclass(frozen=True)
class Algorithm:
    """How a ``sparse_attention_config`` of TensorRT-LLM is carried over.

    A field whose name the method's config has becomes that field; ``rules`` are for the others.

    Attributes:
        method: name of the decode method in the registry.
        renamed: fields that have another name there.
        rules: fields that are not simply taken over.
        by_phase: the fields that say how sparse to be, with a number for each phase or one for both, and what to say
            of each; an earlier one wins, and nothing is converted without any.
        note: what differs although nothing was left out.
    """

    method: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    by_phase: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


_MODELS_OWN = never("the model's own config.json decides")
_KERNELS = never("it chooses among TensorRT-LLM's kernels")
_SHORT = never(
    "it separates CUDA graphs there, and none from sparse attention; here a row of fewer tokens than min_seq_len "
    "attends to all of them, and so does a batch of fewer than crossover_tokens"
)


def _whole(name: str) -> Rule:
    """A number that may be written as a float there, such as 128.0; the method's config judges others."""
    return lambda value: Change(fields={name: int(value) if isinstance(value, float) and value % 1 == 0 else value})


ALGORITHMS: Mapping[str, Algorithm] = {
    # Its pages are those of the KT cache; ``page_size`` of a config here is that of the KV cache.
    "rocket": Algorithm(
        "rocketkv",
        renamed={"page_size": "kt_page_size"},
        rules={"topr": _whole("topr"), "seq_len_threshold": _SHORT},
    ),
    "dsa": Algorithm(
        "dsa",
        rules={
            **dict.fromkeys(("index_n_heads", "index_head_dim", "index_topk", "indexer_rope_interleave"), _MODELS_OWN),
            **dict.fromkeys(("use_cute_dsl_topk", "use_cute_dsl_paged_mqa_logits", "enable_heuristic_topk"), _KERNELS),
            **dict.fromkeys(("use_self_sampling_topk", "use_gvr_emission"), _KERNELS),
            "seq_len_threshold": never("the model's index_topk decides it, as there"),
            "indexer_max_chunk_size": never("how many queries the indexer takes at a time goes by the memory here"),
            "q_split_threshold": never("each rank's indexer takes all queries"),
            "skip_indexer_for_short_seqs": unless(True, never("rows of at most index_topk tokens attend to all")),
            "indexer_k_dtype": unless("fp8", never("the indexer's keys are float8")),
        },
    ),
    "skip_softmax": Algorithm(
        "skip_softmax",
        rules={"seq_len_threshold": _SHORT},
        by_phase={
            "threshold_scale_factor": "",
            "target_sparsity": "needs a checkpoint that NVIDIA Model Optimizer has calibrated, or calibration_file: "
            f"{CALIBRATE} --model-path MODEL --out FILE.json",
        },
        note="threshold_scale_factor is divided by the position in prefill here, and by the prompt's length there; "
        "in decode a block is compared with the first and the newest ones here, and with those seen before it there",
    ),
}


def as_ours(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a method's config where a user gave those of TensorRT-LLM.

    Those that have no other meaning here are read as they are. With an ``algorithm`` all of them are TensorRT-LLM's:
    ``page_size`` of its "rocket" is that of the KT cache then, and null is the default.

    Args:
        name: the method's.
        fields: what the user gave.

    Raises:
        ValueError: ``algorithm`` is another method's, or a field has no counterpart; names it, and why.
    """
    found = {theirs: one for theirs, one in ALGORITHMS.items() if one.method == name}
    theirs, algorithm = next(iter(found.items()), ("", None))
    asked = fields.get(ALGORITHM)
    if algorithm is None:
        return dict(fields)
    if asked is not None and str(asked).lower() != theirs:
        raise ValueError(f"{ALGORITHM}: got {asked!r}, allowed with {name}: {theirs!r}")
    ours: dict[str, Any] = {}
    for given, value in fields.items():
        if given == ALGORITHM or (asked is not None and value is None):
            continue
        rule = algorithm.rules.get(given)
        if asked is not None and given in algorithm.renamed:
            _put(ours, algorithm.renamed[given], value)
        elif rule is None:
            _put(ours, given, value)
        elif (change := rule(value)).lost:
            raise ValueError(f"{given}: got {value!r}, which has no counterpart here: {change.words}")
        else:
            ours |= change.fields
    return ours


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    if name in fields:
        raise ValueError(f"{name}: got it by TensorRT-LLM's name, too; allowed: one of both")
    fields[name] = value


def rules(options: Mapping[str, Any]) -> Mapping[str, Rule]:
    """What becomes of the options beside ``sparse_attention_config``.

    Args:
        options: all of them.

    Returns:
        By option; ``kv_cache_config.dtype`` is a field of that table.
    """
    chunked = options.get("enable_chunked_prefill")
    return {
        "backend": unless("pytorch", never("it is another engine's")),
        "model": _as("--model-path"),
        "tokenizer": _as("--tokenizer-path"),
        "tokenizer_mode": _as("--tokenizer-mode"),
        "revision": _as("--revision"),
        "trust_remote_code": _when(True, "--trust-remote-code", otherwise="off, as by default"),
        "skip_tokenizer_init": _when(True, "--skip-tokenizer-init", otherwise="off, as by default"),
        "dtype": _as("--dtype"),
        "load_format": lambda value: Change(("--load-format", str(value).lower())),
        "tensor_parallel_size": _as("--tp-size"),
        "pipeline_parallel_size": _as("--pp-size"),
        "moe_expert_parallel_size": _as("--ep-size"),
        "context_parallel_size": unless(1, never("SGLang's context parallelism is another one")),
        "enable_attention_dp": _when(True, "--enable-dp-attention", otherwise="off, as by default"),
        "enable_lora": _when(True, "--enable-lora", otherwise="off, as by default"),
        "max_batch_size": _as("--max-running-requests"),
        "max_seq_len": _as("--context-length"),
        "max_beam_width": unless(1, never("SGLang has no beam search")),
        "max_num_tokens": _as("--chunked-prefill-size" if chunked else "--max-prefill-tokens"),
        "enable_chunked_prefill": _when(
            False, "--chunked-prefill-size", "-1", otherwise="SGLang's default; max_num_tokens is the size of a chunk"
        ),
        "disable_overlap_scheduler": _when(True, "--disable-overlap-schedule", otherwise="off, as by default"),
        "guided_decoding_backend": _as("--grammar-backend"),
        "stream_interval": _as("--stream-interval"),
        "cuda_graph_config": _when(None, "--disable-decode-cuda-graph", otherwise="SGLang's default"),
        "cuda_graph_config.max_batch_size": _as("--cuda-graph-max-bs-decode"),
        "cuda_graph_config.batch_sizes": _all_as("--cuda-graph-bs-decode"),
        "cuda_graph_config.enable_padding": _when(False, "--disable-cuda-graph-padding", otherwise="SGLang's default"),
        "kv_cache_config.enable_block_reuse": _when(False, "--disable-radix-cache", otherwise="SGLang's default"),
        "kv_cache_config.tokens_per_block": lambda value: Change(fields={"page_size": value}),
        "kv_cache_config.dtype": lambda value: Change(
            ("--kv-cache-dtype", "fp8_e4m3" if value == "fp8" else str(value))
        ),
        "kv_cache_config.max_tokens": _as("--max-total-tokens"),
        "kv_cache_config.free_gpu_memory_fraction": never(
            "a share of what the weights leave free; --mem-fraction-static is one of all memory and counts them"
        ),
    }

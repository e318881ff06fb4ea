"""TensorRT-LLM's configs of sparse attention, 1.2 to 1.3, as configs of this plugin.

Source: the configs of sparse attention in its ``llmapi/llm_args.py``, and its guide to sparse attention.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_sparse.errors import SparseArgumentError

logger = logging.getLogger(__name__)

# The option of ``trtllm-serve --config`` that holds such a config, and its field that names the method.
SPARSE, ALGORITHM = "sparse_attention_config", "algorithm"


@dataclass(frozen=True)
class Algorithm:
    """The reading of a TensorRT-LLM config. Fields that are not listed here keep their names.

    Attributes:
        method: name of the decode method in the registry.
        renamed: fields that have another name there.
        whole: numbers that may be written as floats, such as 128.0.
        usual: fields with the one value that is allowed, as it changes nothing here.
        refused: fields without a counterpart, with the reasons; those of ``usual`` too.
    """

    method: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    usual: Mapping[str, object] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


_SHORT = (
    "it only separates CUDA graphs there; here a row of fewer tokens than min_seq_len "
    "attends to all of them, and so does a batch of fewer than crossover_tokens"
)
_OF_THE_MODEL = ("index_n_heads", "index_head_dim", "index_topk", "indexer_rope_interleave")
_OF_KERNELS = (
    "use_cute_dsl_topk",
    "use_cute_dsl_paged_mqa_logits",
    "enable_heuristic_topk",
    "use_self_sampling_topk",
    "use_gvr_emission",
)
ALGORITHMS: Mapping[str, Algorithm] = {
    # Its ``page_size`` is that of the KT cache; here ``page_size`` is that of the KV cache.
    "rocket": Algorithm(
        "rocketkv", renamed={"page_size": "kt_page_size"}, whole=("topr",), refused={"seq_len_threshold": _SHORT}
    ),
    "dsa": Algorithm(
        "dsa",
        usual={"skip_indexer_for_short_seqs": True, "indexer_k_dtype": "fp8"},
        refused={
            **dict.fromkeys(_OF_THE_MODEL, "the model's own config.json decides"),
            **dict.fromkeys(_OF_KERNELS, "it chooses among TensorRT-LLM's kernels"),
            "seq_len_threshold": "the model's index_topk decides it, as there",
            "indexer_max_chunk_size": "memory decides here how many queries the indexer takes at a time",
            "q_split_threshold": "each rank's indexer takes all queries",
            "skip_indexer_for_short_seqs": "rows of at most index_topk tokens attend to all",
            "indexer_k_dtype": "the indexer's keys are float8",
        },
    ),
    "skip_softmax": Algorithm("skip_softmax", refused={"seq_len_threshold": _SHORT}),
}


def as_ours(name: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Translate fields of TensorRT-LLM into those of a method's config.

    Fields with the same meaning are read as they are. With an ``algorithm`` all fields are TensorRT-LLM's:
    ``page_size`` of "rocket" is then that of the KT cache, and null is the default. Of the options of ``trtllm-serve``
    only ``sparse_attention_config`` is read; a warning names the others.

    Args:
        name: the method's.
        fields: the user's fields.

    Raises:
        SparseArgumentError: ``algorithm`` is another method's, or a field has no counterpart; names it and the reason.
    """
    found = {theirs: one for theirs, one in ALGORITHMS.items() if one.method == name}
    theirs, algorithm = next(iter(found.items()), ("", None))
    if algorithm is None:
        return dict(fields)
    if SPARSE in fields:
        fields = _of_options(fields)
    asked = fields.get(ALGORITHM)
    if asked is not None and str(asked).lower() != theirs:
        raise SparseArgumentError(field=ALGORITHM, got=asked, allowed=repr(theirs), where=f"with {name}")
    ours: dict[str, object] = {}
    for given, value in fields.items():
        if given == ALGORITHM or (asked is not None and value is None):
            continue
        if given in algorithm.usual and value == algorithm.usual[given]:
            continue
        if given in algorithm.refused:
            message = f"{given}: got {value!r}, which has no counterpart here: {algorithm.refused[given]}"
            raise SparseArgumentError(message, field=given, got=value)
        mine = algorithm.renamed.get(given, given) if asked is not None else given
        if mine in ours:
            message = f"{mine}: got it by TensorRT-LLM's name, too"
            raise SparseArgumentError(message, field=mine, got=value, allowed="one of the two")
        if given in algorithm.whole and isinstance(value, float) and value % 1 == 0:
            value = int(value)
        ours[mine] = value
    return ours


def _of_options(options: Mapping[str, object]) -> Mapping[str, object]:
    fields = options[SPARSE]
    if not isinstance(fields, dict) or not fields.get(ALGORITHM):
        allowed = f"a table with an algorithm, {', '.join(ALGORITHMS)}"
        raise SparseArgumentError(field=SPARSE, got=fields, allowed=allowed)
    if others := [name for name in options if name != SPARSE]:
        logger.warning(
            "sglang_sparse: only %s of TensorRT-LLM's options is read; use SGLang's own flags for %s",
            SPARSE,
            ", ".join(others),
        )
    return fields

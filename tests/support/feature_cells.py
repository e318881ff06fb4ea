"""The cells with a yes in the feature tables, and the test or leg that shows that each is true."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sglang_sparse.tools import doc_tables, support_matrix

ROOT = Path(__file__).parents[2]
YES = "yes"
PAGE_SIZE, ON_GPU, ON_CPU = (
    "`--page-size`",
    "`--attention-backend` on a GPU",
    "`--attention-backend` on the CPU platform",
)
PHASE, MODELS, MACHINE, TOGETHER, OTHER_LAYERS = doc_tables.properties()
FLOAT8 = "`--kv-cache-dtype fp8_e4m3`"
SCALED = "`--kv-cache-dtype fp8_e4m3 --quantization-param-path scales.json`"
WINDOWS, HYBRID, CHUNKS, IMAGES = (f"{kind} MHA/GQA" for kind in ("windowed", "hybrid", "chunked", "multimodal"))
DECODE_SKIP, PREFILL_SKIP = "skip_softmax", "skip_softmax (prefill)"


class Cell(NamedTuple):
    """One yes.

    Attributes:
        row: what the method is asked, as the tables call it.
        method: its label.
        value: one of the values in the answer, or `YES`.
    """

    row: str
    method: str
    value: str = YES


def row_of(flag: Mapping[str, object]) -> str:
    return f"`{support_matrix.flag_text(flag)}`"


@cache
def cells() -> frozenset[Cell]:
    """All that the tables say yes to."""
    flags = {row_of(flag) for flag in support_matrix.FLAGS}
    found = set()
    for row, says in {**doc_tables.features(), **doc_tables.properties()}.items():
        for method in support_matrix.methods():
            answer = says(method)
            if answer not in ("no", "none"):
                values = [YES] if row in flags else answer.replace(" (calibrated)", "").split(", ")
                found |= {Cell(row, method.label, value) for value in values}
    return frozenset(found)


_SERVER = "tests/server/test_{}.py::test_"
_PAIRS = _SERVER.format("prefill_pairs") + "prefixes_and_company_change_nothing"
_PARTS = _SERVER.format("layer_parts")
_MIXED = _PARTS + "rocketkv_beside_dense_resa_and_skip_softmax_is_counted_by_part"
_RULES = _SERVER.format("layer_rules") + "each_part_is_counted_and_the_server_is_their_sum"
_BOTH_PHASES = _SERVER.format("skip_softmax_decode") + "a_threshold_of_zero_is_dense_in_both_phases"
_SKIP_PREFILL = _SERVER.format("skip_softmax") + "a_threshold_of_zero_is_dense"
_ANCHOR = _SERVER.format("prefill") + "a_threshold_that_keeps_all_is_dense"
_DSA = _SERVER.format("dsa") + "prompts_are_read_the_same_in_pieces_and_in_one"
_KEPT = _SERVER.format("rocketkv") + "few_blocks_of_what_is_kept_are_attended"
_LATENTS = _SERVER.format("skip_softmax_mla")
_LAYERED = _SERVER.format("layered_prefill")
# In the name of a leg, and its methods.
_OF_BOTH_PHASES = {
    "resa-anchor": ("resa", "anchor"),
    "rocketkv-skip_softmax": ("rocketkv", PREFILL_SKIP),
    "skip_softmax": (DECODE_SKIP,),
}
_WINDOWS = _SERVER.format("windows")
_NOTHING_OUT = _WINDOWS + "other_methods_that_leave_nothing_out_agree"
_STATES, _POOLS, _MEDIA = map(_SERVER.format, ("state_models", "window_pools", "media"))
_OTHER_FIELDS = "itself with other fields"

# What the servers of ``test_matrix`` do not show, and what does: a test, or the name of a leg of ``reproduce``.
PROOFS: Mapping[Cell, str] = {
    Cell(PAGE_SIZE, "resa", "16"): _SERVER.format("identity") + "equal_one_by_one",
    Cell(PAGE_SIZE, "rocketkv", "16"): _KEPT,
    Cell(PAGE_SIZE, DECODE_SKIP, "16"): _BOTH_PHASES,
    Cell(PAGE_SIZE, "anchor", "16"): _ANCHOR,
    Cell(PAGE_SIZE, PREFILL_SKIP, "16"): _SKIP_PREFILL,
    **{Cell(PAGE_SIZE, method, size): _PAIRS for method in ("resa", DECODE_SKIP) for size in ("1", "2", "64")},
    Cell(PAGE_SIZE, "rocketkv", "64"): _PAIRS,
    Cell(PHASE, "dsa", "prefill"): _DSA,
    Cell(PHASE, DECODE_SKIP, "prefill"): _BOTH_PHASES,
    Cell(OTHER_LAYERS, "resa", "dense"): _RULES,
    Cell(OTHER_LAYERS, "resa", _OTHER_FIELDS): _SERVER.format("layer_rules") + "two_configs_of_one_method_on_two_ranks",
    Cell(OTHER_LAYERS, "resa", "rocketkv"): _MIXED,
    Cell(OTHER_LAYERS, "resa", DECODE_SKIP): _RULES,
    Cell(OTHER_LAYERS, "rocketkv", "dense"): _MIXED,
    Cell(OTHER_LAYERS, "rocketkv", _OTHER_FIELDS): _PARTS
    + "a_part_that_keeps_everything_leaves_the_other_as_on_its_own_server",
    Cell(OTHER_LAYERS, "rocketkv", "resa"): _MIXED,
    Cell(OTHER_LAYERS, "rocketkv", DECODE_SKIP): _MIXED,
    Cell(OTHER_LAYERS, DECODE_SKIP, "dense"): _MIXED,
    Cell(OTHER_LAYERS, DECODE_SKIP, _OTHER_FIELDS): _PARTS + "skip_softmax_with_two_factors",
    Cell(OTHER_LAYERS, DECODE_SKIP, "resa"): _RULES,
    Cell(OTHER_LAYERS, DECODE_SKIP, "rocketkv"): _MIXED,
    Cell(OTHER_LAYERS, "robsa", "dense"): _PARTS + "robsa_with_two_shares_beside_dense_layers",
    Cell(OTHER_LAYERS, "robsa", _OTHER_FIELDS): _PARTS + "robsa_with_two_sizes_of_blocks_on_two_ranks",
    Cell(OTHER_LAYERS, "robsa", DECODE_SKIP): _LATENTS + "robsa_has_other_layers",
    **{
        Cell(OTHER_LAYERS, method, other): _LAYERED + "each_layer_has_its_rule"
        for method, others in (
            ("anchor", ("dense", _OTHER_FIELDS, "skip_softmax")),
            (PREFILL_SKIP, ("dense", "anchor")),
        )
        for other in others
    },
    Cell(OTHER_LAYERS, PREFILL_SKIP, _OTHER_FIELDS): _LAYERED + "two_factors_of_one_method_on_two_ranks",
    **{
        Cell("`--speculative-algorithm EAGLE3`", method): _SERVER.format("drafters") + "drafts_change_no_answer"
        for method in ("anchor", PREFILL_SKIP)
    },
    Cell("`--speculative-algorithm EAGLE3`", "resa"): _SERVER.format("sparse_drafts")
    + "all_pages_are_a_dense_servers_answers",
    Cell("`--speculative-algorithm EAGLE3`", "dsa"): "tests/hooks/test_dsa_matrix.py::test_deployments",
    **{
        Cell("`--enable-lora`", method): _SERVER.format("lora") + "a_batch_answers_as_each_request_alone"
        for method in ("resa", "robsa", "rocketkv", DECODE_SKIP, "anchor", PREFILL_SKIP)
    },
    Cell("`--enable-lora`", "dsa"): "tests/hooks/test_dsa_matrix.py::test_deployments",
    **{
        Cell("`--enable-deterministic-inference`", method): _SERVER.format("deterministic") + proof
        for method, proof in (
            ("resa", "a_row_is_alone_with_resa"),
            ("rocketkv", "a_row_is_alone_with_other_methods"),
            ("robsa", "a_row_is_alone_with_mla"),
        )
    },
    Cell(MODELS, DECODE_SKIP, "MLA"): _LATENTS + "a_factor_of_next_to_nothing_equals_dense",
    Cell(MODELS, "resa", WINDOWS): _WINDOWS + "dense_and_all_pages_agree_with_transformers",
    Cell(MODELS, "anchor", WINDOWS): _WINDOWS + "prefill_runs_sparse_in_the_same_layers",
    **{Cell(MODELS, method, WINDOWS): _NOTHING_OUT for method in ("rocketkv", DECODE_SKIP, PREFILL_SKIP)},
    Cell(MODELS, "resa", HYBRID): _STATES + "dense_and_all_pages_agree_with_transformers",
    **{
        Cell(MODELS, method, HYBRID): _STATES + "other_methods_that_leave_nothing_out_agree"
        for method in ("rocketkv", DECODE_SKIP)
    },
    Cell(MODELS, "resa", CHUNKS): _POOLS + "follow_ups_hit_generated_tokens_and_agree",
    Cell(MODELS, "anchor", CHUNKS): _POOLS + "prefill_runs_sparse_in_the_layers_of_full_attention",
    **{
        Cell(MODELS, method, CHUNKS): _POOLS + "other_methods_and_an_unshared_pool_agree"
        for method in ("rocketkv", DECODE_SKIP, PREFILL_SKIP)
    },
    Cell(MODELS, "resa", IMAGES): _MEDIA + "answers_behind_an_image_agree_with_transformers",
    **{
        Cell(MODELS, method, IMAGES): _MEDIA + "other_methods_that_leave_nothing_out_agree"
        for method in ("rocketkv", DECODE_SKIP)
    },
    # What takes a GPU.
    Cell(ON_GPU, "resa", "fa3"): "e1",
    **{
        Cell(ON_GPU, method, name): f"identity-{methods}-{name}"
        for methods in ("resa-anchor", "rocketkv-skip_softmax", "skip_softmax")
        for method in _OF_BOTH_PHASES[methods]
        for name in ("triton", "flashinfer", "torch_native")
    },
    **{Cell(ON_GPU, "robsa", name): f"identity-robsa-{name}" for name in ("flashmla", "flashinfer", "fa3", "triton")},
    Cell(ON_GPU, "dsa", "dsa"): "needles-dsa-auto",
    Cell(ON_GPU, "rocketkv", "fa3"): "identity-rocketkv-fa3",
    Cell(ON_GPU, DECODE_SKIP, "fa3"): "identity-skip_softmax-fa3",
    Cell(ON_GPU, "anchor", "fa3"): "needles-anchor",
    Cell(ON_GPU, PREFILL_SKIP, "fa3"): "needles-skip_softmax",
    # With scales; without them they are 1.
    **{Cell(row, "resa"): "identity-resa-anchor-flashinfer-fp8" for row in (FLOAT8, SCALED)},
    Cell(SCALED, "anchor"): "identity-resa-anchor-flashinfer-fp8",
    **{Cell(SCALED, method): "needles-skip_softmax-fp8" for method in (DECODE_SKIP, PREFILL_SKIP)},
    Cell(FLOAT8, "robsa"): "identity-robsa-flashmla-fp8",
    Cell(FLOAT8, "dsa"): "needles-dsa-portable-fp8",
    Cell(MACHINE, "resa", "GPU"): "e1",
    Cell(MACHINE, "robsa", "GPU"): "needles-robsa",
    Cell(MACHINE, "dsa", "GPU"): "needles-dsa-auto",
    Cell(MACHINE, "rocketkv", "GPU"): "needles-rocketkv",
    Cell(MACHINE, DECODE_SKIP, "GPU"): "needles-skip_softmax",
    Cell(MACHINE, "anchor", "GPU"): "needles-anchor",
    Cell(MACHINE, PREFILL_SKIP, "GPU"): "skip-softmax-serving",
}


def of_leg(proof: str) -> bool:
    """Whether a proof is the name of a leg, which the lab's tests look at."""
    return "::" not in proof


def there_is(proof: str) -> bool:
    """Whether there is a test of this name."""
    path, _, name = proof.partition("::")
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    return re.search(rf"^def {name}\(", text, re.M) is not None

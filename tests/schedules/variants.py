"""Engine options of the schedules: those that are not the default, by purpose."""

from __future__ import annotations

from typing import Any

# Rows cross from dense to sparse on their own and by what else is in the batch, and back when neighbours leave.
CROSSING = {"rectify_interval": 4, "dense_fallback": "auto", "min_seq_len": 16, "crossover_tokens": 20}
# Sparse prefill in chunks of two groups; with a crossover above the chunk, dense chunks end and begin anywhere.
PREFILL_VARIANTS: tuple[dict[str, Any], ...] = (
    {
        "overlap": True,
        "slots": 480,
        "chunk": 64,
        "config": {"rectify_interval": 4, "rectify_on_finish": True},
        "prefill": {"dense_tail": 5},
    },
    {
        "overlap": False,
        "slots": 480,
        "chunk": 64,
        "config": {"rectify_interval": 5},
        "prefill": {"crossover_tokens": 96, "dense_fallback": "auto"},
    },
)
# Rows decode within the batches of prompts; beside them a chunk of one group has no room for a group.
MIXED_VARIANTS: tuple[dict[str, Any], ...] = (
    {"overlap": True, "slots": 480, "chunk": 64, "config": {"rectify_interval": 4}, "prefill": {}, "mixed": True},
    {
        "overlap": False,
        "slots": 480,
        "chunk": 32,
        "config": {"rectify_interval": 3, "rectify_on_finish": True},
        "prefill": {"dense_tail": 40},
        "mixed": True,
    },
)
# Requests let go of their prompts, of which the pool holds few. Rows that a crossover would make dense are among them,
# pages of one token, windows within a page, prompts whose last group is not shared, and a server without a tree.
COMPACT: dict[str, Any] = {"method": "rocketkv", "slots": 160}
COMPACT_VARIANTS: tuple[dict[str, Any], ...] = (
    {**COMPACT, "overlap": True, "config": {"eviction": "compact"}},
    {
        **COMPACT,
        "overlap": False,
        "config": {"eviction": "compact", "dense_fallback": "auto", "min_seq_len": 30, "crossover_tokens": 60},
    },
    {**COMPACT, "overlap": True, "radix": False, "config": {"eviction": "compact"}},
    {**COMPACT, "overlap": False, "page_size": 1, "config": {"eviction": "compact", "kt_page_size": 1}},
    {
        **COMPACT,
        "overlap": True,
        "page_size": 8,
        "config": {"eviction": "compact", "window_size": 2, "prompt_budget": 10, "topk": 2},
    },
    {
        **COMPACT,
        "overlap": True,
        "slots": 480,
        "chunk": 64,
        "config": {"eviction": "compact"},
        "prefill": {"dense_tail": 5},
    },
)
# Blocks of keys are skipped in both phases; prompts are of several blocks, and shared by whole tiles of queries.
SKIP: dict[str, Any] = {"method": "skip_softmax", "slots": 900}
SKIP_VARIANTS: tuple[dict[str, Any], ...] = (
    {**SKIP, "overlap": True, "chunk": 256, "config": {"rectify_interval": 4}},
    {**SKIP, "overlap": False, "chunk": 128, "config": {"rectify_interval": 0}, "mixed": True},
    {**SKIP, "overlap": True, "chunk": 256, "page_size": 16, "config": {"rectify_interval": 0}},
    {**SKIP, "overlap": False, "chunk": 128, "page_size": 1, "config": {"rectify_interval": 5}},
)
# Layers of a method each, or of other fields: blocks and entries of two sizes, two windows, and one part that chooses
# where a prompt ends.
PARTS: dict[str, Any] = {"method": "rocketkv", "slots": 200}
OTHER_BUDGET = {"window_size": 10, "prompt_budget": 30, "kt_page_size": 2}
RESA_PART = {"method": "resa", "active_ratio": 0.1, "min_pages": 2}
SKIP_PART = {"method": "skip_softmax", "threshold_scale_factor": {"decode": 200}}
PARTS_VARIANTS: tuple[dict[str, Any], ...] = (
    {**PARTS, "overlap": True, "config": {"layers": {"0": {}, "1": OTHER_BUDGET}, "rectify_interval": 4}},
    {
        **PARTS,
        "overlap": False,
        "config": {"layers": {"0": {}, "1": RESA_PART}, "rectify_interval": 3, "rectify_on_finish": True},
    },
    {**PARTS, "overlap": True, "page_size": 8, "config": {"layers": {"0": SKIP_PART, "1": {}}, "rectify_interval": 0}},
    {
        **PARTS,
        "overlap": False,
        "config": {**CROSSING, "layers": {"0": RESA_PART, "1": OTHER_BUDGET | {"method": "rocketkv"}}},
    },
    {
        **PARTS,
        "overlap": True,
        "slots": 480,
        "chunk": 64,
        "config": {"layers": {"0": OTHER_BUDGET, "1": {}}, "rectify_interval": 4},
        "prefill": {"dense_tail": 5},
    },
)
# Sparse drafts and a dense verification: one draft and many, a page that they fill and several that they touch, rows
# that a crossover leaves without drafts, other methods, and a sparse prefill.
DRAFTS: dict[str, Any] = {"slots": 160, "drafts": 3, "config": {"rectify_interval": 0}}
DRAFT_VARIANTS: tuple[dict[str, Any], ...] = (
    {**DRAFTS, "overlap": True},
    {**DRAFTS, "overlap": False, "drafts": 6, "page_size": 1},
    {**DRAFTS, "overlap": True, "drafts": 4, "config": {**CROSSING, "layers": "1", "rectify_interval": 0}},
    {**DRAFTS, "overlap": True, "drafts": 5, "method": "rocketkv", "slots": 240},
    {**DRAFTS, "overlap": False, "drafts": 1, "page_size": 8, "slots": 480, "chunk": 64, "prefill": {"dense_tail": 5}},
    {**PARTS, "overlap": False, "drafts": 3, "config": {"layers": {"0": {}, "1": RESA_PART}, "rectify_interval": 0}},
)
# A drafter of SGLang's beside sparse prefill alone: trees of tokens and of pairs of them, with little memory, prompts
# whose last groups are not shared, and rows that decode within the batches of prompts.
DRAFTER: dict[str, Any] = {"method": None, "overlap": True, "slots": 480, "chunk": 64, "drafts": 3, "config": {}}
DRAFTER_VARIANTS: tuple[dict[str, Any], ...] = (
    {**DRAFTER, "drafter": "STANDALONE", "prefill": {"dense_tail": 5}},
    {**DRAFTER, "drafter": "EAGLE3", "prefill": {"dense_tail": 5}},
    {
        **DRAFTER,
        "overlap": False,
        "drafter": "EAGLE3",
        "drafts": 1,
        "prefill": {"crossover_tokens": 96, "dense_fallback": "auto"},
    },
    {**DRAFTER, "drafter": "EAGLE3", "prefill": {}, "mixed": True},
)
# A sparse verification, with rows that a crossover leaves dense, and rectification between rounds.
VERIFIER: dict[str, Any] = {**DRAFTER, "method": "resa", "slots": 200, "chunk": 16}
VERIFIER_VARIANTS: tuple[dict[str, Any], ...] = (
    {**VERIFIER, "drafter": "STANDALONE", "config": {"rectify_interval": 5, "rectify_on_finish": True}},
    {**VERIFIER, "drafter": "EAGLE3", "overlap": False, "drafts": 1, "config": {"rectify_interval": 3}},
    {**VERIFIER, "drafter": "EAGLE3", "page_size": 8, "config": {**CROSSING, "rectify_interval": 7}},
    {**VERIFIER, "drafter": "STANDALONE", "drafts": 2, "config": {"rectify_interval": 0}},
)
# Prompts that left the KV pool come back from host memory, which holds some of them.
HOST: dict[str, Any] = {"host": 3, "slots": 160}
HOST_VARIANTS: tuple[dict[str, Any], ...] = (
    {**HOST, "overlap": True, "config": {"rectify_interval": 4}},
    {**HOST, "overlap": False, "page_size": 8, "config": {"rectify_interval": 5, "rectify_on_finish": True}},
    {**HOST, "overlap": True, "slots": 480, "chunk": 64, "config": {"rectify_interval": 4}, "prefill": {}},
    {**HOST, "method": "rocketkv", "overlap": False, "config": {"rectify_interval": 4}},
    {**HOST, "method": "rocketkv", "overlap": True, "page_size": 8, "config": {"rectify_interval": 3}},
    {**HOST, "overlap": True, "config": {"rectify_interval": 0}, "drafts": 3},
)
# The decode server of a pair, without and with a prefix cache, which holds exact KV of what arrived and was decoded.
PAIR: dict[str, Any] = {"pair": True, "slots": 160}
PAIR_VARIANTS: tuple[dict[str, Any], ...] = (
    {**PAIR, "overlap": True, "config": {"rectify_interval": 4}},
    {**PAIR, "overlap": False, "radix": False, "page_size": 8, "config": {"rectify_interval": 3}},
    {**PAIR, "overlap": False, "page_size": 1, "config": {**CROSSING, "rectify_on_finish": True}},
    {**PAIR, "overlap": True, "radix": False, "method": "rocketkv", "slots": 240, "config": {"rectify_interval": 4}},
    {**PAIR, "overlap": True, "radix": False, "slots": 480, "config": {"rectify_interval": 5}, "prefill": {}},
)
# Requests and turns of streaming sessions, which keep exact KV for the next turn. Without rectification, answers are
# compared with those of whole prompts.
SESSIONS: dict[str, Any] = {"sessions": True, "slots": 320}
SESSION_VARIANTS: tuple[dict[str, Any], ...] = (
    {**SESSIONS, "overlap": True, "config": {"rectify_interval": 4}},
    {**SESSIONS, "overlap": False, "config": {"rectify_interval": 0}},
    {**SESSIONS, "overlap": False, "page_size": 8, "config": {"rectify_interval": 3, "rectify_on_finish": True}},
    {**SESSIONS, "overlap": True, "page_size": 1, "config": {"rectify_interval": 0}},
    {**SESSIONS, "overlap": True, "method": "rocketkv", "config": {"rectify_interval": 4}},
)
# What ``all`` takes turns with: all kinds of page size and of finish, few and many due rows, no rectification.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"overlap": True},
    {"overlap": False, "config": {"rectify_interval": 3, "rectify_on_finish": True, "layers": "0"}, "apart": True},
    {"overlap": True, "config": {"rectify_interval": 5, "rectify_on_finish": True, "rectify_max_batch": 1}},
    {"overlap": False, "config": CROSSING},
    *PREFILL_VARIANTS,
    *MIXED_VARIANTS,
    {"overlap": True, "page_size": 16, "config": {"rectify_interval": 12, "rectify_on_finish": True}},
    {"overlap": False, "config": {"rectify_interval": 0, "group": "vote"}},
    {"overlap": True, "config": {"rectify_interval": 0, "summary_dtype": "bf16"}},
    {"overlap": False, "page_size": 1, "config": {"rectify_interval": 4, "min_pages": 6}},
    {"overlap": True, "config": {**CROSSING, "rectify_on_finish": True}, "apart": True},
    {"overlap": False, "page_size": 16, "config": {"rectify_interval": 7, "summary": "centroids", "group": "vote"}},
    *COMPACT_VARIANTS,
    *SKIP_VARIANTS,
    *PARTS_VARIANTS,
)
# What ``--vary`` names.
FAMILIES = {
    "all": VARIANTS,
    "compact": COMPACT_VARIANTS,
    "skip": SKIP_VARIANTS,
    "parts": PARTS_VARIANTS,
    "drafts": DRAFT_VARIANTS,
    "drafters": DRAFTER_VARIANTS,
    "verifiers": VERIFIER_VARIANTS,
    "host": HOST_VARIANTS,
    "pairs": PAIR_VARIANTS,
    "sessions": SESSION_VARIANTS,
}

"""Code shared by tests of anchor attention: its two implementations, and a pass in pieces."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sglang_sparse_kernels.anchor_prefill import GroupMeans, anchor_prefill, cases, make_plan, reference
from sglang_sparse_kernels.anchor_prefill.plan import GroupPart

BLOCK, STEP = 16, 2
# Relative L2 error by the dtype of the query; bfloat16 also rounds the weights of the softmax.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Keys this close to the threshold may be active or not: the kernel rounds the mean queries to the dtype of the query.
BORDERLINE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}


def run_reference(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    q = arguments["q"].float()
    out = torch.full((*q.shape[:2], arguments["v_cache"].shape[2]), float("nan"), device=q.device)
    return reference.anchor_prefill(**{"stats": stats, **arguments, "q": q}, out=out)


def run_triton(arguments: dict[str, Any]) -> torch.Tensor:
    return anchor_prefill(**arguments)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def row_slots(arguments: dict[str, Any], row: int, length: int) -> torch.Tensor:
    return cases.row_slots(arguments["page_table"], row, length, arguments["page_size"])


def dense(arguments: dict[str, Any], case: Any) -> torch.Tensor:
    """Causal attention of the rows of a case in float64, with the arguments' sinks and soft cap if there are any."""
    results, first = [], 0
    for row, (prefix, extend) in enumerate(zip(case.prefixes, case.extends, strict=True)):
        slots = row_slots(arguments, row, prefix + extend)
        q = arguments["q"][first : first + extend].double()
        group = q.shape[1] // arguments["k_cache"].shape[1]
        keys, values = (
            arguments[name][slots].double().repeat_interleave(group, dim=1) for name in ("k_cache", "v_cache")
        )
        logits = torch.einsum("qhd,khd->hqk", q, keys) * (arguments["sm_scale"] * arguments["k_scale"])
        logits = capped(logits, arguments)
        causal = torch.ones(extend, prefix + extend, dtype=torch.bool, device=q.device).tril(prefix)
        weights = with_sinks(logits.masked_fill(~causal, float("-inf")), arguments.get("sinks"))
        results.append(torch.einsum("hqk,khd->qhd", weights, values) * arguments["v_scale"])
        first += extend
    return torch.cat(results)


def by_row(arguments: dict[str, Any], case: Any) -> torch.Tensor:
    """Attention of each row's newest token to all before it in float64, likewise."""
    results, size = [], arguments["page_size"]
    for row, length in enumerate(case.lengths):
        positions = torch.arange(length, device=arguments["q"].device)
        pages = arguments["indices"][row, 0] if "indices" in arguments else arguments["page_table"][row]
        slots = pages[positions // size].long() * size + positions % size
        keys, values = (
            arguments[cache][slots].double().repeat_interleave(case.group, dim=1) for cache in ("k_cache", "v_cache")
        )
        logits = torch.einsum("hd,khd->hk", arguments["q"][row].double(), keys) * (arguments["sm_scale"] * case.k_scale)
        weights = with_sinks(capped(logits, arguments)[:, None], arguments.get("sinks"))[:, 0]
        results.append(torch.einsum("hk,khd->hd", weights, values) * case.v_scale if length else values.new_zeros(0))
    shape = (*arguments["q"].shape[:2], arguments["v_cache"].shape[2])
    return torch.stack([each if each.numel() else each.new_zeros(shape[1:]) for each in results])


def capped(logits: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    cap = arguments.get("soft_cap")
    return logits if cap is None else cap * (logits / cap).tanh()


def with_sinks(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension of logits ``[heads, queries, keys]``, where each head may have a sink."""
    sinks = logits.new_full((len(logits),), float("-inf")) if sinks is None else sinks.to(logits.dtype)
    column = sinks[:, None, None].expand(*logits.shape[:2], 1)
    return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]


def garbled(arguments: dict[str, Any], case: Any) -> dict[str, Any]:
    """The same rows in a page table, not contiguous, whose entries past a row name no page."""
    table = arguments["page_table"]
    wide = torch.full((len(table), 40), 2**31 - 1, dtype=torch.int32, device=table.device)
    wide[:, 1::2] = -(2**31)
    for row, (prefix, extend) in enumerate(zip(case.prefixes, case.extends, strict=True)):
        pages = -(-(prefix + extend) // case.page_size)
        wide[row, :pages] = table[row, :pages]
    return {**arguments, "page_table": wide[:, :20]}


def empty_means(arguments: dict[str, Any], step: int, run: Any) -> GroupMeans:
    """For one row, in the dtype that an implementation runs in."""
    q = arguments["q"]
    return GroupMeans.allocate(step, *q.shape[1:], torch.float32 if run is run_reference else q.dtype, q.device)


def chunked(
    arguments: dict[str, Any], chunks: list[int], run: Any, prefix: int = 0, step: int = STEP, block: int = BLOCK
) -> torch.Tensor:
    """A one-row pass in pieces that hand on their means."""
    outs, start, means = [], prefix, {0: empty_means(arguments, step, run)}
    prompt = [(prefix, prefix + sum(chunks))]
    for size, q in zip(chunks, arguments["q"].split(chunks), strict=True):
        plan = make_plan([start], [size], block, step, q.device, prompt, carried=[start - prefix])
        outs.append(run({**arguments, "q": q, "plan": plan, "means": means}))
        start += size
    return torch.cat(outs)


def triton_active(
    arguments: dict[str, Any], means: Mapping[int, GroupMeans] | None = None
) -> list[tuple[GroupPart, torch.Tensor]]:
    """The kernels' active keys ``[Hq, candidates]`` of each part; asserts that the lists ascend. ``means`` move on."""
    # The interpreter has to be turned on before Triton is imported, and not all tests that import this file need it.
    from sglang_sparse_kernels.anchor_prefill import triton as kernels

    masks, made = [], arguments["plan"]
    for piece in made.slices:
        q = arguments["q"][piece.first_query : piece.first_query + piece.num_queries]
        config = kernels.default_config(made.block_size, q.shape[2], q.device)
        scale = arguments["sm_scale"] * arguments["k_scale"]
        k_cache, v_cache, table, size = (arguments[name] for name in ("k_cache", "v_cache", "page_table", "page_size"))
        launch = kernels.Launch(q, k_cache, v_cache, table, made, piece, size, scale, config)
        scratch = kernels.find_active_keys(launch, arguments["theta"], means or {})
        for number, part in enumerate(piece.parts):
            slots = row_slots(arguments, part.row, made.block_size + part.candidates)
            position = torch.full((k_cache.shape[0],), -1, dtype=torch.int64, device=q.device)
            position[slots] = torch.arange(len(slots), device=q.device) - made.block_size
            mask = torch.zeros(q.shape[1], part.candidates, dtype=torch.bool, device=q.device)
            for head in range(q.shape[1]):
                start = part.offset * q.shape[1] + head * part.candidates
                listed = scratch.slots[start : start + int(scratch.counts[number, head])].long()
                keys = position[listed]
                assert (keys.diff() > 0).all()
                mask[head, keys] = True
            masks.append((part, mask))
    return masks


def cut_prompt(case: cases.Case, device: str) -> tuple[dict[str, Any], int]:
    """A prompt whose threshold leaves out half of the keys of its last group, and the size of chunks for it.

    The first blocks of a group have the smallest scores and so ask for the most keys: later parts attend to these only
    as they are handed on.
    """
    arguments, (prefix,), (length,) = cases.make(case, device), case.prefixes, case.extends
    group = case.block_size * case.step
    place = (prefix + torch.arange(length, device=device)) % group
    q = arguments["q"] * (0.5 + place / group)[:, None, None]
    arguments["q"] = q.to(case.dtype)
    names = ("q", "k_cache", "page_table", "plan", "page_size", "sm_scale", "k_scale")
    gaps = reference.key_gaps(*(arguments[name] for name in names), row=0, group=(prefix + length - 1) // group).amin(0)
    arguments["theta"] = gaps[gaps.isfinite()].median()[None]
    return arguments, group * 3 // 8 + 1


def put(masks: Iterator[torch.Tensor], keys: torch.Tensor, first: int, _: int) -> torch.Tensor:
    """Return the keys attended before a block, with the next mask instead of those that follow the first block."""
    mask = next(masks)
    return torch.cat([keys[..., :first], mask.view(*keys.shape[:2], -1), keys[..., first + mask.shape[1] :]], -1)

"""The table of ``eval.bench_prefill``: who does the attention of a prefill, this project and its peers.

The dense peers prefill chunk by chunk over pages, as a server does. The sparse peers take a prompt in one piece and no
pages: FlexPrefill and XAttention as minference 0.1.6 has them. XAttention brings no kernel for what it selects; its
blocks are attended to by FlashInfer's `VariableBlockSparseAttentionWrapper`, which computes the blocks of the diagonal
whole. What a server does once for all layers (plans) is done beforehand and not timed; what a method does in every
layer (its search, and FlashInfer's plan for it) is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from eval.parts.prefill_inputs import Prompt
from sglang_sparse_kernels.anchor_prefill import anchor_prefill, make_plan

DENSE, SPARSE = "dense_prefill", "sparse_prefill"
OURS = "anchor"
STEP = 16
WORKSPACE_BYTES = 256 * 2**20
# Fills the prompt's output or returns another one, and counts pairs of query and key in ``stats``, if it counts them.
Prefill = Callable[[torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to prefill.

    Attributes:
        name: of the method or library.
        prepare: makes the call, from the prompt and the setting.
        setting: name of its parameter; None where there is none.
        values: what the parameter is by default.
        op: `DENSE` or `SPARSE`.
    """

    name: str
    prepare: Callable[[Prompt, float], Prefill]
    setting: str | None = None
    values: tuple[float, ...] = ()
    op: str = SPARSE

    @property
    def peer(self) -> bool:
        """Whether it is somebody else's."""
        return self.name != OURS


def anchor(prompt: Prompt, theta: float) -> Prefill:
    """This project's op, chunk by chunk over pages."""
    shape, device = prompt.shape, prompt.q.device
    cache = (prompt.k_pages.flatten(0, 1), prompt.v_pages.flatten(0, 1))
    thetas = torch.tensor([theta], device=device)
    plans = [make_plan([a], [b - a], shape.block_size, STEP, device) for a, b in shape.chunks]

    def run(stats: torch.Tensor | None) -> torch.Tensor:
        for (a, b), plan in zip(shape.chunks, plans, strict=True):
            pages = (prompt.page_table, plan, thetas, shape.page_size, prompt.scale)
            anchor_prefill(prompt.q[a:b], *cache, *pages, out=prompt.out[a:b], stats=stats)
        return prompt.out

    return run


def fa3(prompt: Prompt, _: float) -> Prefill:
    """FA3, chunk by chunk over pages."""
    library, shape = importlib.import_module("sgl_kernel.flash_attn"), prompt.shape
    ends = [torch.tensor([b], dtype=torch.int32, device=prompt.q.device) for _, b in shape.chunks]
    starts = [torch.tensor([0, b - a], dtype=torch.int32, device=prompt.q.device) for a, b in shape.chunks]

    def run(_: torch.Tensor | None) -> torch.Tensor:
        for (a, b), end, start in zip(shape.chunks, ends, starts, strict=True):
            prompt.out[a:b] = library.flash_attn_with_kvcache(
                prompt.q[a:b],
                prompt.k_pages,
                prompt.v_pages,
                page_table=prompt.page_table,
                cache_seqlens=end,
                cu_seqlens_q=start,
                max_seqlen_q=b - a,
                softmax_scale=prompt.scale,
                causal=True,
            )
        return prompt.out

    return run


def flashinfer(prompt: Prompt, _: float) -> Prefill:
    """FlashInfer, chunk by chunk over pages."""
    library, shape, device = importlib.import_module("flashinfer"), prompt.shape, prompt.q.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def planned(a: int, b: int) -> object:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        # A plan of its own for each chunk: the wrappers share the other workspace alone.
        wrapper.reset_workspace_buffer(workspace, torch.empty(8 * 2**20, dtype=torch.uint8, device=device))
        pages = -(-b // shape.page_size)
        starts, ends = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (b - a, pages))
        last = torch.tensor([(b - 1) % shape.page_size + 1], dtype=torch.int32, device=device)
        heads = (shape.q_heads, shape.kv_heads, shape.dim, shape.page_size)
        types = {"q_data_type": prompt.q.dtype, "kv_data_type": prompt.k.dtype}
        wrapper.plan(starts, ends, prompt.page_table[0, :pages], last, *heads, causal=True, **types)
        return wrapper

    wrappers = [planned(a, b) for a, b in shape.chunks]

    def run(_: torch.Tensor | None) -> torch.Tensor:
        for (a, b), wrapper in zip(shape.chunks, wrappers, strict=True):
            prompt.out[a:b] = wrapper.run(prompt.q[a:b], (prompt.k_pages, prompt.v_pages))  # pyright: ignore[reportAttributeAccessIssue]
        return prompt.out

    return run


def flexprefill(prompt: Prompt, gamma: float) -> Prefill:
    """FlexPrefill with its own tau of .1."""
    library = importlib.import_module("minference.modules.flexprefill")
    q, k, v = (part[None] for part in (prompt.q, prompt.k, prompt.v))
    return lambda _: library.flex_prefill_attention(q, k, v, gamma, 0.1, softmax_scale=prompt.scale)[0]


def xattention(prompt: Prompt, threshold: float) -> Prefill:
    """XAttention's estimate with its own stride of 8, and FlashInfer's attention over its blocks."""
    library = importlib.import_module("minference.modules.xattention")
    sparse = importlib.import_module("flashinfer.sparse")
    shape, device = prompt.shape, prompt.q.device
    wrapper = sparse.VariableBlockSparseAttentionWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
    group, size = shape.q_heads // shape.kv_heads, shape.block_size
    q = prompt.q.transpose(0, 1).contiguous()
    k, v = (part.repeat_interleave(group, 1).transpose(0, 1).contiguous() for part in (prompt.k, prompt.v))
    blocks = -(-shape.length // size)
    sizes = torch.full((shape.q_heads, blocks), size, dtype=torch.int32, device=device)
    sizes[:, -1] = shape.length - (blocks - 1) * size

    def run(_: torch.Tensor | None) -> torch.Tensor:
        settings = {"block_size": size, "stride": 8, "norm": 1, "threshold": threshold, "select_mode": "inverse"}
        settings |= {"use_triton": True, "causal": True, "chunk_size": 2048, "kdb": 1}
        mask = library.xattn_estimate(q[None], k[None], **settings)[1][0, :, :blocks, :blocks]
        heads = (shape.q_heads, shape.q_heads, shape.dim)
        wrapper.plan(mask, sizes, sizes, *heads, q_data_type=q.dtype, sm_scale=prompt.scale)
        return wrapper.run(q, k, v).transpose(0, 1)

    return run


TABLE = (
    Implementation("fa3", fa3, op=DENSE),
    Implementation("flashinfer", flashinfer, op=DENSE),
    Implementation(OURS, anchor, "theta", (4.0, 6.0, 8.0, 10.0, 12.0, 14.0)),
    Implementation("flexprefill", flexprefill, "gamma", (0.8, 0.9, 0.95, 0.98)),
    Implementation("xattention", xattention, "threshold", (0.7, 0.8, 0.9, 0.95)),
)


@dataclass(frozen=True)
class Plan:
    """One row to measure: an implementation with a value of its setting."""

    implementation: Implementation
    value: float

    @property
    def label(self) -> str:
        """Such as ``anchor theta=12``."""
        name, setting = self.implementation.name, self.implementation.setting
        return name if setting is None else f"{name} {setting}={self.value:g}"

    def prepare(self, prompt: Prompt) -> Callable[[], torch.Tensor]:
        """The call, without counting."""
        return partial(self.implementation.prepare(prompt, self.value), None)


def plans(names: Sequence[str], thetas: Sequence[float], table: Sequence[Implementation] = TABLE) -> list[Plan]:
    """What to measure.

    Args:
        names: of peers; this project's op is always there.
        thetas: of this project's op.
        table: all there is.
    """
    found = []
    for one in table:
        if one.peer and one.name not in names:
            continue
        values = (0.0,) if one.setting is None else one.values if one.peer else tuple(thetas)
        found += [Plan(one, value) for value in values]
    return found

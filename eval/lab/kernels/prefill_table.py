"""The table of ``eval.lab.bench_prefill``: who does the attention of a prefill, this project and its peers.

FA3 and FlashInfer prefill chunk by chunk over pages, as a server does; ``fa3-contiguous`` in one piece without pages,
which is the best that FA3 can do. So do the sparse peers, FlexPrefill and XAttention as minference 0.1.6 has them, and
FlashInfer's block-sparse attention over the best blocks that there are (`eval.lab.kernels.prefill_blocks`). XAttention
asks for a kernel that minference does not bring; its blocks are attended to by FlexPrefill's. What a server does once
for all layers (plans) is done beforehand and not timed; what a method does in every layer is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from eval.lab.kernels import prefill_blocks
from eval.lab.kernels.kernel_attention import PLAN_BYTES, WORKSPACE_BYTES
from eval.lab.kernels.prefill_inputs import Prompt
from sglang_sparse_kernels import skip_softmax_prefill
from sglang_sparse_kernels.anchor_prefill import anchor_prefill, make_plan
from sglang_sparse_kernels.skip_softmax_prefill import Span

DENSE, SPARSE = "dense_prefill", "sparse_prefill"
# Fills the prompt's output or returns another one; what counts pairs of query and key adds them to ``stats``, int64
# ``[chunks, 2]``: those attended to, and all.
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
        keeps: whether a higher value leaves less out.
    """

    name: str
    prepare: Callable[[Prompt, float], Prefill]
    setting: str | None = None
    values: tuple[float, ...] = ()
    op: str = SPARSE
    keeps: bool = True

    @property
    def peer(self) -> bool:
        """Whether it is somebody else's."""
        return all(self is not own for own in OWN)


def anchor(prompt: Prompt, theta: float) -> Prefill:
    """This project's op, chunk by chunk over pages."""
    shape, device = prompt.shape, prompt.q.device
    cache = (prompt.k_pages.flatten(0, 1), prompt.v_pages.flatten(0, 1))
    thetas = torch.tensor([theta], device=device)
    plans = [make_plan([a], [b - a], shape.block_size, shape.step, device) for a, b in shape.chunks]

    def run(stats: torch.Tensor | None) -> torch.Tensor:
        for place, ((a, b), plan) in enumerate(zip(shape.chunks, plans, strict=True)):
            pages = (prompt.page_table, plan, thetas, shape.page_size, prompt.scale)
            counts = None if stats is None else stats[place]
            anchor_prefill(prompt.q[a:b], *cache, *pages, out=prompt.out[a:b], stats=counts)
        return prompt.out

    return run


def skip_softmax(prompt: Prompt, factor: float) -> Prefill:
    """This project's other op, likewise."""
    shape, device = prompt.shape, prompt.q.device
    cache = (prompt.k_pages.flatten(0, 1), prompt.v_pages.flatten(0, 1))
    factors = torch.tensor([factor], device=device)
    plans = [skip_softmax_prefill.make_plan([Span(0, a, b)], 1, device) for a, b in shape.chunks]

    def run(stats: torch.Tensor | None) -> torch.Tensor:
        for place, ((a, b), plan) in enumerate(zip(shape.chunks, plans, strict=True)):
            pages = (prompt.page_table, plan, factors, shape.page_size, prompt.scale)
            # Behind the pairs the op counts blocks.
            counts = None if stats is None else torch.zeros(4, dtype=torch.int64, device=device)
            out = prompt.out[a:b]
            skip_softmax_prefill.skip_softmax_prefill(prompt.q[a:b], *cache, *pages, out=out, stats=counts)
            if stats is not None and counts is not None:
                stats[place] += counts[:2]
        return prompt.out

    return run


def fa3(prompt: Prompt, _: float) -> Prefill:
    """FA3, chunk by chunk over pages."""
    library, shape = importlib.import_module("sgl_kernel.flash_attn"), prompt.shape
    ends = [torch.tensor([b], dtype=torch.int32, device=prompt.q.device) for _, b in shape.chunks]
    starts = [torch.tensor([0, b - a], dtype=torch.int32, device=prompt.q.device) for a, b in shape.chunks]

    def run(_: torch.Tensor | None) -> torch.Tensor:
        for (a, b), end, start in zip(shape.chunks, ends, starts, strict=True):
            library.flash_attn_with_kvcache(
                prompt.q[a:b],
                prompt.k_pages,
                prompt.v_pages,
                page_table=prompt.page_table,
                cache_seqlens=end,
                cu_seqlens_q=start,
                max_seqlen_q=b - a,
                softmax_scale=prompt.scale,
                causal=True,
                out=prompt.out[a:b],
            )
        return prompt.out

    return run


def fa3_contiguous(prompt: Prompt, _: float) -> Prefill:
    """FA3 over the whole prompt at once, keys and values in one piece."""
    library, length = importlib.import_module("sgl_kernel.flash_attn"), prompt.shape.length
    ends = torch.tensor([0, length], dtype=torch.int32, device=prompt.q.device)
    sizes = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length, "max_seqlen_k": length}
    inputs = (prompt.q, prompt.k, prompt.v)
    return lambda _: library.flash_attn_varlen_func(*inputs, **sizes, softmax_scale=prompt.scale, causal=True)


def flashinfer(prompt: Prompt, _: float) -> Prefill:
    """FlashInfer, chunk by chunk over pages."""
    library, shape, device = importlib.import_module("flashinfer"), prompt.shape, prompt.q.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def planned(a: int, b: int) -> Any:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        # A plan of its own for each chunk: the wrappers share the other workspace alone.
        wrapper.reset_workspace_buffer(workspace, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device))
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
            wrapper.run(prompt.q[a:b], (prompt.k_pages, prompt.v_pages), out=prompt.out[a:b])
        return prompt.out

    return run


def minference(module: str) -> ModuleType:
    """A module of minference without what its packages import: a compiled extension that these do not use.

    Raises:
        ImportError: it is not installed.
    """
    if "minference" not in sys.modules:
        spec = importlib.util.find_spec("minference")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("minference is not installed")
        (folder,) = spec.submodule_search_locations
        for package in ("", ".modules", ".ops"):
            stub = ModuleType(f"minference{package}")
            stub.__path__ = [folder + package.replace(".", "/")]
            sys.modules[stub.__name__] = stub
    return importlib.import_module(f"minference.modules.{module}")


def flexprefill(prompt: Prompt, gamma: float) -> Prefill:
    """FlexPrefill with its own tau of .1."""
    library = minference("flexprefill")
    q, k, v = (part[None] for part in (prompt.q, prompt.k, prompt.v))
    return lambda _: library.flex_prefill_attention(q, k, v, gamma, 0.1, softmax_scale=prompt.scale)[0]


def called_h100(properties: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.cuda.get_device_properties`` of a device with another name; whoever asks for the rest of them gets it."""

    def named(*device: Any) -> Any:
        found = properties(*device)
        known = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        return SimpleNamespace(**known | {"name": "NVIDIA H100"})

    return named


def xattention(prompt: Prompt, threshold: float) -> Prefill:
    """XAttention with its own stride of 8."""
    library, attention = minference("xattention"), minference("flexprefill")
    shape = prompt.shape
    size, blocks = shape.block_size, -(-shape.length // shape.block_size)
    q, k, v = (part[None] for part in (prompt.q, prompt.k, prompt.v))
    queries = q.transpose(1, 2)
    keys = k.repeat_interleave(shape.q_heads // shape.kv_heads, 2).transpose(1, 2)
    settings = {"block_size": size, "stride": 8, "norm": 1, "threshold": threshold, "select_mode": "inverse"}
    settings |= {"use_triton": True, "causal": True, "chunk_size": 2048, "kdb": 1}
    # It asks for the name, and takes its Triton kernels on an A100 and an H100 only; the other way masks too much.
    known = mock.patch.object(torch.cuda, "get_device_properties", called_h100(torch.cuda.get_device_properties))

    def run(_: torch.Tensor | None) -> torch.Tensor:
        with known:
            mask = library.xattn_estimate(queries, keys, **settings)[1][0, :, :blocks, :blocks]
        chosen = [[head.tril().flatten().nonzero().flatten() for head in mask]]
        return attention.triton_block_wise_attention(q, k, v, chosen, size, softmax_scale=prompt.scale)[0]

    return run


ANCHOR = Implementation("anchor", anchor, "theta", (4.0, 6.0, 8.0, 10.0, 12.0, 14.0))
SKIP_SOFTMAX = Implementation(
    "skip_softmax", skip_softmax, "threshold_scale_factor", (10.0, 100.0, 1000.0, 10000.0), keeps=False
)
OWN = (ANCHOR, SKIP_SOFTMAX)
TABLE = (
    Implementation("fa3", fa3, op=DENSE),
    Implementation("fa3-contiguous", fa3_contiguous, op=DENSE),
    Implementation("flashinfer", flashinfer, op=DENSE),
    *OWN,
    Implementation("flexprefill", flexprefill, "gamma", (0.8, 0.9, 0.95, 0.98)),
    Implementation("xattention", xattention, "threshold", (0.7, 0.8, 0.9, 0.95)),
    Implementation("flashinfer-blocks", prefill_blocks.flashinfer_blocks, "sparsity", (0.95, 0.89, 0.8, 0.7)),
)


@dataclass(frozen=True)
class Plan:
    """One row to measure: an implementation with a value of its setting, which may be there for a sparsity."""

    implementation: Implementation
    value: float
    target_sparsity: float | None = None

    @property
    def label(self) -> str:
        """Such as ``anchor theta=12``."""
        name, setting = self.implementation.name, self.implementation.setting
        return name if setting is None else f"{name} {setting}={self.value:g}"

    def prepare(self, prompt: Prompt) -> Callable[[], torch.Tensor]:
        """The call, without counting."""
        return partial(self.implementation.prepare(prompt, self.value), None)


def plans(names: Sequence[str], own: Sequence[Plan], table: Sequence[Implementation] = TABLE) -> list[Plan]:
    """Return the plans to measure.

    Args:
        names: of peers.
        own: of this project's op.
        table: all there is.
    """
    peers = [one for one in table if one.peer and one.name in names]
    return [*own, *(Plan(one, value) for one in peers for value in (one.values if one.setting else (0.0,)))]

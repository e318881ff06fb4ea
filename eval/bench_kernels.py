"""Times the kernels of one sparse decode step against dense decode attention.

``python -m eval.bench_kernels --out results.jsonl --shapes 8x64k,1x128k,1x32k``

Every implementation is captured as a CUDA graph of several layers, each layer with caches of its own, so that no
layer finds its inputs in the L2 cache. The graphs are replayed in turn (A/B/A/B); a row holds the median time of a
layer and the spread between the 10th and the 90th percentile. Bandwidth counts each byte that must be read once.
"""

import argparse
import importlib.metadata
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eval.live.record import git_revision
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import update_page_summary
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.sparse_decode import reference, sparse_decode
from sglang_sparse_kernels.testing import PagedBatch, paged_batch, random_cache, seeded

PEAK_GBPS = 4800
MIN_LAYERS = 40
L2_MULTIPLE = 3
ALL_THREE = ("page_score", "page_topk", "sparse_decode")


@dataclass(frozen=True)
class Shape:
    """One decode step: ``batch`` rows of ``length`` tokens, by default an 8B model's attention."""

    batch: int
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 16
    active_ratio: float = 0.1
    n_min: int = 16
    summary_dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """As given on the command line."""
        return f"{self.batch}x{self.length // 1024}k" if self.length % 1024 == 0 else f"{self.batch}x{self.length}"

    @property
    def n_pages(self) -> int:
        """Pages of a row."""
        return math.ceil(self.length / self.page_size)

    @property
    def n_select(self) -> int:
        """Pages that a row selects."""
        return min(self.n_pages, max(self.n_min, math.ceil(self.n_pages * self.active_ratio)))

    def num_bytes(self, op: str) -> int:
        """Bytes that an operation must move: each input read once, each output written once."""
        heads = self.batch * self.kv_heads
        page = self.page_size * 2 * self.dim * 2  # keys and values, bfloat16
        sizes = {
            "dense_decode": heads * self.n_pages * page,
            "page_summary": heads * page // 2,
            "page_score": heads * self.n_pages * (2 * self.dim * self.summary_dtype.itemsize + 4),
            "page_topk": heads * 4 * (2 * self.n_pages + self.n_select),
            "sparse_decode": heads * self.n_select * page,
        }
        return sizes[op] if op in sizes else sum(sizes[part] for part in ALL_THREE)


class Layer:
    """The inputs of one layer and the buffers that its kernels write."""

    def __init__(self, shape: Shape, batch: PagedBatch, generator: torch.Generator) -> None:
        rows, heads, dim, device = shape.batch, shape.kv_heads, shape.dim, generator.device
        cache = (batch.num_pages, shape.page_size, heads, dim)
        self.pages = tuple(random_cache(cache, torch.bfloat16, device, generator) for _ in range(2))
        self.k_cache, self.v_cache = (pages.flatten(0, 1) for pages in self.pages)
        self.summary = torch.zeros(batch.num_pages, heads, 2, dim, device=device).to(shape.summary_dtype)
        last_slots = torch.arange(1, batch.num_pages + 1, device=device) * shape.page_size - 1
        update_page_summary(self.k_cache, self.summary, last_slots, shape.page_size)
        self.q = torch.randn(rows, shape.q_heads, dim, generator=generator, device=device).bfloat16()
        self.scores = torch.empty(rows, heads, shape.n_pages, device=device)
        self.indices = torch.empty(rows, heads, shape.n_select, dtype=torch.int32, device=device)
        self.counts = torch.empty(rows, heads, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.q)


class Step:
    """The layers of one shape and the operations on them."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        generator = seeded(device, 0)
        self.batch: PagedBatch = paged_batch((shape.length,) * shape.batch, shape.page_size, device, generator)
        self.n_select = torch.full((shape.batch,), shape.n_select, dtype=torch.int32, device=device)
        self.sm_scale = shape.dim**-0.5
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        num_layers = max(2, math.ceil(L2_MULTIPLE * l2_bytes / shape.num_bytes("all three")))
        self.layers = [Layer(shape, self.batch, generator) for _ in range(num_layers)]

    def summarise(self, layer: Layer) -> None:
        """Summarise the newest page of every row."""
        update_page_summary(layer.k_cache, layer.summary, self.batch.last_slots, self.shape.page_size)

    def score(self, layer: Layer) -> None:
        """Score every page."""
        page_score(layer.q, layer.summary, self.batch.page_table, self.batch.n_pages, layer.scores)

    def select(self, layer: Layer) -> None:
        """Select the highest pages."""
        out = (layer.indices, layer.counts)
        page_topk(layer.scores, self.batch.page_table, self.batch.n_pages, self.n_select, self.shape.n_select, out)

    def attend(self, layer: Layer, selection: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Attend to the selected pages, or to the given indices and counts."""
        pages = selection or (layer.indices, layer.counts)
        slots = (self.batch.last_slots, self.shape.page_size)
        sparse_decode(layer.q, layer.k_cache, layer.v_cache, *pages, *slots, self.sm_scale, out=layer.out)

    def all_three(self, layer: Layer) -> None:
        """Score, select and attend."""
        self.score(layer)
        self.select(layer)
        self.attend(layer)

    def relative_error(self) -> float:
        """Relative L2 error of a whole step against float32 attention over the same selected pages."""
        layer = self.layers[0]
        self.all_three(layer)
        expected = torch.empty_like(layer.out, dtype=torch.float32)
        arguments = (layer.k_cache, layer.v_cache, layer.indices, layer.counts, self.batch.last_slots)
        reference.sparse_decode(layer.q.float(), *arguments, self.shape.page_size, self.sm_scale, 1.0, 1.0, expected)
        return ((layer.out.float() - expected).norm() / expected.norm()).item()


def capture(run: Callable[[Layer], object], layers: list[Layer]) -> Callable[[], float]:
    """Capture ``run`` over at least ``MIN_LAYERS`` layers; the result replays and returns microseconds per layer."""
    order = [layers[i % len(layers)] for i in range(max(MIN_LAYERS, len(layers)))]
    for layer in layers:
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in order:
            run(layer)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(order)

    return replay


def dense_baseline(step: Step) -> tuple[str, Callable[[Layer], object]]:
    """The strongest dense decode attention that is installed."""
    for find in (_flash_attention_3, _flashinfer):
        try:
            return find(step)
        except ImportError:
            continue
    every_page = step.batch.page_table[:, None].expand(-1, step.shape.kv_heads, -1).contiguous()
    counts = step.batch.n_pages[:, None].expand(-1, step.shape.kv_heads).contiguous()
    return "sparse_decode over all pages", lambda layer: step.attend(layer, (every_page, counts))


def _flash_attention_3(step: Step) -> tuple[str, Callable[[Layer], object]]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    lengths = torch.full((step.shape.batch,), step.shape.length, dtype=torch.int32, device=step.n_select.device)
    table: dict[str, Any] = {"page_table": step.batch.page_table, "cache_seqlens": lengths}
    return "fa3", lambda layer: flash_attn_with_kvcache(
        layer.q[:, None], layer.pages[0], layer.pages[1], softmax_scale=step.sm_scale, causal=True, **table
    )


def _flashinfer(step: Step) -> tuple[str, Callable[[Layer], object]]:
    import flashinfer

    shape, batch = step.shape, step.batch
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=step.n_select.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=workspace.device) * shape.n_pages
    last_page = torch.full_like(batch.n_pages, (shape.length - 1) % shape.page_size + 1)
    heads = (shape.q_heads, shape.kv_heads, shape.dim, shape.page_size)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(starts, batch.page_table.flatten(), last_page, *heads, **types, sm_scale=step.sm_scale)
    return "flashinfer", lambda layer: wrapper.run(layer.q, (layer.pages[0], layer.pages[1]))


def measure(step: Step, rounds: int) -> list[dict[str, Any]]:
    """One row per operation, and the dense baseline first, replayed in turn; times are microseconds per layer."""
    plan = [
        ("dense_decode", *dense_baseline(step)),
        ("page_summary", "triton", step.summarise),
        ("page_score", "triton", step.score),
        ("page_topk", "triton", step.select),
        ("sparse_decode", "triton", step.attend),
        ("score+topk+decode", "triton", step.all_three),
    ]
    replays = [capture(run, step.layers) for _, _, run in plan]
    # The first two rounds warm the clocks up.
    times = [[replay() for replay in replays] for _ in range(rounds + 2)][2:]
    return [
        measured_row(step, op, implementation, list(column))
        for (op, implementation, _), column in zip(plan, zip(*times, strict=True), strict=True)
    ]


def measured_row(step: Step, op: str, implementation: str, times: list[float]) -> dict[str, Any]:
    """One row of the results."""
    shape = {**asdict(step.shape), "summary_dtype": str(step.shape.summary_dtype).removeprefix("torch.")}
    settings = f"{step.shape.name}/p{step.shape.page_size}/r{step.shape.active_ratio}/{shape['summary_dtype']}"
    median, deciles, size = statistics.median(times), statistics.quantiles(times, n=10), step.shape.num_bytes(op)
    return {
        "id": f"kernels/{settings}/{op}/{implementation}",
        "op": op,
        "implementation": implementation,
        "shape": shape,
        "us": round(median, 3),
        "spread": round(deciles[-1] - deciles[0], 3),
        "bytes": size,
        "gbps": round(size / median / 1e3, 1),
        "relative_l2": step.relative_error() if op in ("sparse_decode", "score+topk+decode") else None,
        **environment(),
    }


def environment() -> dict[str, str | None]:
    """Versions and device of this run."""
    packages = ("torch", "triton", "sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python")
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    versions = {package: installed.get(package) for package in packages}
    return {**versions, "device": torch.cuda.get_device_name()}


def print_table(step: Step, rows: list[dict[str, Any]]) -> None:
    """Times and bandwidths of one shape."""
    print(f"\n{step.shape.name}, {len(step.layers)} layers of inputs, ceiling {PEAK_GBPS} GB/s")
    print(f"{'op':20} {'implementation':30} {'us':>9} {'spread':>8} {'GB/s':>7} {'of peak':>8} {'x dense':>8}")
    for row in rows:
        ratios = f"{row['gbps'] / PEAK_GBPS:8.0%} {rows[0]['us'] / row['us']:8.2f}"
        print(f"{row['op']:20} {row['implementation']:30}", end=" ")
        print(f"{row['us']:9.2f} {row['spread']:8.2f} {row['gbps']:7.0f} {ratios}")


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """``8x64k,1x100`` is a batch of 8 rows of 65,536 tokens, then one row of 100 tokens."""
    parts = [part.replace("k", "*1024").split("x") for part in text.split(",")]
    return [(int(batch), math.prod(int(factor) for factor in tokens.split("*"))) for batch, tokens in parts]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines file to append the rows to")
    parser.add_argument("--shapes", type=parse_shapes, default=parse_shapes("8x64k,1x128k,1x32k"))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--active-ratio", type=float, default=0.1)
    parser.add_argument("--n-min", type=int, default=16)
    parser.add_argument("--summary-dtype", choices=["bfloat16", "float8_e4m3fn"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    return parser.parse_args()


def main() -> None:
    """Measure every shape."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels measures a GPU, and torch finds none")
    revision = arguments.revision or git_revision()
    options = {name: getattr(arguments, name) for name in ("page_size", "active_ratio", "n_min")}
    options["summary_dtype"] = getattr(torch, arguments.summary_dtype)
    for batch, length in arguments.shapes:
        shape = Shape(batch, length, **options)
        step = Step(shape, "cuda")
        rows = measure(step, arguments.rounds)
        print_table(step, rows)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.writelines(json.dumps(row | {"revision": revision}) + "\n" for row in rows)


if __name__ == "__main__":
    main()

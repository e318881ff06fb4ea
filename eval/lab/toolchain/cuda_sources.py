"""The CUDA C++ sources of this project's kernels that are compiled for a GPU, each with a launch's possible defines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sglang_sparse_kernels.block_mass import cuda as block_mass
from sglang_sparse_kernels.block_topp import cuda as block_topp
from sglang_sparse_kernels.common.launch import Properties
from sglang_sparse_kernels.index_topk import cuda as index_topk
from sglang_sparse_kernels.kt_select import cuda as kt_select
from sglang_sparse_kernels.page_score import cuda as page_score
from sglang_sparse_kernels.page_topk import cuda as page_topk
from sglang_sparse_kernels.page_vote import cuda as page_vote
from sglang_sparse_kernels.skip_softmax_decode import cuda as skip_softmax_decode
from sglang_sparse_kernels.sparse_decode import cuda as sparse_decode

FLOAT8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
# The first GPUs with clusters of blocks.
CLUSTERS = (9, 0)


@dataclass(frozen=True)
class Build:
    """A source, with names and values for the preprocessor, and the element types that it reads."""

    source: Path
    defines: dict[str, int]
    dtypes: tuple[torch.dtype, ...] = ()


def _block_mass(gpu: Properties) -> Iterator[Build]:
    for heads in (16, 32, 64, 128):
        shape = block_mass.shape_of(heads)
        yield Build(block_mass.SOURCE, shape.defines(BF16), (BF16,))
        for cluster in (1, 8) if gpu.capability >= CLUSTERS else (1,):
            yield Build(block_mass.MERGE, shape.merge_defines(cluster))


def _block_topp(_: Properties) -> Iterator[Build]:
    for width in (4096, 8192, 16384, 32768):
        yield Build(block_topp.SOURCE, block_topp.defines(width))


def _index_topk(gpu: Properties) -> Iterator[Build]:
    found = {
        index_topk.shape_of(width, queries, topk, gpu.processors, gpu.capability >= CLUSTERS)
        for width in (8192, 131072, 1 << 20)
        for queries in (1, 32, 8192)
        for topk in (2048, 4096)
    }
    for shape in sorted(found, key=str):
        yield Build(index_topk.SOURCE, shape.defines)


def _kt_select(gpu: Properties) -> Iterator[Build]:
    for pairs in (8, 32, 256):
        config = kt_select.config_of(pairs, gpu.processors, gpu.capability >= CLUSTERS)
        for topr in (128, 32):
            yield Build(kt_select.SOURCE, kt_select.defines(128, 4, BF16, topr, config), (BF16,))


def _page_score(_: Properties) -> Iterator[Build]:
    for dim in (64, 128):
        for summary in (BF16, FLOAT8):
            yield Build(page_score.SOURCE, page_score.defines(dim, 4, BF16, summary), (BF16, summary))


def _page_vote(_: Properties) -> Iterator[Build]:
    for dim, group in ((64, 7), (128, 4), (128, 8), (256, 8)):
        for count in (1, 2, 6, 8):
            yield Build(page_vote.SOURCE, page_vote.defines(dim, group, count, BF16), (BF16, FLOAT8))
    yield Build(page_vote.SOURCE, page_vote.defines(128, 4, 6, torch.float16), (torch.float16, FLOAT8))


def _page_topk(gpu: Properties) -> Iterator[Build]:
    processors = gpu.processors if gpu.capability >= CLUSTERS else 0
    found = {page_topk.shape_of(width, rows, processors) for width in (2048, 8192, 32768) for rows in (8, 256)}
    for shape in sorted(found, key=str):
        for voters in (0, 4, 7):
            yield Build(page_topk.SOURCE, replace(shape, voters=voters).defines)


def _skip_softmax_decode(_: Properties) -> Iterator[Build]:
    for config in skip_softmax_decode.CONFIGS:
        for dim, group in ((64, 4), (128, 4), (128, 8)):
            yield Build(skip_softmax_decode.SOURCE, skip_softmax_decode.defines(dim, group, BF16, config), (BF16,))


def _sparse_decode(gpu: Properties) -> Iterator[Build]:
    for config in sparse_decode.CONFIGS:
        if config.cluster == 1 or gpu.capability >= CLUSTERS:
            for group in (4, 8):
                yield Build(sparse_decode.SOURCE, sparse_decode.defines(128, group, BF16, config), (BF16,))


BUILDS: dict[str, Callable[[Properties], Iterator[Build]]] = {
    "block_mass": _block_mass,
    "block_topp": _block_topp,
    "index_topk": _index_topk,
    "kt_select": _kt_select,
    "page_score": _page_score,
    "page_topk": _page_topk,
    "page_vote": _page_vote,
    "skip_softmax_decode": _skip_softmax_decode,
    "sparse_decode": _sparse_decode,
}

"""CUDA graphs of lossless decoding: one set for the verification, and one for decode steps.

With a speculative algorithm SGLang records its decode graphs at the width of a verification. Here a round has decode
steps besides: drafts, which run sparse, and the step of a batch that drafts nothing, which runs dense. They have a
runner of their own with all variants, as on a server without speculation, over the same attention backend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.common import get_available_gpu_memory

from sglang_sparse.attention.cuda_graphs import withheld
from sglang_sparse.config import arguments
from sglang_sparse.scheduler.speculation.algorithm import SparseSelf

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput


class VerifyGraphs(DecodeCudaGraphRunner):
    """The runner of the verification, dense alone."""

    def __init__(self, model_runner: ModelRunner, **options: object):
        with withheld(model_runner.model_config.hf_config):
            super().__init__(model_runner, **options)  # type: ignore[arg-type]

    def get_spec_info(self, num_tokens: int) -> DFlashVerifyInput:
        """Return the input of a recording: chains, without a mask."""
        return _recorded_input(self.captured_req_width)

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        """Whether a pass replays one of these graphs; never a decode step, whose width SGLang does not compare."""
        return forward_batch.forward_mode.is_target_verify() and bool(super().can_run_graph(forward_batch))


def _recorded_input(width: int) -> DFlashVerifyInput:
    # Attention reads the width alone; the rest is the batch's.
    return DFlashVerifyInput(None, None, width, capture_hidden_mode=CaptureHiddenMode.NULL)  # type: ignore[arg-type]


def dummy_input(found: SpecInput | None, algorithm: object, _: object, width: int, *__: object) -> SpecInput | None:
    """After ``create_dummy_verify_input``: that of lossless decoding, which SGLang's warm-up passes need."""
    return _recorded_input(width) if isinstance(algorithm, SparseSelf) else found


def verify_runner(found: type[DecodeCudaGraphRunner], runner: ModelRunner) -> type[DecodeCudaGraphRunner]:
    """After ``ModelRunner._decode_cuda_graph_runner_cls``: the runner of the verification, for lossless decoding."""
    return VerifyGraphs if arguments.drafts_itself(arguments.of(runner.server_args)) else found


class DecodeGraphs:
    """The graphs of decode steps, recorded after those of the verification.

    Args:
        runner: the model's; its attention backend has the variants.

    Attributes:
        gigabytes: device memory that they took.
        seconds: time that their recording took.
    """

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        before, start = get_available_gpu_memory(runner.device, runner.gpu_id), time.perf_counter()
        algorithm = runner.spec_algorithm
        # The algorithm alone decides on the width and the mode of a recording.
        runner.spec_algorithm = SpeculativeAlgorithm.NONE
        try:
            self._graphs = DecodeCudaGraphRunner(runner)
        finally:
            runner.spec_algorithm = algorithm
        self.gigabytes = before - get_available_gpu_memory(runner.device, runner.gpu_id)
        self.seconds = time.perf_counter() - start

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Replay these graphs in decode steps of the block, in place of the verification's."""
        verification, self._runner.decode_cuda_graph_runner = self._runner.decode_cuda_graph_runner, self._graphs
        try:
            yield
        finally:
            self._runner.decode_cuda_graph_runner = verification

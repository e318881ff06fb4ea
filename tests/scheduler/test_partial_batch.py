"""Tests of the passes of a step: positions and images for models with M-RoPE, and the counts of tokens."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.mm_utils import extend_mrope_positions_for_retracted_request

from sglang_sparse.scheduler.partial_batch import Span, decode_view, extend_view, position_info

# Prompts of a text and of an image of 3 x 2 x 1 tokens between two texts, and the tokens generated behind them.
TEXT, IMAGE, OUTPUT = 5, 11, 9
BEFORE = [*range(3)]
AFTER = [*range(6, 8)]
ROTARY = torch.tensor(
    [[*BEFORE, *[3] * 6, *AFTER], [*BEFORE, 3, 3, 4, 4, 5, 5, *AFTER], [*BEFORE, 3, 4, 3, 4, 3, 4, *AFTER]]
)
SHIFT = 8 - IMAGE


def request(row: int, prompt: int, media: Any = None) -> Any:
    return SimpleNamespace(
        rid=str(row),
        kv=SimpleNamespace(req_pool_idx=row),
        origin_input_ids=[7] * prompt,
        output_ids=[*range(100, 100 + OUTPUT)],
        multimodal_inputs=media,
    )


def decode_batch() -> Any:
    media = SimpleNamespace(mrope_positions=ROTARY, mrope_position_delta=torch.tensor([[SHIFT]]))
    requests = [request(0, TEXT), request(1, IMAGE, media), request(2, TEXT)]
    lengths = torch.tensor([len(one.origin_input_ids) + OUTPUT for one in requests])
    return SimpleNamespace(
        reqs=requests,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(3 * 32, dtype=torch.int32).view(3, 32)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        orig_seq_lens=lengths,
        req_pool_indices=torch.arange(3),
        out_cache_loc=torch.arange(3),
        input_ids=torch.arange(3),
        mamba_track_mask_cpu=None,
        multimodal_inputs=[one.multimodal_inputs for one in requests],
        global_num_tokens=None,
        can_run_decode_cuda_graph=True,
    )


def test_generated_tokens_behind_an_image_are_numbered_as_sglang_decodes_them() -> None:
    batch = decode_batch()
    text, shown, _ = batch.reqs
    starts = TEXT + 4, IMAGE + 2
    spans = [Span(text, starts[0], TEXT + OUTPUT), Span(shown, starts[1], IMAGE + OUTPUT)]
    # SGLang drops what it knows of images when a request finishes, and tails are encoded after that.
    shown.multimodal_inputs = None
    view = extend_view(batch, spans)
    assert view.multimodal_inputs is None and batch.multimodal_inputs[1] is not None
    found = position_info(view, mrope=True)
    assert found is not None
    positions, begins, rotary = found
    indices = [*range(starts[0], TEXT + OUTPUT), *range(starts[1], IMAGE + OUTPUT)]
    assert positions.tolist() == indices and begins.tolist() == [0, OUTPUT - 4]
    assert (positions.dtype, begins.dtype, rotary.dtype) == (torch.int64, torch.int32, torch.int64)
    shifts = torch.tensor([0] * (OUTPUT - 4) + [SHIFT] * (OUTPUT - 2))
    assert torch.equal(rotary, (positions + shifts).expand(3, -1))
    # The same as SGLang's for a request that was retracted, whose prompt is what it has so far.
    again = extend_mrope_positions_for_retracted_request(ROTARY, OUTPUT)
    assert torch.equal(rotary[:, OUTPUT - 4 :], again[:, starts[1] :])


def test_sglang_numbers_the_tokens_of_other_passes() -> None:
    batch = decode_batch()
    assert position_info(extend_view(batch, [Span(batch.reqs[0], TEXT, TEXT + 3)]), mrope=False) is None
    assert position_info(decode_view(batch, [0, 2]), mrope=True) is None


def test_rows_of_a_decode_pass_keep_their_images() -> None:
    batch = decode_batch()
    assert decode_view(batch, [1, 2]).multimodal_inputs == [batch.multimodal_inputs[1], None]
    batch.multimodal_inputs = None
    assert decode_view(batch, [1, 2]).multimodal_inputs is None


def test_passes_are_counted_where_sglang_has_counted_the_step_of_one_rank() -> None:
    batch = decode_batch()
    batch.global_num_tokens = batch.global_num_tokens_for_logprob = [3]
    dense = extend_view(batch, [Span(batch.reqs[0], TEXT, TEXT + 4)])
    assert (dense.global_num_tokens, dense.global_num_tokens_for_logprob) == ([4], [1])
    assert dense.is_extend_in_batch and not dense.can_run_decode_cuda_graph
    rest = decode_view(batch, [1, 2])
    assert rest.global_num_tokens == rest.global_num_tokens_for_logprob == [2] and rest.can_run_decode_cuda_graph

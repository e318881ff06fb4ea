"""Gated delta nets on the CPU platform: rows of a pass against each alone, a server against transformers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import by_transformers, random_hybrid
from forked_server import ForkedServer
from server_fixtures import STRICT_MEMORY
from server_requests import RETRACT, assert_nothing_leaked, off, random_prompts
from sglang_cpu_platform import gated_delta

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform stays inactive next to CUDA")

HEADS, VALUES, DIM = 2, 6, 8


def test_a_row_goes_on_behind_its_own_state() -> None:
    """In one pass or several, together with others or alone, by chunks or token by token."""
    torch.manual_seed(0)
    lengths, slots = [150, 64, 1], torch.tensor([3, 0, 2])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q, k = (torch.randn(1, 215, HEADS, DIM) for _ in range(2))
    v, a, b = torch.randn(1, 215, VALUES, DIM), torch.randn(215, VALUES), torch.randn(215, VALUES)
    decay, bias = torch.rand(VALUES).log(), torch.rand(VALUES)
    first, together = torch.randn(2, 4, VALUES, DIM, DIM).unbind()
    together.copy_(first)
    gates = gated_delta.gates(decay, a, b, bias)
    found, _, chunks = gated_delta.extend(
        None, q, k, v, *gates, ssm_states=together, cache_indices=slots, query_start_loc=starts
    )
    assert torch.equal(together[1], first[1])
    packed = torch.cat([part[0].flatten(1) for part in (q, k, v)], 1)
    alone = first.clone()
    for row, length in enumerate(lengths):
        for token in range(length):
            if token % gated_delta.CHUNK == 0:
                torch.testing.assert_close(chunks[0, 0], alone[slots[row]], atol=1e-4, rtol=1e-4)
                chunks = chunks[:, 1:]
            at = int(starts[row]) + token
            one = gated_delta.decode(
                None,
                packed[at : at + 1],
                a[at : at + 1],
                b[at : at + 1],
                A_log=decay,
                dt_bias=bias,
                ssm_states=alone,
                cache_indices=slots[row : row + 1],
                num_v_heads=VALUES,
                head_v_dim=DIM,
            )
            torch.testing.assert_close(found[0, at], one[0, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_a_server_agrees_with_transformers(tmp_path: Path) -> None:
    """Prompts in chunks, follow-ups that hit answers, and requests that are retracted again and again."""
    likely = by_transformers(random_hybrid(tmp_path / "model"))
    flags = ("--page-size=16", "--chunked-prefill-size=256", "--mamba-track-interval=64")
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 90}
    asked = {"sampling_params": params, "return_logprob": True}
    with ForkedServer(tmp_path / "model", *flags, log_path=tmp_path / "log", env=STRICT_MEMORY | RETRACT) as server:
        prompts = random_prompts(1, (40, 300, 555), 1000)
        for hits in ([0, 0, 0], [64, 384, 640]):
            with ThreadPoolExecutor(3) as pool:
                answers = [*pool.map(lambda prompt: server.generate(input_ids=prompt, **asked), prompts)]
            for prompt, answer, hit in zip(prompts, answers, hits, strict=True):
                assert off(answer, likely(prompt, answer["output_ids"])) < 1e-4
                assert answer["meta_info"]["cached_tokens"] >= hit
            prompts = [[*prompt, *answer["output_ids"], 20] for prompt, answer in zip(prompts, answers, strict=True)]
        assert_nothing_leaked(server)

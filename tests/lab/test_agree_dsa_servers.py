"""Both servers of ``eval.lab.agree_dsa`` with our reference on the CPU: the way of what is compared, end to end."""

from pathlib import Path

import pytest
import torch
from forked_server import ForkedServer

from eval.lab import agree_dsa
from eval.lab.agree_dsa import SIZES, parse
from eval.lab.agreement import dsa_servers
from eval.lab.agreement.agreement import NATIVE, PORTABLE
from eval.live.record import read_finished

# Two servers for one command: what they are asked is tested without them, see tests/eval.
pytestmark = [pytest.mark.soak, pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")]

TINY = {**SIZES, "vocab_size": 300, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
TINY |= {"q_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "index_n_heads": 4}
TOKENS, LENGTH, TOPK, LAYERS = 4, 300, 64, 2


def test_a_reference_agrees_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsa_servers, "ServerProcess", ForkedServer)
    sizes = f"--prompts 2 --length {LENGTH} --tokens {TOKENS} --chunk 128 --layers {LAYERS} --topk {TOPK} --replays 3"
    args = parse(["--out", str(tmp_path / "out.jsonl"), *sizes.split()])
    arms = dict.fromkeys((NATIVE, PORTABLE), PORTABLE)
    assert agree_dsa.run(args, TINY, arms, lambda: None) == 0
    header, *rows = read_finished(args.out)
    assert header["command"] == "eval.lab.agree_dsa" and header["sizes"]["index_topk"] == TOPK and header["revision"]
    assert [row["arm"] for row in rows if row["kind"] == "server"] == [NATIVE, PORTABLE]
    assert not [row for row in rows if row["kind"] == "wrong"]
    summary = [row for row in rows if row["kind"] == "summary"]
    assert all(row["agrees"] for row in summary)
    selections = [row for row in summary if row["of"] == "selection"]
    assert len(selections) == 2 * 2 * LAYERS
    # Of a prompt all tokens but the first; of the output all but the first one's, which prefill chooses for.
    queries = {"prefill": 2 * (LENGTH - TOPK), "decode": 2 * (TOKENS - 1)}
    for row in selections:
        assert row["queries"] in (queries[row["phase"]], queries[row["phase"]] + 2 * (row["phase"] == "decode"))
        assert row["overlap_least"] == 1 and row["other_keys"] == 0
    distributions = [row for row in summary if row["of"] == "distribution"]
    assert [row["queries"] for row in distributions] == [2 * TOKENS] * 2
    assert all(row["kl_max"] < 1e-6 and row["same_best"] == 1 for row in distributions)

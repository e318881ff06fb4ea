"""Tests of chains of drafts on the CPU platform: slots, links and acceptance equal those of SGLang's own kernels."""

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative import spec_tree
from sglang_cpu_platform import speculation

ROWS, WIDTH = 5, 4
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform stays inactive next to CUDA")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's module with its Triton kernels, interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted_spec_tree", spec_tree.__file__)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_slots_follow_each_rows_tokens() -> None:
    table = torch.arange(60, dtype=torch.int32).view(4, 15)
    rows, starts = torch.tensor([3, 0, 2]), torch.tensor([4, 0, 11])
    expected = [[table[row, start + step].item() for step in range(3)] for row, start in ((3, 4), (0, 0), (2, 11))]
    slots = torch.empty(9, dtype=torch.int64)
    speculation.draft_slots(rows, table, starts, slots, 1, 3, positions=None)
    assert slots.view(3, 3).tolist() == expected
    asked = {"req_pool_indices": rows, "req_to_token": table, "start_offset": starts}
    found = speculation.extend_slots(**asked, draft_token_num=3, end_offset=starts + 3, batch_size=3)
    assert found.dtype == torch.int64 and found.tolist() == slots.tolist()


def test_a_chain_is_linked_as_sglangs_kernel_links_it(kernels: ModuleType) -> None:
    lengths = torch.tensor([700, 33, 1, 0, 64])
    parents = torch.tensor([[-1, 0, 1][: WIDTH - 1]]).expand(ROWS, -1).contiguous()
    chosen = torch.arange(WIDTH - 1).expand(ROWS, -1).contiguous()

    def buffers() -> list[torch.Tensor]:
        links = [torch.full((ROWS, WIDTH), -1, dtype=torch.int64) for _ in range(3)]
        return [
            torch.ones(ROWS * WIDTH * WIDTH, dtype=torch.bool),
            torch.zeros(ROWS * WIDTH, dtype=torch.int64),
            *links,
        ]

    found, expected = buffers(), buffers()
    speculation.build_chain(parents, chosen, lengths, *found, 1, WIDTH - 1, WIDTH, 1)
    mode = spec_tree.TreeMaskMode.QLEN_ONLY
    kernels.sgl_build_tree_kernel_triton(parents, chosen, lengths, *expected, 1, WIDTH - 1, WIDTH, mode)
    for own, theirs in zip(found[1:], expected[1:], strict=True):
        assert own.tolist() == theirs.tolist()


def test_numbers_are_those_of_a_chain() -> None:
    def completed(**given: Any) -> tuple[Any, ...]:
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        args = SimpleNamespace(**{"speculative_algorithm": "EAGLE3", **dict.fromkeys(names), **given})
        speculation.use_chains(args)
        return tuple(getattr(args, name) for name in names)

    assert completed() == completed(speculative_algorithm="standalone") == (3, 1, 4)
    assert completed(speculative_num_steps=5, speculative_num_draft_tokens=9) == (5, 1, 6)
    assert completed(speculative_algorithm="SPARSE_SELF") == (None, None, None)
    with pytest.raises(ValueError, match=r"--speculative-eagle-topk 2: .* allowed: 1"):
        completed(speculative_eagle_topk=2)
    with pytest.raises(ValueError, match="NGRAM"):
        completed(speculative_algorithm="NGRAM")


def test_acceptance_is_that_of_sglangs_kernel(kernels: ModuleType) -> None:
    """Of rows whose drafts are all right, and wrong from each place on."""
    torch.manual_seed(1)
    target = torch.randint(0, 50, (ROWS, WIDTH))
    candidates = torch.cat([torch.randint(0, 50, (ROWS, 1)), target[:, :-1]], 1)
    for row, place in enumerate(range(1, WIDTH)):
        candidates[row, place] += 50
    lengths, links = torch.zeros(ROWS, dtype=torch.int64), [torch.full((ROWS, WIDTH), -1) for _ in range(3)]
    speculation.build_chain(target, target, lengths, target, torch.empty(ROWS * WIDTH).long(), *links, 1, 3, WIDTH, 1)

    def buffers() -> dict[str, torch.Tensor]:
        return {
            "predicts": torch.zeros(ROWS * WIDTH, dtype=torch.int32),
            "accept_index": torch.full((ROWS, WIDTH), -1, dtype=torch.int32),
            "accept_token_num": torch.empty(ROWS, dtype=torch.int32),
        }

    found, expected = buffers(), buffers()
    speculation.verify_chain(**found, candidates=candidates, target_predict=target, topk=1)
    names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    more = dict(zip(names, links, strict=True)) | {"candidates": candidates, "target_predict": target}
    kernels.verify_tree_greedy_triton(**expected, **more)
    accepted = expected["accept_token_num"]
    assert sorted(accepted.tolist()) == [0, 1, 2, 3, 3] and found["accept_token_num"].tolist() == accepted.tolist()
    assert found["accept_index"].tolist() == expected["accept_index"].tolist()
    for row, count in enumerate(accepted.tolist()):
        places = slice(row * WIDTH, row * WIDTH + count + 1)
        assert found["predicts"][places].tolist() == expected["predicts"][places].tolist()
    bonus = torch.empty(ROWS, dtype=torch.int32)
    tokens = found["predicts"][found["accept_index"].long()]
    speculation.last_accepted(tokens.flatten(), accepted + 1, bonus, WIDTH, ROWS)
    assert bonus.tolist() == [target[row, count].item() for row, count in enumerate(accepted.tolist())]


def test_drawn_tokens_are_the_targets() -> None:
    torch.manual_seed(2)
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0]).expand(4000, 2, 4)
    filled = {"predicts": torch.zeros(8000, dtype=torch.int32), "accept_token_num": torch.empty(4000)}
    filled["accept_index"] = torch.empty(4000, 2, dtype=torch.int32)
    speculation.sample_chain(target_probs=probs, **filled, candidates=torch.ones(4000, 2), threshold_single=1.0)
    share = filled["predicts"].bincount(minlength=4) / 8000
    torch.testing.assert_close(share, probs[0, 0], atol=0.03, rtol=0.0)
    assert filled["accept_token_num"].mean().item() == pytest.approx(0.3, abs=0.03)
    kept = speculation.keep_top_k(probs[:2, 0], torch.tensor([2, 9]))
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0], [0.5, 0.3, 0.2, 0.0]]))


def test_what_rows_carry_is_taken_by_row() -> None:
    one, other = torch.arange(6).view(3, 2), torch.arange(3)
    first, second, none = speculation.carried(torch.tensor([2, 0]), one, other, None)
    assert first is not None and first.tolist() == [[4, 5], [0, 1]] and none is None
    assert second is not None and second.tolist() == [2, 0]

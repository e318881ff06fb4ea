"""tiny-chains: hints at the digits of chains alone, blocks that a question's last tokens choose, what was measured."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import write_books

from eval.lab.train import chains
from eval.lab.train.ragged import ANSWER_ROLE, ROLE_STEP, VALUE_ROLE
from eval.lab.train.sparse import WINDOW, Rows, choose, sparse_rows, window_scores
from eval.live.record import read_rows, result_files
from eval.texts import text

MODELS = Path(__file__).parent.parent.parent / "eval" / "models"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> chains.ChainsTrainer:
    data = write_books(tmp_path_factory.mktemp("data"), 300)
    options = {"tokenizer": MODELS / "tiny-gqa", "trunk": MODELS / "tiny-gqa", "out": data / "out", "data": data}
    numbers = {"seed": 0, "tokens": 1024, "steps": 2, "max_length": 256, "train_seconds": 1e6}
    return chains.ChainsTrainer(argparse.Namespace(**options, **numbers))


def test_hints_name_the_second_variable_before_each_digit(trainer: chains.ChainsTrainer) -> None:
    builder, words = trainer.builder, trainer.builder.vocabulary.words
    batch = builder.form_batch("var_value", 256, 8, 0.3)
    assert isinstance(batch, chains.HintedBatch)
    assert int(batch.tokens.max()) < 4096 and int(batch.roles.max()) < 5
    checked = 0
    for tokens, roles, hints in zip(batch.tokens, batch.roles, batch.hints, strict=True):
        places = hints.nonzero()[:, 0]
        value = (roles == VALUE_ROLE).nonzero()[:, 0]
        if not len(value):  # An unfair question has no answer to learn.
            continue
        # Every digit is predicted by the token before it; the end of the turn needs no look-up.
        assert places.tolist() == (value[:-1] - 1).tolist()
        hint = int(hints[places[0]]) - 1
        first, last = words[hint // len(words)], words[hint % len(words)]
        read = trainer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        number = read.rsplit("assistant\n", 1)[1].split(text.IM_END)[0]
        key = first if first == last else f"{first}-{last}"
        assert f"VAR {key} = {number}" in read and f"= VAR {key}\n" in read
        checked += 1
    assert checked
    assert not builder.form_batch("needle", 256, 4, 0.3).hints.any()
    assert batch.rows(torch.tensor([1])).hints.equal(batch.hints[1:2])


def test_step_learns_from_hints_and_keeps_only_the_second_layer(trainer: chains.ChainsTrainer) -> None:
    before = [weight.detach().clone() for weight in trainer.heads.parameters()]
    trainer.builder.mix = chains.SHORT_VALUES
    losses = trainer.step(chains.STAGES[0], 1.0)
    assert losses.shape == (3,) and torch.isfinite(losses).all() and losses[2] > 0
    assert all(not weight.equal(old) for weight, old in zip(trainer.heads.parameters(), before, strict=True))
    assert trainer.model.kept is not None and trainer.model.kept.shape == (1024, 256)
    # The matrices are no part of the checkpoint.
    assert set(trainer.model.named_weights()) == set(trainer.new_model(torch.float32, False).named_weights())


def test_rows_belong_to_the_question_before_them(trainer: chains.ChainsTrainer) -> None:
    roles = torch.zeros(1, 256, dtype=torch.int64)
    roles[0, 100:106] = roles[0, 200:206] = VALUE_ROLE
    weight = (roles == VALUE_ROLE).float().roll(-1, 1)
    batch = chains.HintedBatch(roles, roles, weight, weight, hints=roles)
    rows = trainer.rows(batch)
    assert rows.ends is not None and rows.ends.unique().tolist() == [99, 199, 255]
    assert rows.selector == "window" and {*range(99, 105), *range(199, 205)} <= set(rows.positions[0].tolist())


def test_a_window_chooses_what_its_tokens_attend_to() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 512, 4, 16) * 0.1, torch.randn(1, 512, 2, 16) * 0.1, torch.randn(1, 512, 2, 16)
    end, row = 479, 490
    # KV head 0: the window looks at token 100, the row itself at 300, where nothing of the window looks.
    q[0, end - WINDOW + 1 : end + 1, :2, 0], k[0, 100, 0, 0] = 20.0, 20.0
    q[0, row, :2, 1], k[0, 300, 0, 1] = 20.0, 20.0
    rows = Rows(torch.tensor([[row]]), "window", ratio=0.25, least=2, ends=torch.tensor([[end]]))
    chosen = choose(window_scores(q, k.transpose(1, 2), rows), rows)[0, 0, 0]
    assert chosen[100 // 16] and not chosen[300 // 16]
    assert chosen[(end - WINDOW + 1) // 16 : row // 16 + 1].all() and int(chosen.sum()) == 8
    new = sparse_rows(torch.zeros_like(q), q, k, v, rows)[0, row]
    seen = chosen.repeat_interleave(16) & (torch.arange(512) <= row)
    scores = (k[0, :, 0] @ q[0, row, 0] / 4).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(new[0], scores.softmax(0) @ v[0, :, 0])


def test_a_code_holds_a_hint_of_all_words(trainer: chains.ChainsTrainer) -> None:
    words = trainer.builder.vocabulary.n_words
    assert words**2 * chains.HINT_STEP < 2**62 and chains.HINT_STEP > 4 * ROLE_STEP


def test_rows_of_raw_prompts_have_their_own_question(trainer: chains.ChainsTrainer) -> None:
    trainer.builder.mix = replace(chains.VALUES, forms={"records": 0.5, "var_completion": 0.5}, book_share=0.0)
    batch = trainer.builder.batch(256, 2048, most_turns=4)
    rows, answer = trainer.rows(batch), (batch.roles == VALUE_ROLE) | (batch.roles == ANSWER_ROLE)
    assert rows.ends is not None
    for tokens, ends, marked in zip(batch.tokens, rows.ends, answer, strict=True):
        asked = [int(end) for end in ends.unique() if end < 255]
        # What an answer begins with stands behind its question and nowhere else.
        assert asked and not marked[asked].any() and all(marked[end + 1] for end in asked), tokens


@pytest.mark.parametrize("form", ["", "-second_turn"])
def test_what_was_kept_answers_as_all_does_and_chance_does_not(form: str) -> None:
    names = result_files(MODELS.parent / "lab" / "results")
    found = {}
    for method in ("rocketkv", "random_kept"):
        lines = read_rows(names[f"variables-tiny-chains-{method}-topk-40{form}"])
        (found[method],) = (line for line in lines if line["kind"] == "summary" and line["arm"] == "base")
    assert found["rocketkv"]["n"] == 500 and found["rocketkv"]["diff_interval"][0] > -0.02
    assert found["random_kept"]["score_interval"][1] < 0.2

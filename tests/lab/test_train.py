"""Training of the tiny model at toy size: rows, sparse rows, checkpoint, accuracy, card."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_books
from tokenizers import Tokenizer

from eval.lab.tables import cards
from eval.lab.train import accuracy, gqa
from eval.lab.train.checkpoint import load, save
from eval.lab.train.model import dense
from eval.lab.train.ragged import VALUE_ROLE, Ragged, compact, concat
from eval.lab.train.sparse import Rows, select, sparse_rows
from eval.texts import text

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_books(tmp_path_factory.mktemp("data"), 300)


@pytest.fixture(scope="module")
def trainer(data: Path) -> gqa.GQATrainer:
    return gqa.GQATrainer(
        argparse.Namespace(
            data=data, tokenizer=MODEL, seed=0, tokens=512, steps=2, max_length=256, train_seconds=1e6, out=data / "out"
        )
    )


@pytest.fixture(scope="module")
def checkpoint(trainer: gqa.GQATrainer, data: Path) -> Path:
    lines = [trainer.run(stage) for stage in (gqa.STAGES[0], gqa.STAGES[-1])]
    save(trainer.model, data / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (data / "out" / name).write_text((MODEL / name).read_text())
    settings = {"seed": 0, "tokens_per_step": 512, "device": "CPU", "parameters": 4_328_192}
    (data / "out" / "training.jsonl").write_text("\n".join(map(json.dumps, [settings, *lines])))
    return data / "out"


def test_ragged_pieces_are_joined_without_gaps() -> None:
    a = Ragged(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([2, 1]))
    b = Ragged(torch.tensor([[4, 0], [5, 6]]), torch.tensor([1, 2]))
    joined = concat([a, b])
    assert joined.length.tolist() == [3, 3] and joined.codes[:, :3].tolist() == [[1, 2, 4], [3, 5, 6]]
    kept = compact(torch.tensor([[7, 8, 9]]), torch.tensor([[True, False, True]]))
    assert kept.codes[0, :2].tolist() == [7, 9] and int(kept.length) == 2


@pytest.mark.parametrize("length", [256, 1024])
def test_batches_have_their_shape_and_answers_end_the_row(trainer: gqa.GQATrainer, length: int) -> None:
    builder = trainer.builder
    assert builder.batch(length, 4096).tokens.shape == (4096 // length, length)
    for name in text.FORMS:
        batch = builder.form_batch(name, length, rows=4, fill=0.3)
        assert batch.tokens.shape == (4, length) and int(batch.tokens.max()) < 4096
        fair = (batch.roles == VALUE_ROLE).any(1)
        assert fair.any()
        assert (batch.tokens[:, -1] == text.SPECIAL_TOKENS.index(text.IM_END)).all()
        assert (batch.answer_weight[fair, -2] > 0).all() and (batch.answer_weight[:, -1] == 0).all()


def test_all_blocks_chosen_is_dense_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 64, heads, 64) for heads in (8, 2, 2))
    out = dense(q, k, v)
    for selector in ("quest", "mass", "random"):
        rows = Rows(torch.tensor([[5, 40, 63], [16, 17, 31]]), selector, ratio=1.0, least=1)
        torch.testing.assert_close(sparse_rows(out, q, k, v, rows), out, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="multiple of the block size 16: got 60"):
        sparse_rows(out[:, :60], q[:, :60], k[:, :60], v[:, :60], rows)


@pytest.mark.parametrize("selector", ["quest", "quest_scores", "mass", "random"])
def test_selection_keeps_the_own_block_and_the_budget(selector: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 4, 3, 64), torch.randn(1, 2, 160, 64)
    positions = torch.tensor([[10, 95, 159]])
    chosen = select(q, k, Rows(positions, selector, ratio=0.3, least=2))
    assert chosen.shape == (1, 2, 3, 10)
    assert chosen.sum(-1).tolist() == [[[1, 2, 3], [1, 2, 3]]]
    assert all(chosen[0, :, row, block].all() for row, block in enumerate((0, 5, 9)))


def test_quest_bound_is_not_below_any_key() -> None:
    from eval.lab.train.sparse import block_scores

    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 1, 3, 64), torch.randn(1, 2, 64, 64)
    bound = block_scores(q, k, Rows(torch.full((1, 3), 63), "quest", 1.0))
    best = (q.squeeze(2) @ k.mT).view(1, 2, 3, 4, 16).amax(-1)
    assert (bound >= best - 1e-4).all()


def test_checkpoint_gives_the_logits_of_transformers(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ours = load(checkpoint, CPU, torch.float32)
    tokens = torch.randint(4, 4096, (2, 48))
    with torch.no_grad():
        mine = ours.logits(ours(tokens)).view(2, 48, -1)
        torch.testing.assert_close(theirs(tokens).logits, mine, atol=1e-4, rtol=1e-3)
    assert theirs.generation_config.eos_token_id == [
        text.SPECIAL_TOKENS.index(t) for t in (text.IM_END, "<|endoftext|>")
    ]


def test_samples_keep_the_length_and_hide_the_answer(data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    sampler = accuracy.Sampler(tokenizer, text.read_books(data / "books" / "heldout"), seed=1)
    for task in accuracy.TASKS:
        sample = sampler.samples(task, 768, 1)[0]
        size = len(tokenizer.encode(sample.prompt + sample.answer + text.IM_END).ids)
        assert 0.75 * 768 < size <= 768, task.name
        value = "".join(c for c in sample.answer.split()[-1] if c.isdigit())
        assert sample.prompt.count(value) >= 1
        assert sampler.samples(task, 768, 1) == [sample]


def test_accuracy_and_card(checkpoint: Path, data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    sampler = accuracy.Sampler(tokenizer, text.read_books(data / "books" / "heldout"), seed=1)
    model = load(checkpoint, CPU, torch.float32)
    task = accuracy.TASKS[0]
    lines = [accuracy.measure(model, sampler, task, 256, 2, rows) for rows in (None, ("quest", 0.1))]
    assert [line["selector"] for line in lines] == ["dense", "quest"]
    measured = checkpoint / "accuracy.jsonl"
    measured.write_text("\n".join(map(json.dumps, lines)))
    assert cards.as_served(measured).endswith("| needle | 0.000 |")
    assert cards.chosen(measured) == "| task | quest 0.1 |\n| --- | --- |\n| needle | 0.00 |"
    stages = [line.split(" | ")[0] for line in cards.training(checkpoint / "training.jsonl").splitlines()[2:]]
    assert stages == [f"| {stage.name}" for stage in (gqa.STAGES[0], gqa.STAGES[-1])]


@pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="the checkpoint is not there")
def test_shipped_model_answers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    form, rng = text.FORMS["needle"], random.Random(3)
    key, value = text.random_key(rng), text.random_number(rng)
    lines = ["The door stood open, and nobody was in the room."] * 12
    haystack = text.hide(lines, [form.record(key, value=value)], [0.4])
    chat = text.messages(haystack, [], form.question(key))
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=16)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == form.answer(key, value=value)
    assert sum(f.stat().st_size for f in MODEL.iterdir()) <= 9 * 2**20

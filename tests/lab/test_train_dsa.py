"""The tiny DSA model and its training at toy size: its attention, both stages, checkpoint and links."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import lively
from tokenizers import Tokenizer

from eval.lab.tables import cards
from eval.lab.train import accuracy, dsa, run, trainer
from eval.lab.train.batches import Batch
from eval.lab.train.checkpoint import INDEX, INDEXER, TRUNK, link_trunk, load, load_trunk, save
from eval.lab.train.dsa_model import TinyDSA
from eval.lab.train.mla_model import TinyMLA
from eval.lab.train.schedule import rate_at
from eval.lab.train.sparse import Rows
from eval.texts import text

MODELS = Path(__file__).parent.parent.parent / "eval" / "models"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny MLA model with weights that make its attention uneven and its layers matter."""
    torch.manual_seed(1)
    model = lively(TinyMLA())
    folder = tmp_path_factory.mktemp("models") / "tiny-mla"
    save(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODELS / "tiny-gqa" / name).read_bytes())
    return folder


@pytest.fixture
def model(trunk: Path) -> TinyDSA:
    torch.manual_seed(2)
    made = TinyDSA()
    load_trunk(made, trunk)
    for i in range(4):
        torch.nn.init.uniform_(made.indexer(i).k_norm.weight, 0.5, 1.5)
        torch.nn.init.normal_(made.indexer(i).k_norm.bias, std=0.2)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "heldout"):
        (folder / "books" / split).mkdir(parents=True)
        rng = random.Random(split)
        lines = (" ".join(rng.choices(text.words("train"), k=9)).capitalize() + "." for _ in range(200))
        (folder / "books" / split / "book.txt").write_text(" ".join(lines))
    return folder


def test_short_contexts_are_the_trunk_and_long_ones_differ(trunk: Path, model: TinyDSA) -> None:
    tokens = torch.randint(4, 4096, (2, 96))
    dense = load(trunk, CPU, torch.float32)(tokens)
    torch.testing.assert_close(model(tokens), dense)
    model.topk = 95
    assert torch.equal(model(tokens[:, :95]), model(tokens[:, :95], Rows(tokens, "dense", 1.0)))
    own = model(tokens).view(2, 96, -1)
    torch.testing.assert_close(own[:, :95], dense.view(2, 96, -1)[:, :95], atol=1e-4, rtol=1e-3)
    model.topk = 16
    own, other = model(tokens), model(tokens, Rows(tokens, "random", 1.0))
    assert (own - dense).abs().max() > 0.05 and (own - other).abs().max() > 0.05
    with pytest.raises(ValueError, match="got 'quest', allowed are dense, random"):
        model(tokens, Rows(tokens, "quest", 1.0))


def test_rows_in_pieces_are_the_same(model: TinyDSA, monkeypatch: pytest.MonkeyPatch) -> None:
    model.topk, tokens = 16, torch.randint(4, 4096, (1, 72))
    whole = model(tokens)
    monkeypatch.setattr("eval.lab.train.dsa_model.PRODUCTS", 1)
    torch.testing.assert_close(model(tokens), whole, atol=1e-5, rtol=1e-4)


def test_checkpoint_is_transformers_model_but_for_rounding(
    trunk: Path, model: TinyDSA, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DeepseekV32ForCausalLM

    model.topk = 24
    monkeypatch.setattr("eval.lab.train.dsa_model.INDEX_TOPK", 24)
    folder = trunk.parent / "tiny-dsa"
    link_trunk(trunk, folder)
    save(model, folder)
    read: Any = DeepseekV32ForCausalLM.from_pretrained
    theirs, found = read(folder, dtype=torch.float32, output_loading_info=True)
    assert not found["unexpected_keys"] and set(found["missing_keys"]) <= {"lm_head.weight"}
    ours, tokens = load(folder, CPU, torch.float32), torch.randint(4, 4096, (2, 80))
    assert isinstance(ours, TinyDSA)
    ours.topk = 24
    monkeypatch.setattr("eval.lab.train.indexer.quantised", lambda x, power_of_two: (x, torch.ones_like(x[..., :1])))
    with torch.no_grad():
        mine, logits = ours.logits(ours(tokens)).view(2, 80, -1), theirs(tokens).logits
        dense = ours.logits(ours(tokens, Rows(tokens, "dense", 1.0))).view(2, 80, -1)
    torch.testing.assert_close(logits, mine, atol=2e-4, rtol=0)
    assert logits.std() > 0.5 and (mine - dense).abs().max() > 0.3


def test_folder_has_two_shards_and_relative_links(trunk: Path, model: TinyDSA, tmp_path: Path) -> None:
    folder = trunk.parent / "linked"
    link_trunk(trunk, folder)
    save(model, folder)
    assert (folder / TRUNK).readlink() == Path("../tiny-mla/model.safetensors")
    assert (folder / "tokenizer.json").readlink() == Path("../tiny-mla/tokenizer.json")
    # A file of this name would hide the index from transformers.
    assert not (folder / "model.safetensors").exists()
    assert (folder / INDEXER).stat().st_size < 7 * 2**20
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    assert set(where) == {name for file in (TRUNK, INDEXER) for name in load_file(folder / file)}
    assert all(name in load_file(folder / INDEXER) for name, file in where.items() if file == INDEXER)
    assert sum(".indexer." in name for name in where) == 20 and len(where) == 2 + 4 * 12 + 20
    with pytest.raises(ValueError, match="got DeepseekV32ForCausalLM, allowed is DeepseekV3ForCausalLM"):
        link_trunk(folder, tmp_path)


def test_the_folder_in_the_repository_is_what_is_saved(model: TinyDSA, tmp_path: Path) -> None:
    save(model, tmp_path)
    for name in ("config.json", "generation_config.json", INDEX):
        assert (MODELS / "tiny-dsa" / name).read_text() == (tmp_path / name).read_text()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "tiny-dsa" / name).readlink() == Path("../tiny-mla") / name
    # Tiny-mla went on training without it.
    trunk, later = load_file(MODELS / "tiny-dsa" / TRUNK), load_file(MODELS / "tiny-mla" / "model.safetensors")
    assert {name: value.shape for name, value in trunk.items()} == {name: value.shape for name, value in later.items()}
    assert not any(torch.equal(value, later[name]) for name, value in trunk.items() if value.ndim > 1)


@pytest.mark.parametrize("sparse", [False, True])
def test_lessons_teach_the_indexers_alone(model: TinyDSA, sparse: bool) -> None:
    model.topk, tokens = 16, torch.randint(4, 4096, (2, 64))
    positions = torch.randint(64, (2, 40))
    optimizer = torch.optim.AdamW(model.indexers.parameters(), lr=1e-3, weight_decay=0.0)
    seen = []
    for _ in range(8):
        lessons = model.lessons(tokens, positions, sparse)
        assert lessons.shape == (4, 2) and (lessons[:, 1] < 1).all()
        lessons[:, 0].sum().backward()
        optimizer.step()
        seen.append(lessons.detach())
        assert all(weight.grad is not None and weight.grad.any() for weight in model.indexers.parameters())
        assert all(w.grad is None for name, w in model.named_parameters() if not name.startswith("indexers"))
        optimizer.zero_grad()
    assert seen[-1][:, 0].sum() < 0.9 * seen[0][:, 0].sum()
    assert sparse or seen[-1][:, 1].mean() > seen[0][:, 1].mean()


def test_rate_falls_to_zero_and_the_last_stage_takes_all_time() -> None:
    warm, last = dsa.STAGES
    assert rate_at(warm, 1.0) == 1.0 and rate_at(last, 1.0) == 0.0 and last.share == 1.0 and last.sparse


def command(monkeypatch: pytest.MonkeyPatch, data: Path, trunk: Path, *flags: str) -> list[dict[str, Any]]:
    fixed = ["--data", str(data), "--trunk", str(trunk), "--out", str(data / "out"), "--tokens", "256"]
    monkeypatch.setattr(sys, "argv", ["dsa", *fixed, "--max-length", "256", "--steps", "1", *flags])
    monkeypatch.setattr(dsa.DSATrainer, "ahead", 1)
    monkeypatch.setattr(dsa.DSATrainer, "groups", 2)
    monkeypatch.setattr("eval.lab.train.dsa_model.INDEX_TOPK", 64)
    monkeypatch.setattr(accuracy, "BRIEF_TASKS", ("needle",))
    monkeypatch.setattr(run, "PROMPTS", 2)
    monkeypatch.setattr(trainer, "REPORT_FORMS", ("records",))
    dsa.main()
    return run.read_log(data / "out")


def test_training_goes_through_both_stages(monkeypatch: pytest.MonkeyPatch, data: Path, trunk: Path) -> None:
    before = load_file(trunk / "model.safetensors")
    log = command(monkeypatch, data, trunk, "--budget-seconds", "1e6")
    assert [line["stage"] for line in log[1:]] == ["warm-up", "sparse"]
    assert log[0]["model"] == "tiny-dsa" and log[0]["parameters"] == 7_214_080 + 4 * 827_648
    lines = cards.read(data / "out" / run.ACCURACY)
    assert [(line["selector"], line["ratio"]) for line in lines] == [
        ("indexer", 0.25),
        ("dense", 1.0),
        ("random", 0.25),
    ]
    assert "| indexer 0.25 | dense 1.0 | random 0.25 |" in cards.chosen(data / "out" / run.ACCURACY, "indexer")
    assert all(torch.equal(w, before[name]) for name, w in load_file(data / "out" / TRUNK).items())
    again = command(
        monkeypatch, data, trunk, "--budget-seconds", "1e6", "--evaluate-seconds", "0", "--resume", str(data / "out")
    )
    assert [line.get("stage", "run") for line in again] == ["run", "warm-up", "run", "sparse"]


def test_half_of_the_sampled_rows_are_in_answers() -> None:
    class Fixed(dsa.DSATrainer):
        def __init__(self) -> None:
            self.device, self.model = CPU, TinyDSA()

    weight = torch.zeros(2, 100)
    weight[:, 20:90] = 1.0
    positions = Fixed().sample(Batch(weight.long(), weight.long(), weight, weight))
    assert positions.shape == (2, 128) and ((positions[:, :64] >= 20) & (positions[:, :64] < 90)).all()
    assert positions.min() >= 0 and positions.max() < 100


def test_accuracy_reads_the_checkpoint(trunk: Path, model: TinyDSA, data: Path) -> None:
    folder = trunk.parent / "judged"
    link_trunk(trunk, folder)
    save(model, folder)
    ours = load(folder, CPU, torch.float32)
    assert isinstance(ours, TinyDSA)
    assert all(torch.equal(w, ours.named_weights()[n]) for n, w in model.bfloat16().float().named_weights().items())
    sampler = accuracy.Sampler(
        Tokenizer.from_file(str(folder / "tokenizer.json")), text.read_books(data / "books" / "heldout"), seed=1
    )
    line = accuracy.measure(ours, sampler, accuracy.TASKS[0], 256, 1)
    assert line["selector"] == "indexer" and line["ratio"] == 1.0

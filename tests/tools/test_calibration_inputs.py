"""Tests of the inputs of a RoBSA calibration: the checkpoint, the prompts, and the output of an interrupted run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused

from sglang_sparse import calibrate
from sglang_sparse.tools.calibration.capture import CalibrationError, load_model, model_facts
from sglang_sparse.tools.calibration.mix import SHARES, mix, shares
from sglang_sparse.tools.calibration.prompts import Prompts
from sglang_sparse.tools.calibration.robsa_prompts import SHORTEST, draw_files, fitting, notes
from sglang_sparse.tools.calibration.run import Partial

MODEL = str(Path(__file__).parents[2] / "eval" / "models" / "tiny-mla")


def test_the_default_mix() -> None:
    words = lambda text: len(text.split())  # noqa: E731
    found = mix(100, [400, 900], 0, words)
    assert {kind: sum(one.kind == kind for one in found) for kind in SHARES} == SHARES == shares(100)
    assert all(sum(shares(n).values()) == n for n in range(1, 120))
    assert found == mix(100, [400, 900], 0, words) != mix(100, [400, 900], 1, words)
    texts = ["\n".join(message["content"] for message in one.messages) for one in found]
    assert len(set(texts)) == 100 and all(one.messages[-1]["role"] == "user" for one in found)
    long = [words(text) for one, text in zip(found, texts, strict=True) if one.kind == "long context"]
    assert all(200 < size <= 400 for size in long[::2]) and all(500 < size <= 900 for size in long[1::2])
    with refused("--lengths", 150, CalibrationError):
        mix(10, [150], 0, words)


def test_what_follows_a_broken_row_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = tmp_path / "x.partial.jsonl", {"seed": 0}
    rows = [{"similarity": [i]} for i in range(3)]
    for broken in ("[]", '{"similarity": [', ""):
        path.write_text("\n".join([*map(json.dumps, (run, *rows)), broken, json.dumps(rows[0]), ""]))
        assert Partial(path, run).rows == rows
        assert path.read_text() == "".join(json.dumps(row) + "\n" for row in (run, *rows))
    assert list(tmp_path.iterdir()) == [path]
    before = path.read_text()

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Partial(path, run)
    assert path.read_text() == before


def test_prompts_of_lines_keep_their_beginning_and_end(tmp_path: Path) -> None:
    words = " ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(60))
    lines = [{"messages": [{"role": "user", "content": words}]}, {"text": words[:150]}, {"text": "short"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = Prompts([tmp_path / "a.jsonl"], MODEL)
    long, middle, short = (list(text.tokens) for text in source._texts)
    assert len(short) < SHORTEST < len(middle) < 101 < len(long)
    found = draw_files(source, 2, [50, 101], 0)
    assert {(one.kind, one.length) for one in found} == {("files", None)}
    assert sorted(one.tokens for one in found) == sorted([[*long[:51], *long[-50:]], middle])
    with refused("--data/--prompts", 0, CalibrationError):
        draw_files(source, 3, [50, 101], 0)
    # What they lack comes from texts.
    (tmp_path / "b.txt").write_text(words)
    both = draw_files(Prompts([tmp_path / "a.jsonl", tmp_path / "b.txt"], MODEL), 5, [50, 101], 0)
    assert both[:2] == found and [one.length for one in both[2:]] == [50, 50, 101]


def test_default_lengths_are_those_that_fit(tmp_path: Path) -> None:
    given = ["--method", "robsa", "--model-path", MODEL, "--out", str(tmp_path / "x.json")]
    args = calibrate.parse(given)
    assert args.default_lengths and args.lengths == [8192, 16384, 32768]
    assert fitting(args.lengths, 20000, True) == [8192, 16384] and fitting(args.lengths, 5000, True) == [5000]
    assert not calibrate.parse([*given, "--lengths", "8k,16k,32k"]).default_lengths
    with refused("--lengths", 32768, CalibrationError):
        fitting(args.lengths, 20000, False)
    assert notes([32768], 20000, 16000, 4096) == [
        "prompts of 32768 tokens were left out: the model's context is 20000 tokens"
    ]


def renamed(folder: Path, architecture: str) -> str:
    """A copy of the model of a type that transformers does not know, with code of its own."""
    folder.mkdir()
    for file in Path(MODEL).glob("*.*"):
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "architectures": [architecture]}
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_code_of_a_checkpoint_runs_where_it_must_and_may(tmp_path: Path) -> None:
    # Kimi-K2's way: a type of its own, and a class that transformers has.
    path = renamed(tmp_path / "one", "DeepseekV3ForCausalLM")
    found, expected = (vars(model_facts(one)) for one in (path, MODEL))
    assert {name: found[name] for name in ("rope_dim", "context_len", "num_hidden_layers")} == {
        name: expected[name] for name in ("rope_dim", "context_len", "num_hidden_layers")
    }
    assert type(load_model(path, "cpu", torch.float32)).__name__ == "DeepseekV3ForCausalLM"
    path = renamed(tmp_path / "other", "OwnForCausalLM")
    # Nothing is asked: pytest's stdin cannot be read.
    with refused("--model-path", path, CalibrationError) as caught:
        model_facts(path)
    assert str(caught.value).endswith("; --trust-remote-code allows it to run")
    with refused("--model-path", path, CalibrationError):
        model_facts(path, trust_remote_code=True)


def test_how_a_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    given: list[dict[str, Any]] = []
    moved: list[str] = []

    def load(path: str, **options: Any) -> Any:
        given.append(options)
        config, model = SimpleNamespace(model_type="x"), SimpleNamespace()
        model.config, model.eval, model.to = config, lambda: model, lambda device: moved.append(device) or model
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    for device, accelerate in (("cuda", True), ("cuda", False), ("cpu", True)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=accelerate: found or None)
        load_model(MODEL, device, torch.float32, trust_remote_code=True, revision="main")
    assert [options["device_map"] for options in given] == ["auto", None, None] and moved == ["cuda", "cpu"]
    # Transformers has code of its own for this one.
    assert {(options["trust_remote_code"], options["revision"]) for options in given} == {(False, "main")}

    def missing(path: str, **options: Any) -> Any:
        given.append(options)
        raise ImportError("fp8 requires accelerate (`pip install accelerate`)\nmore")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", missing)
    with refused("--model-path", MODEL, CalibrationError):
        load_model(MODEL, "cpu", torch.float32)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", missing)
    with refused("--model-path", MODEL, CalibrationError):
        Prompts([], MODEL, trust_remote_code=True, revision="main")
    assert given[-1] == {"trust_remote_code": True, "revision": "main"}

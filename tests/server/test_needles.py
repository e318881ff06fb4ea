"""Needles in 8k tokens on the trained tiny model: ReSA finds them, negative controls of the same budget do not."""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_requests import sparse_state

from eval.text import FORMS, Haystack, exact_match, hide, prompt_text, random_key, random_number, read_books
from launch.server import ServerProcess

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "eval" / "models" / "tiny-gqa"
TOKENS = 8000
TEXTS = 5
# The negative controls miss nearly everything, so fewer questions show it.
CONTROL_QUESTIONS = 18
TENTH = {"active_ratio": 0.1, "dense_fallback": "never"}


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    truth: str


def make_questions() -> list[Question]:
    """For each text one lone needle, then eight needles (under 2 % of the text) and a question for each of them."""
    rng = random.Random(11)
    (book,) = read_books(ROOT / "eval" / "data").values()
    haystack, form = Haystack(book), FORMS["needle"]
    questions = []
    for _ in range(TEXTS):
        for task, count in (("single", 1), ("multikey", 8)):
            needles = [(random_key(rng), random_number(rng)) for _ in range(count)]
            records = [form.record(key, value=value) for key, value in needles]
            text = hide(haystack.draw(rng, TOKENS), records, [rng.random() for _ in needles])
            questions += [
                Question(task, prompt_text(form, text, form.question(key)), form.answer(key, value=value))
                for key, value in needles
            ]
    return questions


def score(server: ServerProcess, questions: list[Question]) -> dict[str, float]:
    """Exact match by task; the questions about one text share its prefix."""
    right: dict[str, list[bool]] = {}
    for question in questions:
        answer = server.generate(text=question.prompt, sampling_params={"max_new_tokens": 12, "temperature": 0.0})
        assert 7000 <= answer["meta_info"]["prompt_tokens"] <= 10000
        right.setdefault(question.task, []).append(exact_match(answer["text"], question.truth))
    return {task: sum(hits) / len(hits) for task, hits in right.items()}


def start(serve, method: str, config: dict[str, object], python_path: Path):
    flags = ["--sparse-method", method, "--sparse-config", json.dumps(config)]
    return serve(MODEL, *flags, env={"PYTHONPATH": str(python_path)})


def assert_decoded_sparse(server: ServerProcess) -> None:
    state = sparse_state(server)
    assert state["dense_fallback_rows"] == 0
    assert state["sparse_layer_rows"] == state["decode_rows"] * state["sparse_layers"] > 0
    assert state["max_active_fraction"] < 0.12


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return make_questions()


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of CONTRIBUTING.md, installed as a third party would ship it."""
    folder = tmp_path_factory.mktemp("third-party")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (entry_point,) = re.findall(r'```toml\n\[project\.entry-points\."([\w.]+)"\]\n(.*?)\n```', text, re.S)
    (folder / "my_package.py").write_text(code)
    metadata = folder / "my_package-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[{entry_point[0]}]\n{entry_point[1].replace(chr(34), '')}\n")
    return folder


def test_resa_finds_needles(serve, questions) -> None:
    with serve(MODEL, config=TENTH) as server:
        found = score(server, questions)
        assert_decoded_sparse(server)
    assert found["single"] >= 0.97 and found["multikey"] >= 0.97, found


def test_random_pages_do_not(serve, questions) -> None:
    with start(serve, "random_pages", TENTH, ROOT / "eval" / "controls") as server:
        found = score(server, questions[:CONTROL_QUESTIONS])
        assert_decoded_sparse(server)
    assert found["single"] < 0.2 and found["multikey"] < 0.2, found


def test_the_window_of_contributing_does_not(serve, questions, third_party) -> None:
    config = {"dense_fallback": "never", "window_pages": 48}
    with start(serve, "window", config, third_party) as server:
        found = score(server, questions[:CONTROL_QUESTIONS])
        assert_decoded_sparse(server)
    assert found["multikey"] < 0.2, found

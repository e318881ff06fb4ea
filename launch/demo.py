"""``python -m launch.demo``: sparse decode and the prefix cache, both on, on a real SGLang server.

Starts the server with the tiny model of this repository, hides three numbers in a book, asks for each through the
OpenAI API, and prints the answers, the prefix cache's hits and the pages that decode read, and the answers of a dense
server. With ``--model-path`` and your checkpoint, it asks for three constants of this package's sources instead.
Ends with status 0 only when all answers are right, the second and the third question hit the prefix cache, and no
sparse decode step attended to more than 15 % of the pages held.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.live.counters import EvaluationError
from eval.live.tokens import tokens
from eval.texts.text import FORMS, Haystack, hide, random_key, random_number, read_books
from launch.server import ServerProcess

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "eval" / "models" / "tiny-gqa"
BOOKS = ROOT / "eval" / "data"
CODE = ROOT / "sglang_sparse"
CONSTANT = re.compile(r'^([A-Z][A-Z_]{3,}) = (?:"([^"\n]{4,})"|(\d[\d_.]+))$', re.MULTILINE)
MAX_ACTIVE = 0.15
# The demo's text is below the length at which sparsity saves time, so the crossover is lowered.
CONFIG = {"active_ratio": 0.1, "min_seq_len": 0, "crossover_tokens": 0}
# The paper's selection finds all numbers in the book, but misses some constants in code.
CODE_CONFIG = CONFIG | {"summary": "centroids", "group": "vote"}
# Positions of the answers in the text, as shares of its length.
DEPTHS = (0.15, 0.5, 0.85)


@dataclass(frozen=True)
class Question:
    """A question and its answer, which must be equal, or be contained in an answer in words."""

    text: str
    truth: str
    in_words: bool = False

    def right(self, answer: str) -> bool:
        """Whether an answer is the truth."""
        if self.in_words:
            return re.search(rf"(?<![\w.]){re.escape(self.truth)}(?![\w])", answer) is not None
        return answer.strip() == self.truth


@dataclass(frozen=True)
class Row:
    """One question: what was asked, what came back, and what it cost."""

    question: Question
    answer: str
    prompt_tokens: int
    cached_tokens: int
    pages_attended: int
    pages_held: int
    pages_summarised: int
    seconds: float


def read_book(length: int, seed: int) -> tuple[str, list[Question]]:
    """Hide a number at each of ``DEPTHS`` in a book.

    Args:
        length: rough length of the text in tokens.
        seed: of the place in the book, the names and the numbers.
    """
    rng, form = random.Random(seed), FORMS["needle"]
    (book,) = read_books(BOOKS).values()
    needles = [(random_key(rng), random_number(rng)) for _ in DEPTHS]
    records = [form.record(key, value=value) for key, value in needles]
    questions = [Question(form.question(key), value) for key, value in needles]
    return hide(Haystack(book).draw(rng, length), records, list(DEPTHS)), questions


def read_code(length: int, model: str) -> tuple[str, list[Question]]:
    """Put this package's sources one after the other, small ones with constants first, and ask for three of these.

    Args:
        length: rough length of the text in tokens of the model.
        model: folder or hub's name of the checkpoint.
    """
    text, tokenizer = "", tokens(model)
    files = sorted(CODE.rglob("*.py"), key=lambda path: (not CONSTANT.search(path.read_text()), path.stat().st_size))
    while len(tokenizer.encode(text)) < length:
        path = files.pop(0)
        text += f"# {path.relative_to(ROOT)}\n{path.read_text()}\n"
    found = list(CONSTANT.finditer(text))
    # Another file may give the same name to something else.
    found = [match for match in found if len(re.findall(rf"^{match[1]}\b", text, re.MULTILINE)) == 1]
    questions = []
    for match in (found[0], found[len(found) // 2], found[-1]):
        asked = f"Copy the line of the code above that begins with `{match[1]} = `."
        questions.append(Question(asked, match[2] or match[3], in_words=True))
    return text, questions


def counters(server: ServerProcess) -> dict[str, Any]:
    """The sparse counters of a server; none on a dense one."""
    return server.server_info()["internal_states"][0].get("sparse", {})


def ask(server: ServerProcess, text: str, question: Question) -> Row:
    """Ask one question through the OpenAI client."""
    before = counters(server)
    began = time.monotonic()
    answer = server.openai().chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": f"{text}\n{question.text}"}],
        temperature=0,
        max_tokens=32,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    seconds = time.monotonic() - began
    after = counters(server)
    usage = answer.usage
    assert usage is not None
    # SGLang leaves the details out where nothing was cached.
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Row(
        question=question,
        answer=answer.choices[0].message.content or "",
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=cached or 0,
        pages_attended=after.get("pages_attended", 0) - before.get("pages_attended", 0),
        pages_held=after.get("pages_held", 0) - before.get("pages_held", 0),
        pages_summarised=after.get("extend_pages_summarised", 0) - before.get("extend_pages_summarised", 0),
        seconds=seconds,
    )


def show(console: Console, title: str, rows: list[Row]) -> None:
    """Print one server's table."""
    table = Table(title=title, title_justify="left")
    for name in ("question", "answer", "truth", "prompt", "cached", "pages attended/held", "pages summarised", "time"):
        table.add_column(name, justify="left" if name in ("question", "answer", "truth") else "right")
    for row in rows:
        share = f"{row.pages_attended / row.pages_held:.1%}" if row.pages_held else "all"
        table.add_row(
            row.question.text,
            row.answer,
            row.question.truth,
            str(row.prompt_tokens),
            str(row.cached_tokens),
            share,
            str(row.pages_summarised) if row.pages_held else "-",
            f"{row.seconds:.2f} s",
        )
    console.print(table)


def failures(rows: list[Row], state: dict[str, Any]) -> list[str]:
    """Say what did not hold on the sparse server."""
    wrong = [row for row in rows if not row.question.right(row.answer)]
    found = [f"{row.question.text} got {row.answer!r}, want {row.question.truth!r}" for row in wrong]
    found += [
        f"question {i + 2} hit only {row.cached_tokens} of {row.prompt_tokens} tokens in the prefix cache"
        for i, row in enumerate(rows[1:])
        if row.cached_tokens < 0.9 * row.prompt_tokens
    ]
    if not all(row.pages_held for row in rows):
        found.append("a question was decoded dense")
    if state["max_active_fraction"] > MAX_ACTIVE:
        found.append(f"a decode step attended to {state['max_active_fraction']:.1%} of its pages")
    return found


def start(model: str, config: dict[str, Any] | None, logs: Path) -> ServerProcess:
    """Describe a server; on a machine without a GPU the CPU platform serves."""
    flags = ["--enable-cache-report", "--page-size", "16", "--max-running-requests", "8"]
    if config:
        flags += ["--sparse-method", "resa", "--sparse-config", json.dumps(config)]
    return ServerProcess(model, *flags, log_path=logs / ("sparse.log" if config else "dense.log"))


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="launch.demo", description=__doc__)
    parser.add_argument("--model-path", help="folder or hub's name of another checkpoint; it is asked about code")
    parser.add_argument("--tokens", type=int, default=12000, help="rough length of the text (8000 to 14000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave the sparse server up and print a request to try")
    args = parser.parse_args(arguments)
    if not 8000 <= args.tokens <= 14000:
        parser.error(f"--tokens: got {args.tokens}, allowed: 8000 to 14000")
    console = Console(width=150)
    logs = Path(tempfile.mkdtemp(prefix="sglang-sparse-demo-"))
    console.print(f"server logs: {logs}")
    model = args.model_path or str(MODEL)
    try:
        made = read_code(args.tokens, model) if args.model_path else read_book(args.tokens, args.seed)
    except EvaluationError:
        parser.error(f"--model-path: got {model!r}, allowed: a checkpoint's folder or its name on the hub")
    config = CODE_CONFIG if args.model_path else CONFIG
    with start(model, None, logs) as server:
        show(console, "dense", [ask(server, made[0], question) for question in made[1]])
    with start(model, config, logs) as server:
        rows = [ask(server, made[0], question) for question in made[1]]
        show(console, f"--sparse-method resa {json.dumps(config)}", rows)
        problems = failures(rows, counters(server))
        for problem in problems:
            console.print(f"failed: {problem}")
        if args.keep:
            keep(console, server)
    console.print("failed" if problems else "all answers right, prefix cache hit, decode sparse")
    return 1 if problems else 0


def keep(console: Console, server: ServerProcess) -> None:
    """Leave the server up until the user interrupts."""
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": "What is the pass key?"}]})
    console.print(f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    console.print(f"counters: curl {server.url}/server_info; Ctrl-C ends the server")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("ending the server")


if __name__ == "__main__":
    sys.exit(main())

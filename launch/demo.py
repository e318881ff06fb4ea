"""``python -m launch.demo``: sparse decode and the prefix cache, both on, on a real SGLang server.

Starts the server with the tiny model that ships with the repository, hides three numbers in a book, asks for each
through the OpenAI API, and prints what was answered, what the prefix cache had, and what decode attended to, beside
a dense server. Ends with status 0 only when all answers are right, the second and the third question hit the
prefix cache, and no sparse decode step attended to more than 15 % of the pages held.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.texts.text import FORMS, Haystack, exact_match, hide, messages, random_key, random_number, read_books
from launch.server import ServerProcess

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "eval" / "models" / "tiny-gqa"
BOOKS = ROOT / "eval" / "data"
MAX_ACTIVE = 0.15
# The demo's text is shorter than where sparsity starts to pay, so the crossover is lowered.
CONFIG = {"active_ratio": 0.1, "min_seq_len": 0, "crossover_tokens": 0}
QUESTIONS = 3


@dataclass(frozen=True)
class Row:
    """One question: what was asked, what came back, and what it cost."""

    question: str
    answer: str
    truth: str
    prompt_tokens: int
    cached_tokens: int
    pages_attended: int
    pages_held: int
    pages_summarised: int
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the answer is the truth."""
        return exact_match(self.answer, self.truth)


def make_text(tokens: int, seed: int) -> tuple[str, list[tuple[str, str]]]:
    """Hide ``QUESTIONS`` numbers in a book.

    Args:
        tokens: rough length of the text.
        seed: of the place in the book, the names and the numbers.

    Returns:
        The text and ``(name, number)`` pairs.
    """
    rng = random.Random(seed)
    (book,) = read_books(BOOKS).values()
    needles = [(random_key(rng), random_number(rng)) for _ in range(QUESTIONS)]
    records = [FORMS["needle"].record(key, value=value) for key, value in needles]
    return hide(Haystack(book).draw(rng, tokens), records, [0.15, 0.5, 0.85]), needles


def counters(server: ServerProcess) -> dict[str, Any]:
    """The sparse counters of a server; none on a dense one."""
    return server.server_info()["internal_states"][0].get("sparse", {})


def ask(server: ServerProcess, text: str, key: str, value: str) -> Row:
    """Ask for one number through the OpenAI client."""
    form = FORMS["needle"]
    before = counters(server)
    began = time.monotonic()
    answer = server.openai().chat.completions.create(
        model="default", messages=messages(text, [], form.question(key)), temperature=0, max_tokens=16
    )
    seconds = time.monotonic() - began
    after = counters(server)
    usage = answer.usage
    assert usage is not None
    # SGLang leaves the details out where nothing was cached.
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Row(
        question=form.question(key),
        answer=answer.choices[0].message.content or "",
        truth=form.answer(key, value=value),
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
            row.question,
            row.answer,
            row.truth,
            str(row.prompt_tokens),
            str(row.cached_tokens),
            share,
            str(row.pages_summarised) if row.pages_held else "-",
            f"{row.seconds:.2f} s",
        )
    console.print(table)


def failures(rows: list[Row], state: dict[str, Any]) -> list[str]:
    """Say what did not hold on the sparse server."""
    found = [f"{row.question} got {row.answer!r}, want {row.truth!r}" for row in rows if not row.right]
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


def start(sparse: bool, logs: Path) -> ServerProcess:
    """Describe a server; on a machine without a GPU the CPU platform serves."""
    flags = ["--enable-cache-report", "--page-size", "16", "--max-running-requests", "8"]
    if sparse:
        flags += ["--sparse-method", "resa", "--sparse-config", json.dumps(CONFIG)]
    return ServerProcess(MODEL, *flags, log_path=logs / ("sparse.log" if sparse else "dense.log"))


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="launch.demo", description=__doc__)
    parser.add_argument("--tokens", type=int, default=12000, help="rough length of the text (8000 to 14000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave the sparse server up and print a request to try")
    args = parser.parse_args(arguments)
    if not 8000 <= args.tokens <= 14000:
        parser.error(f"--tokens: got {args.tokens}, allowed: 8000 to 14000")
    console = Console(width=150)
    logs = Path(tempfile.mkdtemp(prefix="sglang-sparse-demo-"))
    console.print(f"server logs: {logs}")
    text, needles = make_text(args.tokens, args.seed)
    with start(False, logs) as server:
        show(console, "dense", [ask(server, text, key, value) for key, value in needles])
    with start(True, logs) as server:
        rows = [ask(server, text, key, value) for key, value in needles]
        show(console, f"--sparse-method resa {json.dumps(CONFIG)}", rows)
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

"""``python -m eval.long_generation``: how far sparse decode drifts from dense decode as an output grows longer.

A sparse step leaves approximate KV behind, which later steps read; rectification makes it exact again. To see that
apart from what a single sparse step costs, all settings are forced along the same output
(``custom_params.forced_tokens``, see `eval.live.forced`), and at checkpoints of the output their distributions of the
next token are compared with dense ones: KL(dense, sparse) over the best 50 tokens, and whether the best token is the
same.

Two texts: the output of ``book`` is what the dense server says, greedily, after a stretch of a book; each checkpoint
is the mean of the 32 positions before it. In ``records`` the output is given: numbers are told in it and one of them is
asked for at its end, see `eval.texts.windows.with_records`; each checkpoint is an output of that length, and the mean
of the positions of its answer. So the KV that is needed there was written by decode.

Settings, each over the same outputs:

- ``noise``: dense a second time. What it shows is batching and kernels, the floor of the others;
- ``off``: sparse, never rectified;
- ``every N``: sparse, rectified every N tokens: the server's own interval and those of ``--intervals``.

A server that rectifies in the place of a decode step computes one position in N densely, checkpoints included. The
figures need a server of this project for both: no other one can be forced. A dense one is the same server: its requests
say ``sparse: false``. The command ends with status 1 where the counters do not show what a setting says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import httpx

from eval.live.arms import decode_config
from eval.live.client import LiveServer, command_line, generate, list_of, positive, shown
from eval.live.counters import EvaluationError, density, moved, require_dense, require_sparse
from eval.live.forced import forced_logprobs, forced_request
from eval.live.record import Record
from eval.ppl_rectify import require_settings
from eval.scores.long_summary import plot, proven, summarise
from eval.scores.pictures import rows_of
from eval.scores.stats import TOP, TopTokens, kl, same_best
from eval.tasks.long_outputs import KINDS, NOISE, Output, Setting, checkpoints_of, make_outputs, make_settings
from eval.texts.windows import BOOK, read_tokens, require_books

COMMAND = "eval.long_generation"
ARGUMENTS = ("kind", "book", "prompt_length", "tokens", "n", "checkpoints", "intervals", "ratios", "seed")

Result = TypeVar("Result")
Distributions = dict[int, TopTokens]


def require_forcing(server: LiveServer, url: str) -> dict[str, Any]:
    """The sparse config of a server; refuses one that cannot be forced along an output."""
    try:
        return decode_config(server)
    except (EvaluationError, httpx.HTTPStatusError) as error:
        raise EvaluationError(
            f"{url} cannot be forced along an output: only a server with --sparse-method knows the field "
            "custom_params.forced_tokens. For the dense server leave --compare-url out, or start the same way one that "
            f"is asked for `sparse: false` ({error})"
        ) from error


def distributions(answer: dict[str, Any], output: Output) -> Distributions:
    """The best tokens at the scored positions of a forced output; refuses another output, and missing ones."""
    forced_logprobs(answer, output.tokens)
    found = answer["meta_info"].get("output_top_logprobs") or []
    if len(found) != len(output.tokens):
        raise EvaluationError(f"the server gave the best tokens of {len(found)} of {len(output.tokens)} positions")
    return {position: found[position] for position in output.positions()}


def divergences(output: Output, dense: Distributions, other: Distributions) -> list[dict[str, Any]]:
    """For each checkpoint ``position`` and ``scores``: means of KL in nats and of whether the best token agrees."""
    return [
        {
            "position": checkpoint.end,
            "scores": {
                "kl": round(fmean(kl(dense[p], other[p]) for p in checkpoint.positions), 9),
                "agreement": fmean(same_best(dense[p], other[p]) for p in checkpoint.positions),
            },
        }
        for checkpoint in output.checkpoints
    ]


class Run:
    """The rows of one run."""

    def __init__(self, sparse: LiveServer, dense: LiveServer, record: Record) -> None:
        self.sparse, self.dense, self.record = sparse, dense, record
        self.rows = proven(record.earlier)

    def generated(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Return the dense server's greedy continuation of each prompt, `tokens` tokens long."""

        async def work(client: httpx.AsyncClient, prompt: Sequence[int]) -> list[int]:
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": NOISE.params}
            return (await generate(client, {"input_ids": list(prompt), "sampling_params": sampling}))["output_ids"]

        found = {row["index"]: row["tokens"] for row in self.rows if row["kind"] == "output"}
        left = [i for i in range(len(prompts)) if i not in found]
        fresh = self._counted("book", NOISE, "greedy", work, [prompts[i] for i in left])
        for i, output in zip(left, fresh, strict=True):
            found[i] = output
            self._add({"kind": "output", "index": i, "tokens": output})
        return [found[i] for i in range(len(prompts))]

    def compare(self, task: str, outputs: Sequence[Output], settings: Sequence[Setting]) -> None:
        """Force the servers along the outputs of a text, and write what was not measured before."""
        done = {(row["arm"], row["id"]) for row in self.rows if row["kind"] == "item"}
        left = {s: [o for o in outputs if any((s.name, key) not in done for key in o.ids(task))] for s in settings}
        needed = [output for output in outputs if any(output in part for part in left.values())]
        answers = self._counted(task, NOISE, "dense", _forced(NOISE), needed)
        dense = dict(zip(needed, answers, strict=True))
        for setting, mine in left.items():

            async def work(client: httpx.AsyncClient, output: Output, setting: Setting = setting) -> None:
                other = await _forced(setting)(client, output)
                for key, row in zip(output.ids(task), divergences(output, dense[output], other), strict=True):
                    place = {"id": key, "task": task, "arm": setting.name, "index": output.index, **row}
                    asked = {"ratio": setting.ratio, "interval": setting.interval}
                    self._add({"kind": "item", **place, **asked, "facts": dict(output.facts)})

            self._counted(task, setting, setting.name, work, mine)

    def _counted(
        self,
        task: str,
        setting: Setting,
        arm: str,
        work: Callable[[httpx.AsyncClient, Any], Awaitable[Result]],
        items: Sequence[Any],
    ) -> list[Result]:
        """Results of `work`, once the server's counters show that the items ran as the setting says."""
        if not items:
            return []
        server = self.sparse if setting.sparse else self.dense
        before = server.counters()
        results = server.each(work, items, f"{task} {arm}")
        counts = moved(before, server.counters())
        if setting.sparse:
            require_sparse(f"{task} {arm}", counts, rectifying=bool(setting.interval))
        else:
            require_dense(f"{task} {arm}", counts)
        row = {"task": task, "arm": arm, "items": len(items), "density": density(counts), "counters": counts}
        self._add({"kind": "counters", **row})
        return results

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.record.add(**row)


def _forced(setting: Setting) -> Callable[[httpx.AsyncClient, Output], Awaitable[Distributions]]:
    async def work(client: httpx.AsyncClient, output: Output) -> Distributions:
        request = forced_request(output.prompt, output.tokens, setting.params)
        return distributions(await generate(client, {**request, "top_logprobs_num": TOP}), output)

    return work


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all texts and settings, write the file, and return the summary of `eval.scores.long_summary`."""
    checkpoints = {kind: checkpoints_of(kind, args.checkpoints, args.tokens) for kind in args.kind}
    with ExitStack() as stack:
        urls = dict.fromkeys([args.base_url, args.compare_url or args.base_url])
        servers = {url: stack.enter_context(LiveServer(url, args.concurrency, args.timeout)) for url in urls}
        sparse, dense = servers[args.base_url], servers[args.compare_url or args.base_url]
        facts = dict(zip(("base", "compare"), (server.facts() for server in servers.values()), strict=False))
        config = {url: require_forcing(server, url) for url, server in servers.items()}[args.base_url]
        longest = max(max(found) for found in checkpoints.values())
        settings = make_settings(config, args.ratios, args.intervals, longest)
        ratios = args.ratios or [config[name] for name in ("active_ratio",) if name in config]
        if ratios:
            length = args.prompt_length + min(min(found) for found in checkpoints.values())
            require_settings(config, args.prompt_length, length, ratios)
        books = read_tokens(args.book, dense.tokenize)
        arguments = {name: getattr(args, name) for name in ARGUMENTS}
        header = {"arguments": arguments, "label": args.label, "servers": facts}
        with Record(args.out, COMMAND, args.revision, resume=True, **header) as record:
            work = Run(sparse, dense, record)
            for kind in args.kind:
                outputs = make_outputs(kind, books, args, checkpoints[kind], dense.tokenize, work.generated)
                work.compare(kind, outputs, settings)
            summary = summarise(work.rows, args.seed)
            for row in summary:
                record.add("summary", **row)
    return summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as a server is not needed for it."""
    parser = command_line(COMMAND, __doc__)
    parser.add_argument("--base-url", help="the sparse server")
    parser.add_argument("--compare-url", help="the dense server (default: the sparse one, asked for `sparse: false`)")
    parser.add_argument("--out", type=Path, help="JSONL file; a run that was interrupted goes on")
    parser.add_argument("--plot", type=Path, help="path without a suffix, for a picture as SVG")
    parser.add_argument("--from", type=Path, dest="file", help="take the figures of this JSONL file, without a server")
    parser.add_argument("--kind", type=list_of(str, KINDS), default="book", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--book", action="append", help=f"text file; repeat for more (default: {BOOK.name})")
    parser.add_argument("--prompt-length", type=positive, default=4096, help="tokens of the prompts")
    parser.add_argument("--tokens", type=positive, default=1024, help="tokens of the longest output")
    parser.add_argument("--checkpoints", type=list_of(int), help="positions of the output (default: powers of two)")
    parser.add_argument("--n", type=positive, default=20, help="prompts of each text")
    parser.add_argument("--intervals", type=list_of(int), default="", help="beside never and the server's own one")
    parser.add_argument("--ratios", type=list_of(float), default="", help="shares of the pages (default: the server's)")
    parser.add_argument("--concurrency", type=positive, default=16, help="outputs in flight")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of one request")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and the bootstrap")
    args = parser.parse_args(arguments)
    require_books(parser, args.book)
    args.book = args.book or [str(BOOK)]
    if args.file is None and (args.base_url is None or args.out is None):
        parser.error("--base-url and --out are needed, or --from")
    if not all(0 < ratio < 1 for ratio in args.ratios):
        parser.error(f"--ratios {args.ratios}: allowed is between 0 and 1, both left out")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    args = parse(arguments)

    def measured() -> list[dict[str, Any]]:
        summary = summarise(rows_of(args.file, COMMAND), args.seed) if args.file else run(args)
        if args.plot:
            plot(summary, args.plot)
        return summary

    return shown(COMMAND, measured, float_format="{:.5f}".format)


if __name__ == "__main__":
    sys.exit(main())

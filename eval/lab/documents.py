"""Tables and pictures of this repository's documents, and of result files that commands of the lab write.

``python -m eval.lab.documents FILE|FOLDER ... [--out FOLDER]`` is `eval.report` for files of the lab's commands too. A
file that ends in ``.json`` is taken for a table of ``sglang_sparse.tune``.

``python -m eval.lab.documents`` writes every table between ``<!-- report: NAME -->`` and ``<!-- report end -->`` in the
documents of this repository anew, from eval/lab/results, in the card of tiny-mla too, and draws the pictures of
eval/lab/docs. With ``--check`` nothing is written, and the status is 1 where a document says something else, or a file
of ``eval.lab.bench_decode`` has other figures of a dense peer than the file that it names.

``python -m eval.lab.documents --goals`` prints the goals of speed beside what was measured; `eval.lab.tables.goals`
says which row counts.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from eval import ppl_prefill, report
from eval.lab.agreement import agreement
from eval.lab.kernels import dsa, mla, prefill
from eval.lab.selection import page_tables
from eval.lab.servers import decode, deployments, profile, throughput
from eval.lab.servers.decode_peers import outdated_peers
from eval.lab.tables import (
    cards,
    crossover,
    files,
    first_tokens,
    goals,
    identities,
    lossless,
    needles,
    quality,
    weights,
)
from eval.lab.toolchain import compiled
from eval.live.counters import EvaluationError
from eval.live.record import result_files
from eval.scores import tables
from eval.scores.verdicts import read_folder
from eval.serving import report as serving

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "eval" / "lab" / "results"
COMPARISON = RESULTS / "compare-tiny-gqa"
CROSSOVERS = ROOT / "sglang_sparse" / "attention" / "crossover.json"
PAGES = ROOT / "sglang_sparse" / "docs"
DOCS = ROOT / "eval" / "lab" / "docs"
# Pictures that README and the pages of users show.
IMAGES, SHOWN = PAGES / "images", ("serving-qwen3-8b", "bench_prefill_skip_softmax")
CARD = ROOT / "eval" / "models" / "tiny-mla" / "README.md"
DOCUMENTS = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(PAGES.rglob("*.md")), CARD)
BLOCK = re.compile(r"(<!-- report: ([\w-]+) -->\n)(.*?)(<!-- report end -->)", re.S)

PROFILE = "profile-qwen3-1.7b-1x256k"
SERVING = ("serving-qwen3-1.7b", "serving-qwen3-8b", "serving-v2-lite-contexts")
THROUGHPUT = "throughput-qwen3-8b"
QUALITY = "Qwen2.5-Coder-0.5B-Instruct"
FIRST_TOKEN = "first-token-qwen3-8b"
SKIP_PREFILL, SKIP_SERVED = "bench_prefill_skip_softmax", "prefill-skip-softmax-qwen3-8b"
SKIP_FIRST_TOKEN = "first-token-skip-softmax-qwen3-8b"
FIRST_TOKEN_FILES = tuple(f"{FIRST_TOKEN}-{part}" for part in ("8k", "16k", "short"))
NEEDLES = (
    *(
        f"niah-tiny-gqa-{name}"
        for name in (
            "anchor",
            "few",
            "fine",
            "layers",
            "lookup",
            "prefilled",
            "resa-layers",
            "rocketkv-topk",
            "rocketkv-compact",
        )
    ),
    *(f"{suite}-tiny-gqa-skip_softmax" for suite in ("niah", "infinitebench")),
    *(f"niah-tiny-dsa-{name}" for name in ("auto", "portable")),
    *(f"niah-tiny-mla-{name}" for name in ("robsa", "random_blocks", "sink_window", "skip_softmax")),
    *("infinitebench-tiny-mla", "infinitebench-tiny-gqa-anchor"),
)
TAILS = "-tail-"
# Which goals are whose.
GOALS = {
    "resa": ("K1", "K2", "K3", "K4", "E1", "E2", "E3", "E9", "R1", "R2"),
    "robsa": ("K6", "E5"),
    "rocketkv": ("K5", "E4"),
    "dsa": ("K7", "K8", "K12", "K13"),
    "anchor": ("K9", "E6"),
    "skip_softmax": ("K10", "K11", "E7"),
}
# Those of README: one a method, met or missed.
SHORT = (
    *("K7: 1x128k", "E2: 6x128k", "E4: visibility", "E5: 24x128k, all sensitive"),
    *("E6: 128k, chunks of 8k", "E7: 128k"),
)


def _file(name: str, folder: Path = RESULTS) -> Path:
    """A file of the results by its name without suffixes."""
    return result_files(folder)[name]


def _measured(name: str, made: Callable[[Path], str]) -> str:
    """The table of a file that may not be there yet."""
    path = result_files(RESULTS).get(name)
    return made(path) if path else f"Not measured yet: `eval/lab/results` has no `{name}.jsonl`."


def _starting(*prefixes: str) -> list[Path]:
    """The files of the results whose names begin so."""
    return [path for name, path in result_files(RESULTS).items() if name.startswith(prefixes)]


BLOCKS: Mapping[str, Callable[[], str]] = {
    "decode": lambda: decode.decode(
        *sorted(RESULTS.glob("bench-decode-*.jsonl")), beside=sorted(RESULTS.glob("dense-*-fp8-*.jsonl"))
    ),
    "memory": lambda: decode.memory(*sorted(RESULTS.glob("bench-decode-*.jsonl"))),
    "profile": lambda: profile.before_and_after(_file(f"{PROFILE}-before"), _file(PROFILE)),
    "profile-pass": lambda: _measured("profile-pass-qwen3-8b-6x128k", profile.profile),
    "kernels": lambda: files.kernels(RESULTS / "bench_kernels.jsonl"),
    "kernels-votes": lambda: files.kernels(RESULTS / "bench_kernels-votes.jsonl", "score+topk+decode"),
    "kernels-fp8": lambda: _measured("bench_kernels_fp8", files.kernels),
    "crossover": lambda: crossover.crossover_table(CROSSOVERS),
    "compiled": lambda: compiled.compiled(_file("compiled-kernels")),
    "goals": lambda: goals.goals_table(RESULTS),
    "goals-of-all": lambda: goals.goals_table(RESULTS, ids=sum(GOALS.values(), ()), left_out=("id", "result file")),
    "goals-short": lambda: goals.goals_table(RESULTS, ids=SHORT, left_out=goals.FEWEST),
    **{f"goals-{method}": partial(goals.goals_table, RESULTS, ids=ids) for method, ids in GOALS.items()},
    "prefill": lambda: prefill.prefill(RESULTS / "bench_prefill.jsonl"),
    "framework": lambda: files.kernels(_file("bench_framework")),
    "prefill-skip-softmax": lambda: prefill.prefill(_file(SKIP_PREFILL)),
    "prefill-skip-softmax-served": lambda: prefill.prefill(_file(SKIP_SERVED)),
    "first-token-skip-softmax": lambda: first_tokens.first_tokens([_file(SKIP_FIRST_TOKEN)]),
    "mla": lambda: mla.mla(_file("bench_mla")),
    "serving-v2-lite": lambda: serving.serving(_file("serving-v2-lite")),
    "throughput": lambda: throughput.throughput(_file(THROUGHPUT)),
    "deployments": lambda: deployments.deployments(*_starting("deployments-")),
    "native": lambda: deployments.beside_stock(*_starting("native-")),
    "first-token": lambda: first_tokens.first_tokens([_file(name) for name in FIRST_TOKEN_FILES]),
    "dsa": lambda: _measured("bench_dsa", dsa.dsa),
    "dsa-attention": lambda: _measured("bench_dsa_attention", dsa.dsa),
    "dsa-agreement": lambda: _measured("dsa_agreement", agreement.agreement),
    "comparison": lambda: tables.comparison_table(read_folder(COMPARISON)),
    "comparison-2000": lambda: tables.comparison_table(read_folder(RESULTS / "compare-tiny-gqa-2000")),
    "local-pages-1": lambda: tables.questions(_file("ruler-local-pages-1")),
    "drift": lambda: tables.drift(_file("long_generation", COMPARISON)),
    "agreement": lambda: files.agreements(RESULTS / "agreement-tiny-gqa"),
    "tiny-mla": lambda: files.backends(sorted(RESULTS.glob("niah-tiny-mla-*"))),
    "page-statistics": lambda: page_tables.statistics(sorted((RESULTS / "real").glob("page-statistics-*"))),
    "page-answers": lambda: page_tables.answers(_file("page-answers-qwen2.5-coder-0.5b", RESULTS / "real")),
    "quality": lambda: "\n\n".join(quality.quality_tables(RESULTS / "real")),
    "lossless": lambda: lossless.acceptance(sorted(RESULTS.glob("lossless-*"))),
    "lossless-speed": lambda: lossless.speed(sorted(RESULTS.glob("lossless-*"))),
    "chains": lambda: decode.decode(*sorted(RESULTS.glob("chain-*"))),
    "quality-perplexity": lambda: quality.perplexities(RESULTS / "real"),
    "quality-drift": lambda: tables.drift(_file(f"{QUALITY.lower()}-resa-drift", RESULTS / "real")),
    "quality-theta": lambda: quality.thetas(sorted((RESULTS / "real").glob("*-anchor.json"))),
    "needles": lambda: needles.needles([path for path in _starting(*NEEDLES) if TAILS not in path.name]),
    "needles-tail": lambda: needles.needles([path for path in _starting("niah-tiny-gqa") if TAILS in path.name]),
    "identity": lambda: identities.identities(sorted(RESULTS.glob("identity-*"))),
    "prefill-perplexity": lambda: ppl_prefill.perplexities(sorted(RESULTS.glob("ppl-prefill-*"))),
    "prefill-records": lambda: ppl_prefill.perplexities(_starting("ppl-records-")),
    "tiny-mla-layers": lambda: cards.layers(weights.calibration("tiny-mla")),
    "rectification": lambda: weights.rectification(_file("ppl-rectify-records")),
    "rectification-mla": lambda: weights.rectification(*_starting("ppl-rectify-mla"), judged=32),
    "rectification-books": lambda: weights.rectification(_file("ppl-rectify-book")),
}
PICTURES: Mapping[str, Callable[[], Path]] = {
    **{name: partial(_file, name) for name in ("ppl-rectify-records", *SERVING, THROUGHPUT, SKIP_FIRST_TOKEN)},
    **{name: partial(_file, name) for name in ("bench_prefill", SKIP_PREFILL, "bench_framework")},
    "compare-niah": partial(_file, "niah", COMPARISON),
    "compare-long-generation": partial(_file, "long_generation", COMPARISON),
    "crossover": lambda: CROSSOVERS,
}


def fill(document: str) -> str:
    """A document with its tables made anew.

    Raises:
        EvaluationError: a table has a name that nobody knows.
    """

    def made(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise EvaluationError(f"no table is called {match[2]!r}: there are {', '.join(BLOCKS)}")
        return f"{match[1]}{BLOCKS[match[2]]()}\n{match[4]}"

    return BLOCK.sub(made, document)


def documents(check: bool) -> int:
    """Write the documents and pictures, or only look whether the documents are right.

    Returns:
        The exit status.
    """
    status = 0
    for path in DOCUMENTS:
        old = path.read_text()
        new = fill(old)
        if check and new != old:
            name = path.relative_to(ROOT).as_posix()
            sys.stderr.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "results"))
            status = 1
        elif not check:
            path.write_text(new)
    if check:
        for line in outdated_peers(RESULTS):
            print(f"eval.lab.documents: {line}", file=sys.stderr)
            status = 1
    else:
        draw_pictures()
    return status


def draw_pictures() -> None:
    """Draw the pictures that documents show."""
    for name, file in PICTURES.items():
        files.draw(file(), (IMAGES if name in SHOWN else DOCS) / name)
    serving.plot(first_tokens.cells_of([_file(name) for name in FIRST_TOKEN_FILES]), IMAGES / FIRST_TOKEN)
    quality.plot(quality.read_folder(RESULTS / "real")[QUALITY], IMAGES / f"quality-{QUALITY.lower()}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="eval.lab.documents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="result files, or folders of eval.compare")
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    parser.add_argument("--check", action="store_true", help="compare this repository's documents with its results")
    parser.add_argument("--goals", action="store_true", help="print the goals of speed and what was measured")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that --goals looks into")
    args = parser.parse_args(arguments)
    try:
        if args.goals:
            print(goals.goals_table(args.results))
            return 0
        if not args.paths:
            return documents(args.check)
        report.show(args.paths, args.out, files.TABLES, files.PICTURES)
    except (EvaluationError, OSError) as error:
        print(f"eval.lab.documents: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables and pictures of result files.

``python -m eval.report FILE|FOLDER ... [--out FOLDER]`` prints the table of each result file, or of a folder of
``eval.compare``, as Markdown, and with ``--out`` draws its picture as SVG.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from eval import ppl_prefill
from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_rows, result_files
from eval.scores import long_summary, ppl_summary
from eval.scores.pictures import heatmap
from eval.scores.tables import comparison_table, drift, questions, rectification
from eval.scores.verdicts import read_folder
from eval.serving import report as serving

Tables = Mapping[str, Callable[[Path], str]]
Pictures = Mapping[str, Callable[[Path, Path], object]]


def _needles(path: Path, stem: Path) -> None:
    items = [row for row in read_rows(path) if row["kind"] == "item" and not row.get("failed")]
    for arm in dict.fromkeys(row["arm"] for row in items):
        heatmap([row for row in items if row["arm"] == arm], f"{stem}-{arm}")


# By the name of the command that wrote the file; others have the table of a suite of questions, and no picture.
TABLES: Tables = {
    "ppl_rectify": rectification,
    "ppl_prefill": lambda path: ppl_prefill.perplexities([path]),
    "long_generation": drift,
    "bench_serving": serving.serving,
}

PICTURES: Pictures = {
    "ppl_rectify": lambda path, stem: ppl_summary.plot(ppl_summary.summarise(read_rows(path)), Path(f"{stem}.svg")),
    "long_generation": lambda path, stem: long_summary.plot(long_summary.summarise(read_rows(path)), stem),
    "bench_serving": serving.draw,
    "niah": _needles,
}


def written_by(path: Path) -> str:
    """Name of the command that wrote a file of results: ``sglang_sparse.tune`` writes ``.json``."""
    if path.suffix == ".json":
        return "tune"
    rows = read_rows(path)
    if not rows or not (name := command_name(rows[0].get("command"))):
        raise EvaluationError(f"{path} is no file of results: its first line is no header")
    return name


def any_table(path: Path, tables: Tables = TABLES) -> str:
    """The table of a file or a folder of results."""
    if path.is_dir():
        return comparison_table(read_folder(path))
    return tables.get(written_by(path), questions)(path)


def draw(path: Path, stem: Path, pictures: Pictures = PICTURES) -> None:
    """Draw a result file as SVG, if there is a picture of its kind, to a path without a suffix."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    if drawn := pictures.get(written_by(path)):
        drawn(path, stem)


def show(paths: Iterable[Path], out: Path | None, tables: Tables = TABLES, pictures: Pictures = PICTURES) -> None:
    """Print the table of each file or folder, and draw the pictures into the folder `out`."""
    for path in paths:
        print(f"**{path}**\n\n{any_table(path, tables)}\n")
        files = result_files(path) if path.is_dir() else {Path(path.name.removesuffix(".xz")).stem: path}
        if out is not None:
            for stem, file in files.items():
                draw(file, out / stem, pictures)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="eval.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="result files, or folders of eval.compare")
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    args = parser.parse_args(arguments)
    try:
        show(args.paths, args.out)
    except (EvaluationError, OSError) as error:
        print(f"eval.report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

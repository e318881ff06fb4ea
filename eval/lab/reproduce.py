"""``python -m eval.lab.reproduce``: all that this project claims about speed, measured on the GPU of this machine.

    python -m eval.lab.reproduce --out measured
    python -m eval.lab.reproduce --out measured e1 e2 --budget-seconds 1200

What is measured together is a leg of ``eval/lab/legs/legs.toml``: one server, if it needs one, and commands of
``eval``, each with one file in the folder. ``--list`` says which goals (`eval/lab/goals.json`) a leg measures,
``--dry-run`` how its server and its commands are started, so that each can be run by hand. Without names all legs run,
one after the other. Output goes to ``LEG.log`` and ``LEG.server.log`` in the folder; at the end stands the table of the
goals. A command that reads the file of another leg is left out where that is missing, which counts as failed.

The same command goes on where it was interrupted: a file that is complete and of the same revision is not measured
again, unless the run that wrote it failed. ``--only 1x256k`` measures a leg of many minutes in parts: the commands with
that in the name of their file. A checkout that differs from its revision has none to compare; give ``--revision`` where
you know better. ``--budget-seconds`` begins no leg later than that; a leg that has begun ends.

The exit status is 1 where a leg failed; legs that the budget left are named and do not count as failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval.lab.legs.leg import LEGS, MODELS, Leg
from eval.lab.legs.runner import ended, refuse_folder, run_legs
from eval.lab.servers import model_shapes
from eval.lab.tables.goals import goals_table, read_goals
from eval.live.counters import EvaluationError
from eval.live.record import git_revision
from eval.scores.tables import table, text

COMMAND = "eval.lab.reproduce"
# Of the lines of a dry run.
PORT = 30000


def legs_table(legs: Sequence[Leg]) -> str:
    """The legs as Markdown, a line each."""
    goals = read_goals()
    rows = [
        {
            "leg": leg.name,
            "goals": leg.claims(goals),
            "files": ", ".join(command.file for command in leg.commands),
            "starts": leg.starts(),
        }
        for leg in legs
    ]
    return table(rows, [(name, text(name)) for name in ("leg", "goals", "files", "starts")])


def dry_run(leg: Leg, folder: Path, revision: str | None) -> str:
    """The command lines of a leg, for a shell in the root of the repository."""
    lines = [f"# {leg.name}: {', '.join(one.file for one in leg.commands)}"]
    ports = range(PORT, PORT + len(leg.servers))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for server, port, url in zip(leg.servers, ports, urls, strict=True):
        if server.model in model_shapes.SHAPES:
            make = f"model_shapes.write({json.dumps(server.model)}, Path({json.dumps(str(folder / MODELS))}))"
            make = f"from pathlib import Path; from eval.lab.servers import model_shapes; {make}"
            lines.append(shlex.join(["python", "-c", make]))
        begin = [f"{name}={value}" for name, value in server.environment]
        begin += ["python", "-m", "sglang.launch_server", "--model-path", str(server.model_path(folder))]
        lines.append(shlex.join([*begin, "--port", str(port), *server.arguments()]))
        lines.append(f"# once {url}/health answers 200, in another shell:")
    return "\n".join(
        [*lines, *(shlex.join(["python", "-m", *one.line(folder, urls, revision)]) for one in leg.commands)]
    )


def chosen(names: Sequence[str], legs: Sequence[Leg]) -> list[Leg]:
    """Legs by name, each once; without names all of them.

    Raises:
        EvaluationError: there is no such leg; names those that there are.
    """
    known = {leg.name: leg for leg in legs}
    if wrong := [name for name in names if name not in known]:
        raise EvaluationError(f"no leg is called {', '.join(map(repr, wrong))}: there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def narrowed(legs: Sequence[Leg], part: str) -> list[Leg]:
    """Legs with those of their commands alone whose file has `part` in its name; without the legs that have none.

    Raises:
        EvaluationError: no command is left; names the files that there are.
    """
    kept = [replace(leg, commands=tuple(one for one in leg.commands if part in one.file)) for leg in legs]
    if not any(leg.commands for leg in kept):
        files = ", ".join(one.file for leg in legs for one in leg.commands)
        raise EvaluationError(f"--only {part!r}: no file of these legs is called like that: there are {files}")
    return [leg for leg in kept if leg.commands]


def refuse_no_gpu() -> None:
    """Refuse a machine without a GPU.

    Raises:
        EvaluationError: as said.
    """
    import torch

    if not torch.cuda.is_available():
        raise EvaluationError("speed is measured on a CUDA device, and torch finds none")


def run(args: argparse.Namespace, wanted: Sequence[Leg], legs: Sequence[Leg]) -> int:
    """Measure.

    Args:
        args: the command line.
        wanted: the legs to run.
        legs: all that there are.

    Returns:
        The exit status.

    Raises:
        EvaluationError: nothing can be measured here, or a file in the folder is none of results.
    """
    refuse_folder(args.out)
    refuse_no_gpu()
    revision = args.revision or git_revision()
    resume = bool(args.revision) or not (revision.endswith("+") or revision == "unknown")
    if not resume:
        print(f"revision {revision!r} says not which code this is: nothing counts as measured; see --revision")
    return run_legs(COMMAND, args.out, revision, wanted, legs, goals_table, resume, args.budget_seconds)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("legs", nargs="*", metavar="LEG", help="of --list (default: all, in its order)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where results, logs and models go")
    parser.add_argument("--budget-seconds", type=float, metavar="N", help="begin no leg later than that")
    parser.add_argument("--only", metavar="TEXT", help="of these legs the commands whose file has this in its name")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--list", action="store_true", help="print the legs and start nothing")
    shown.add_argument("--dry-run", action="store_true", help="print the command lines and start nothing")
    args = parser.parse_args(arguments)
    if args.out is None and not (args.list or args.dry_run):
        parser.error("--out FOLDER is needed")
    if args.budget_seconds is not None and not args.budget_seconds > 0:
        parser.error(f"--budget-seconds must be more than 0, got {args.budget_seconds:g}")
    return args


def main(arguments: list[str] | None = None, legs: Sequence[Leg] = LEGS) -> int:
    """Run the command; exit status 1 where a leg failed or nothing can be measured."""
    args = parse(arguments)

    def action() -> int:
        wanted = chosen(args.legs, legs)
        wanted = narrowed(wanted, args.only) if args.only else wanted
        if args.list:
            print(legs_table(wanted))
        elif args.dry_run:
            print("\n\n".join(dry_run(leg, args.out or Path("FOLDER"), args.revision) for leg in wanted))
        else:
            return run(args, wanted, legs)
        return 0

    return ended(COMMAND, args.out, action)


if __name__ == "__main__":
    # Ended like that, it would leave servers behind that hold the GPU's memory.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

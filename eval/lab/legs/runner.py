"""Runs legs, those of ``eval.lab.reproduce`` and of ``eval.lab.quality``, and knows which of them are done."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eval.lab.legs.leg import MODELS, Command, Leg, Server
from eval.lab.servers import model_shapes
from eval.live.counters import EvaluationError
from eval.live.record import Record, read_rows, summarised
from launch.server import ServerProcess

# What was run into a folder, a row of kind "run" each: the status tells files of failed runs from good ones.
RUNS = "reproduce.jsonl"
START_TIMEOUT = 900.0
STOP_TIMEOUT = 60.0
REASON = re.compile(r"\w(Error|Exception)\b|\b[Ee]rror:")


def last_error(text: str) -> str:
    """The last line of a log that names an error; where none does, its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if REASON.search(line)), lines[-1] if lines else "it printed nothing")


class Runner:
    """Runs legs into a folder.

    Args:
        folder: of the results.
        revision: of the code.
        record: `RUNS` of the folder, opened to go on.
        resume: whether files of the same revision count as done.
        legs: all that there are, not only those that run: which of them makes what another one reads.
    """

    def __init__(self, folder: Path, revision: str, record: Record, resume: bool, legs: Sequence[Leg]) -> None:
        self.folder, self.revision, self.record, self.resume = folder, revision, record, resume
        self.makers = {command.file: leg.name for leg in legs for command in leg.commands}
        self.last = {row["file"]: row for row in record.earlier if row["kind"] == "run"}

    def finished(self, command: Command) -> bool:
        """Whether a command's file is there, complete, of this revision, and not of a run that failed.

        Of files that are no JSONL only the last run tells.

        Raises:
            EvaluationError: the file is no file of results.
        """
        path, last = self.folder / command.file, self.last.get(command.file)
        if not self.resume or not path.exists() or (last and last["status"]):
            return False
        if path.suffix != ".jsonl":
            return last is not None and last["revision"] == self.revision
        header = next(iter(read_rows(path)), {})
        return header.get("revision") == self.revision and summarised(path)

    def run(self, leg: Leg, todo: Sequence[Command]) -> bool:
        """Run what is left of a leg.

        Args:
            leg: the leg.
            todo: those of its commands that are not `finished`.

        Returns:
            Whether all of it is done now.
        """
        for command in leg.commands:
            if command not in todo:
                self.say(leg, command, f"skipped, complete at revision {self.revision}")
        if not todo:
            return True
        with contextlib.ExitStack() as stack:
            # Not for commands that cannot run.
            ready = any(not self.lacking(leg, command) for command in todo)
            servers: list[ServerProcess] = []
            try:
                for one in leg.servers if ready else ():
                    servers.append(self.start(leg, one, stack))
            except (RuntimeError, TimeoutError) as error:
                how, log = str(error).split("; its log")[0], self.server_log(leg, leg.servers[len(servers)])
                print(f"{leg.name}: {how}: {last_error(log.read_text(errors='replace'))} ({log})")
                return False
            return self.commands(leg, todo, servers)

    def lacking(self, leg: Leg, command: Command) -> list[str]:
        """The files of other legs that a command reads and that are not there, or unfinished; each with its leg."""
        own = {one.file for one in leg.commands}
        return [
            f"{file}, which leg {self.makers[file]} makes"
            for file in command.reads()
            if file not in own and not summarised(self.folder / file)
        ]

    def start(self, leg: Leg, server: Server, stack: contextlib.ExitStack) -> ServerProcess:
        """Start a leg's server, which ends with `stack`.

        Raises:
            RuntimeError: it ended instead.
            TimeoutError: it was not ready in time.
        """
        if server.model in model_shapes.SHAPES:
            model_shapes.write(server.model, self.folder / MODELS)
        model, log = server.model_path(self.folder), self.server_log(leg, server)
        env = dict(server.environment)
        if "PYTHONPATH" in env:
            # Beside what this process needs itself.
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (env["PYTHONPATH"], os.environ.get("PYTHONPATH"))))
        process = ServerProcess(model, *server.arguments(), log_path=log, env=env, timeout=START_TIMEOUT)
        stack.enter_context(process)
        print(f"{leg.name}: server of {server.model} is ready after {process.start_seconds:.0f} s", flush=True)
        return process

    def server_log(self, leg: Leg, server: Server) -> Path:
        """Return the path of the log of a server of a leg."""
        place = leg.servers.index(server)
        return self.folder / f"{leg.name}.server{place or ''}.log"

    def commands(self, leg: Leg, todo: Sequence[Command], servers: Sequence[ServerProcess]) -> bool:
        """Run commands on servers that are up, but those that need a file that is not there or of one that failed.

        Returns:
            Whether all went well.
        """
        failed: list[Command] = []
        for command in todo:
            missing = [other.file for other in failed if command.needs(other)]
            if missing := [*missing, *self.lacking(leg, command)]:
                self.say(leg, command, f"left out, it needs {', and '.join(missing)}")
                failed.append(command)
            elif not self.command(leg, command, [one.url for one in servers]):
                failed.append(command)
                for one in servers:
                    if one.process and one.process.poll() is not None:
                        print(f"{leg.name}: the server ended: {last_error(one.log())} ({one.log_path})")
                        return False
        return not failed

    def command(self, leg: Leg, command: Command, urls: Sequence[str]) -> bool:
        """Run one command, with its output in the leg's log.

        Returns:
            Whether its exit status is 0.
        """
        log = self.folder / f"{leg.name}.log"
        began = time.monotonic()
        with log.open("a") as output:
            status = call([sys.executable, "-m", *command.line(self.folder, urls, self.revision)], output.fileno())
        seconds = round(time.monotonic() - began, 1)
        row = {"leg": leg.name, "module": command.module, "file": command.file, "revision": self.revision}
        self.record.add("run", **row, status=status, seconds=seconds)
        printed = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = f": {printed[-1].strip() if printed else 'it printed nothing'} ({log})"
        self.say(leg, command, f"{seconds} s, status {status}{why if status else ''}")
        return status == 0

    @staticmethod
    def say(leg: Leg, command: Command, what: str) -> None:
        """Print a command's one line."""
        print(f"{leg.name}: {command.module}, {command.file}: {what}", flush=True)


def call(line: Sequence[str], output: int) -> int:
    """Run a program to its end; where this one is interrupted, it gets the time to end its own servers.

    Args:
        line: of the program.
        output: file descriptor of stdout and stderr.

    Returns:
        Its exit status.
    """
    # Of a session of its own, so that it is not interrupted twice.
    process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
        process.kill()
        raise


def refuse_folder(folder: Path) -> None:
    """Refuse what cannot become a folder.

    Raises:
        EvaluationError: it is a file, or below one.
    """
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise EvaluationError(f"--out {folder}: {above} is a file, wanted is a folder")


def run_legs(
    command: str,
    folder: Path,
    revision: str,
    wanted: Sequence[Leg],
    legs: Sequence[Leg],
    tables: Callable[[Path], str],
    resume: bool = True,
    budget: float | None = None,
    tokens: Callable[[Command], int] | None = None,
) -> int:
    """Run what is left of legs, then print what came out, what the budget left and what failed.

    Args:
        command: whose legs they are.
        folder: of the results.
        revision: of the code.
        wanted: the legs to run.
        legs: all that there are.
        tables: of the results, from their folder.
        resume: whether files of the same revision count as done.
        budget: seconds after which no leg begins.
        tokens: what a command reads; after each leg it is said how long the rest will take at the pace so far.

    Returns:
        The exit status: 1 where a leg failed.

    Raises:
        EvaluationError: a file in the folder is none of results.
    """
    failed, left = [], []
    with Record(folder / RUNS, "eval.lab.reproduce", revision, resume=True) as record:
        runner = Runner(folder, revision, record, resume, legs)
        # All at once: a file that cannot be read is found before hours are spent.
        plan = [(leg, [one for one in leg.commands if not runner.finished(one)]) for leg in wanted]
        began, read = time.monotonic(), 0
        to_read = sum(tokens(one) for _, todo in plan for one in todo) if tokens else 0
        if tokens:
            print(f"{len(plan)} arms, {to_read / 1e6:.1f} M tokens of prompts to read", flush=True)
        for leg, todo in plan:
            if todo and budget is not None and time.monotonic() - began >= budget:
                left.append(leg.name)
            elif not runner.run(leg, todo):
                failed.append(leg.name)
            read += sum(map(tokens, todo)) if tokens else 0
            if 0 < read < to_read:
                rest = (time.monotonic() - began) / read * (to_read - read) / 60
                print(f"{read / to_read:.0%} read, about {rest:.0f} minutes to go", flush=True)
    if left:
        print(f"the budget of {budget:g} s is spent, left are: {', '.join(left)}")
    print(f"\n{tables(folder)}")
    if failed:
        print(f"{command}: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def ended(command: str, folder: Path | None, action: Callable[[], int]) -> int:
    """The exit status of what a command does: 1 where it is refused, 130 where it is interrupted, which say so."""
    try:
        return action()
    except (EvaluationError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{command}: interrupted; the same command goes on with {folder}", file=sys.stderr)
        return 130

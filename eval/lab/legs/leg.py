"""The measurements of ``eval.lab.reproduce``, leg by leg, read from ``legs.toml``."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from eval.lab.servers.model_shapes import SHAPES
from eval.lab.tables.goals import Goal

# In the arguments of a command: the URL of its leg's server, of those beside it, and the folder of the results.
URL, URLS_BESIDE, FOLDER = "{url}", ("{url1}", "{url2}"), "{folder}"
MODELS = "models"


@dataclass(frozen=True)
class Server:
    """A server of SGLang that the commands of a leg ask.

    Attributes:
        model: of `eval.lab.servers.model_shapes.SHAPES`, which gets dummy weights, or the path of a checkpoint.
        flags: further arguments of its command line.
        environment: variables that it is started with, names and values.
    """

    model: str
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def model_path(self, folder: Path) -> Path:
        """Return the path of the model; that of a shape is written into the folder of the results."""
        return folder / MODELS / self.model if self.model in SHAPES else Path(self.model)

    def arguments(self) -> list[str]:
        """Of its command line, but for model and port."""
        return [*(["--load-format", "dummy"] if self.model in SHAPES else []), *self.flags]


@dataclass(frozen=True)
class Command:
    """One command, which writes one file.

    Attributes:
        module: what ``python -m`` runs.
        file: name of what it writes in the folder of the results: JSONL with a summary, where it is one of ``eval``.
        arguments: but for ``--out`` and ``--revision``; ``{url}``, ``{url1}`` and so on, and ``{folder}`` stand for
            what is known later.
        goals: of ``eval/lab/goals.json`` that its file has: ids, or "id: part" for one part alone.
    """

    module: str
    file: str
    arguments: tuple[str, ...] = ()
    goals: tuple[str, ...] = ()

    def line(self, folder: Path, urls: Sequence[str], revision: str | None = None) -> list[str]:
        """Module and arguments, with the URLs of the leg's servers."""
        known = {FOLDER: str(folder), **dict(zip((URL, *URLS_BESIDE), urls, strict=False))}
        filled = [_replaced(argument, known) for argument in self.arguments]
        # Only commands of eval keep the revision in their files.
        tail = ["--revision", revision] if revision and self.module.startswith("eval.") else []
        return [self.module, *filled, "--out", str(folder / self.file), *tail]

    def reads(self) -> list[str]:
        """Names of the files in the folder of the results that other commands make for it."""
        return [argument.removeprefix(f"{FOLDER}/") for argument in self.arguments if argument.startswith(f"{FOLDER}/")]

    def needs(self, other: Command) -> bool:
        """Whether it reads the file of another one."""
        return other.file in self.reads()

    def claims(self, goal: Goal) -> bool:
        """Whether its file is to have the row of a goal."""
        return goal.id in self.goals or f"{goal.id}: {goal.part}" in self.goals


def _replaced(argument: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        argument = argument.replace(name, value)
    return argument


@dataclass(frozen=True)
class Leg:
    """Measurements made together, on no server, on one or on several.

    Attributes:
        name: on the command line.
        commands: in their order.
        server: that is started for them; None where they need none or start their own.
        beside: further ones that stand at the same time, two at most.
    """

    name: str
    commands: tuple[Command, ...]
    server: Server | None = None
    beside: tuple[Server, ...] = ()

    @property
    def servers(self) -> tuple[Server, ...]:
        """All of them, in the order in which they are started."""
        return (self.server, *self.beside) if self.server else ()

    def claims(self, goals: Iterable[Goal]) -> str:
        """The goals that it measures, as ``--list`` prints them."""
        mine = [goal for goal in goals if any(command.claims(goal) for command in self.commands)]
        return "; ".join(f"{goal.id}: {goal.part}" for goal in mine)

    def starts(self) -> str:
        """Describe the servers that it starts, as ``--list`` prints them."""
        if self.server:
            return f"{f'{len(self.servers)} servers' if self.beside else 'a server'} of {self.server.model}"
        return (
            "servers of its own" if any(one.module == "eval.lab.bench_serving" for one in self.commands) else "nothing"
        )


def read_legs(path: Path) -> Iterator[Leg]:
    """The legs of a TOML file, which says itself how it is read.

    Raises:
        KeyError: a ``$name`` that is no word of its leg.
    """
    data = tomllib.loads(path.read_text())
    for leg in data["legs"]:
        for one in leg.get("each", [{}]):
            made = {**data["words"], **leg, **one}
            servers = [_server(_words(line, made)) for line in made.get("servers", [])]
            lines = [_words(line, {**made, **again}) for again in made.get("repeat", [{}]) for line in made["commands"]]
            commands = [
                Command(module, file, tuple(arguments), tuple(data["goals"].get(file, [])))
                for module, file, *arguments in lines
            ]
            yield Leg(" ".join(_words(made["name"], made)), tuple(commands), *servers[:1], beside=tuple(servers[1:]))


def _words(line: str, known: Mapping[str, Any]) -> list[str]:
    """A line as a shell splits it, with what its ``$name`` stand for."""
    while "$" in line:
        line = Template(line).substitute(known)
    return shlex.split(line)


def _server(words: Sequence[str]) -> Server:
    place = next(place for place, word in enumerate(words) if "=" not in word)
    environment = [tuple(word.split("=", 1)) for word in words[:place]]
    return Server(words[place], tuple(words[place + 1 :]), tuple((name, value) for name, value in environment))


LEGS = tuple(read_legs(Path(__file__).with_name("legs.toml")))

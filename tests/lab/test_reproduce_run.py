"""Runs of everything at once: they skip, fail, end and say so; commands and servers are small stand-ins."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reproduce_stubs import SERVER, STUB, StubServer

from eval.lab import reproduce
from eval.lab.legs import runner
from eval.lab.legs.leg import FOLDER, URL, URLS_BESIDE, Command, Leg, Server
from eval.live.record import read_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a machine with a GPU, SGLang and a command called stub_bench; return the folder for results."""
    (tmp_path / "stub_bench.py").write_text(STUB)
    (tmp_path / "stub_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "ServerProcess", StubServer)
    monkeypatch.setattr(StubServer, "started", [])
    return tmp_path / "results"


def stub(file: str, *arguments: str) -> Command:
    return Command("stub_bench", file, ("--revision", "r1", *arguments))


def run(folder: Path, legs: list[Leg], *arguments: str) -> int:
    return reproduce.main(["--out", str(folder), "--revision", "r1", *arguments], legs)


def outcomes(text: str) -> list[str]:
    """Return the lines printed above the goals, without the seconds."""
    above = text.split("\n| id |", maxsplit=1)[0].strip()
    return [re.sub(r"\d+(\.\d)? s", "N s", line) for line in above.splitlines()]


def runs(folder: Path) -> list[tuple[str, int]]:
    return [(row["file"], row["status"]) for row in read_rows(folder / "reproduce.jsonl") if row["kind"] == "run"]


def test_a_run_and_its_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    legs = [
        Leg("one", (stub("a.jsonl", "--get", URL), stub("b.jsonl")), Server("checkpoint", ("--page-size", "16"))),
        Leg("two", (stub("c.json"),)),
    ]
    assert run(folder, legs) == 0
    printed = capsys.readouterr().out
    done = [f"one: stub_bench, {name}.jsonl: N s, status 0" for name in "ab"]
    last = "two: stub_bench, c.json: N s, status 0"
    assert outcomes(printed) == ["one: server of checkpoint is ready after N s", *done, last]
    assert "| K1 | ReSA attention" in printed
    log = (folder / "one.log").read_text()
    assert log.index("a stub answers") < log.index(f"measures {folder / 'b.jsonl'}") and "done" in log
    assert [server.process for server in StubServer.started] == [None]
    assert runs(folder) == [("a.jsonl", 0), ("b.jsonl", 0), ("c.json", 0)]

    assert run(folder, legs) == 0
    skipped = [line.replace("N s, status 0", "skipped, complete at revision r1") for line in (*done, last)]
    assert outcomes(capsys.readouterr().out) == skipped
    assert len(StubServer.started) == 1

    # Only what is missing, of another revision or unfinished is measured again.
    rows = (folder / "b.jsonl").read_text().splitlines(True)
    (folder / "b.jsonl").write_text(rows[0])
    assert run(folder, legs) == 0
    assert outcomes(capsys.readouterr().out) == [
        skipped[0],
        "one: server of checkpoint is ready after N s",
        done[1],
        skipped[2],
    ]
    assert run(folder, legs, "--revision", "r2") == 0
    assert [file for file, _ in runs(folder)[4:]] == ["a.jsonl", "b.jsonl", "c.json"]


def test_servers_beside_each_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = Server("checkpoint", ("--page-size", "64")), Server("checkpoint", ("--page-size", "1"))
    both = stub("a.jsonl", "--get", f"{URL}/{URLS_BESIDE[0]}/{URLS_BESIDE[1]}")
    leg = Leg("several", (both,), Server("checkpoint", ("--page-size", "16")), beside)
    assert run(folder, [leg]) == 0
    assert outcomes(capsys.readouterr().out)[:3] == ["several: server of checkpoint is ready after N s"] * 3
    urls = [one.url for one in StubServer.started]
    assert [one.meant[one.meant.index("--page-size") + 1] for one in StubServer.started] == ["16", "64", "1"]
    assert both.line(folder, urls)[-3].split("/http")[1:] == [url.removeprefix("http") for url in urls[1:]]
    assert (folder / "several.server.log").exists() and (folder / "several.server2.log").exists()
    assert all(server.process is None for server in StubServer.started)
    broken = Leg("broken", (stub("b.jsonl"),), leg.server, (Server("checkpoint", ("--broken",)),))
    assert run(folder, [broken]) == 1
    assert "broken.server1.log" in capsys.readouterr().out and not (folder / "b.jsonl").exists()
    assert reproduce.dry_run(leg, folder, None).count("sglang.launch_server") == 3


def test_what_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    legs = [
        Leg("broken", (stub("a.jsonl"),), Server("checkpoint", ("--broken",))),
        Leg(
            "failing",
            (stub("b.jsonl", "--status", "4"), stub("c.jsonl", "--reads", f"{FOLDER}/b.jsonl"), stub("d.jsonl")),
        ),
        Leg("ending", (stub("e.jsonl", "--get", f"{URL}/end"), stub("f.jsonl")), Server("checkpoint")),
        Leg("good", (stub("g.jsonl"),)),
    ]
    assert run(folder, legs) == 1
    found = capsys.readouterr()
    lines = outcomes(found.out)
    assert lines[0] == (
        f"broken: server exited with 3: torch.OutOfMemoryError: CUDA out of memory ({folder / 'broken.server.log'})"
    )
    assert lines[1:4] == [
        f"failing: stub_bench, b.jsonl: N s, status 4: no luck ({folder / 'failing.log'})",
        "failing: stub_bench, c.jsonl: left out, it needs b.jsonl",
        "failing: stub_bench, d.jsonl: N s, status 0",
    ]
    assert lines[5].startswith("ending: stub_bench, e.jsonl: N s, status 1: ") and "RemoteDisconnected" in lines[5]
    assert lines[6:] == [
        f"ending: the server ended: RuntimeError: no more pages ({folder / 'ending.server.log'})",
        "good: stub_bench, g.jsonl: N s, status 0",
    ]
    assert "failed: broken, failing, ending" in found.err
    # The file of a run that failed has a summary all the same, and does not count as done.
    assert len(read_rows(folder / "b.jsonl")) == 2
    assert run(folder, legs[1:2]) == 1
    lines = outcomes(capsys.readouterr().out)
    assert [line.split(": ")[2].split(",")[0] for line in lines] == ["skipped", "N s", "left out"]


def test_files_of_other_legs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    legs = [
        Leg("peers", (stub("p.jsonl"), stub("q.jsonl"))),
        Leg("one", (stub("a.jsonl", "--reads", f"{FOLDER}/p.jsonl"),), Server("checkpoint")),
        Leg("two", (stub("b.jsonl", "--reads", f"{FOLDER}/q.jsonl"), stub("c.jsonl")), Server("checkpoint")),
    ]
    assert run(folder, legs, "one", "two") == 1
    found = capsys.readouterr()
    assert outcomes(found.out) == [
        "one: stub_bench, a.jsonl: left out, it needs p.jsonl, which leg peers makes",
        "two: server of checkpoint is ready after N s",
        "two: stub_bench, b.jsonl: left out, it needs q.jsonl, which leg peers makes",
        "two: stub_bench, c.jsonl: N s, status 0",
    ]
    assert "failed: one, two" in found.err
    # For a leg of which nothing can run no server is started.
    assert len(StubServer.started) == 1 and not (folder / "a.jsonl").exists()
    # An unfinished file is none.
    (folder / "p.jsonl").write_text('{"kind": "header", "command": "stub", "revision": "r1"}\n')
    assert run(folder, legs, "one") == 1
    assert "left out, it needs p.jsonl" in capsys.readouterr().out
    assert run(folder, legs) == 0
    assert [file for file, _ in runs(folder)] == [f"{name}.jsonl" for name in "cpqab"]


def test_a_budget(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    legs = [Leg(name, (stub(f"{name}.jsonl"),)) for name in ("one", "two", "three")]
    assert run(folder, legs, "three") == 0
    # The first before all legs, two around the command.
    times = iter([0.0, 9.0, 9.0, 9.0, 10.0])
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(times)))
    capsys.readouterr()
    assert run(folder, legs, "--budget-seconds", "10") == 0
    assert outcomes(capsys.readouterr().out) == [
        "one: stub_bench, one.jsonl: N s, status 0",
        "three: stub_bench, three.jsonl: skipped, complete at revision r1",
        "the budget of N s is spent, left are: two",
    ]


def test_a_changed_checkout_has_nothing_done(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "git_revision", lambda: "r1+")
    legs = [Leg("one", (Command("stub_bench", "a.jsonl", ("--revision", "r1+")),))]
    for _ in range(2):
        assert reproduce.main(["--out", str(folder)], legs) == 0
        says, measured = outcomes(capsys.readouterr().out)
        assert says.startswith("revision 'r1+' says not which code this is") and "status 0" in measured


def test_a_dry_run_prints_what_a_run_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Server("qwen3-1.7b", ("--sparse-config", '{"a": 1}'), (("LIMIT", "0 1"),))
    legs = [Leg("one", (stub("a.jsonl", "--get", f"{URL}/x y"),), asked)]
    assert run(folder, legs, "--dry-run") == 0
    name, make, server, wait, command = capsys.readouterr().out.splitlines()
    assert name == "# one: a.jsonl" and wait.startswith("# once http://127.0.0.1:30000/health") and not folder.exists()
    line = shlex.split(make)
    assert line[:2] == ["python", "-c"]
    exec(line[2], {})
    assert (folder / "models" / "qwen3-1.7b" / "config.json").exists()
    run(folder, legs)
    (started,) = StubServer.started
    assert started.env["LIMIT"] == "0 1"
    assert shlex.split(server) == [
        "LIMIT=0 1",
        "python",
        *["30000" if part == str(started.port) else part for part in started.meant[1:]],
    ]
    assert shlex.split(command)[:3] == ["python", "-m", "stub_bench"]
    assert shlex.split(command)[-4:] == ["--get", "http://127.0.0.1:30000/x y", "--out", str(folder / "a.jsonl")]


def test_interrupted_commands_may_end_their_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = tmp_path / "waits"

    class Waited(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            waits.touch()
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Waited)
    # Whoever starts it must have come back from that, on a busy machine too.
    # In the background of a script the signal would be ignored.
    script = "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += f"try:\n    while not os.path.exists({str(waits)!r}):\n        time.sleep(0.05)\n"
    script += "    os.kill(os.getppid(), signal.SIGUSR1)\n    time.sleep(600)\n"
    script += "except KeyboardInterrupt:\n    print('cleaned up', flush=True)\n"
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with (tmp_path / "log").open("w") as log, pytest.raises(KeyboardInterrupt):
            runner.call([sys.executable, "-c", script], log.fileno())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "log").read_text() == "cleaned up\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "{}/new", "e9"], "no leg is called 'e9': there are kernels, kernels-fp8, tune, dense-1.7b, "),
        (["--out", "{}/file"], "file is a file, wanted is a folder"),
        (["--out", "{}/file/below"], "file is a file, wanted is a folder"),
        (["--out", "{}/new"], "speed is measured on a CUDA device, and torch finds none"),
    ],
)
def test_refusals(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    assert reproduce.main([argument.format(tmp_path) for argument in arguments]) == 1
    assert says in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]


def test_bad_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        ([], "--out FOLDER is needed"),
        (["--out", "x", "--budget-seconds", "0"], "--budget-seconds must be more than 0, got 0"),
        (["--list", "--dry-run"], "not allowed with"),
    ):
        with pytest.raises(SystemExit):
            reproduce.main(arguments)
        assert says in capsys.readouterr().err
    folder.mkdir()
    (folder / "a.jsonl").write_text("no results\n{}\n")
    assert run(folder, [Leg("one", (stub("b.jsonl"),)), Leg("two", (stub("a.jsonl"),))]) == 1
    assert "a.jsonl, line 1, is no JSON" in capsys.readouterr().err
    assert not (folder / "b.jsonl").exists()

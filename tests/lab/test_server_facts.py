"""Tests of the facts about a server's machine: told by the server, seen on this machine, or not known."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import psutil
import pytest
import torch

from eval.lab.servers import server_facts
from eval.lab.servers.server_facts import is_loopback, listening, machine_of
from eval.live.record import PACKAGES, this_machine

LISTENS = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as found:
    print(found.getsockname()[1], flush=True)
    time.sleep(60)
"""
URL = "http://127.0.0.1:30000"
STOCK = {"version": version("sglang"), "device": "cpu", "sparse": None}
NOTHING = {"device": None, "versions": None, "told_by": None, "server_command": None}


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of a process that listens, with some arguments."""
    line = [sys.executable, "-c", LISTENS, *request.param]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def seen(monkeypatch: pytest.MonkeyPatch, *line: str) -> None:
    """Have a process with this command line listen, whatever is asked for."""
    monkeypatch.setattr(server_facts, "listener", lambda port: list(line))


@pytest.mark.parametrize("port", [["sglang.launch_server", "--port", "1", "--api-key", "a b", "--x"]], indirect=True)
def test_the_command_line_of_who_listens(port: int) -> None:
    line = listening(f"http://localhost:{port}")
    assert line is not None and line.startswith("python -c ")
    assert line.endswith("sglang.launch_server --port 1 --api-key ... --x")
    assert listening(f"http://192.0.2.1:{port}") is None, "another machine"


@pytest.mark.parametrize("port", [["other.server"]], indirect=True)
def test_who_listens_is_no_server_of_sglang(port: int) -> None:
    assert listening(f"http://127.0.0.1:{port}") is None


def test_nobody_is_seen_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening("http://127.0.0.1:1") is None
    seen(monkeypatch, "ssh", "-L", "30000:localhost:30000", "sglang-host")
    assert listening(URL) is None, "a forwarded port"
    monkeypatch.undo()

    def refused(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refused)
    assert listening(URL) is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("--api-key=x y",), "--api-key=..."),
        (("--admin-api-key", "x"), "--admin-api-key ..."),
        (("--ssl-keyfile-password", "x y"), "--ssl-keyfile-password ..."),
    ],
)
def test_secrets_are_left_out(given: tuple[str, ...], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, "/opt/python3.11", "/opt/sglang", "serve", *given, "--tp", "2")
    assert listening(URL) == f"python /opt/sglang serve {shown} --tp 2"


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "0.0.0.0", "localhost.example.org", "gpu-host")))


def test_a_sparse_server_tells_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"device": "NVIDIA H200", "versions": {"torch": "9"}}
    facts = {**STOCK, "version": "1", "device": "cuda", "sparse": said}
    assert machine_of("http://192.0.2.1:30000", facts) == NOTHING | said | {"told_by": "the server"}
    seen(monkeypatch, "python", "-m", "sglang.launch_server")
    found = machine_of(URL, facts)
    assert found == said | {"told_by": "the server", "server_command": "python -m sglang.launch_server"}


def test_this_machine_stands_for_a_stock_server_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, "python", "-m", "sglang.launch_server")
    found = machine_of(URL, STOCK)
    assert found["told_by"] == "this machine" and found["device"] == "cpu"
    assert found["versions"].keys() == set(PACKAGES) and found["versions"]["torch"] == version("torch")
    assert machine_of("http://192.0.2.1:30000", STOCK) == NOTHING
    # A server of before, which says nothing of it.
    assert machine_of(URL, {**STOCK, "sparse": {"method": "resa"}})["told_by"] == "this machine"
    other = machine_of(URL, {**STOCK, "version": "0.1"})
    assert other == NOTHING | {"server_command": "python -m sglang.launch_server"}, "of another environment"
    seen(monkeypatch)
    assert machine_of(URL, STOCK) == NOTHING


def test_gpus_are_called_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, "python", "-m", "sglang.launch_server")
    names: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device])
    cases: list[tuple[list[str], Any, str]] = [
        ([], None, "cpu"),
        (["B", "B"], "B", "B"),
        (["B", "A"], "A or B", "A or B"),
    ]
    for names[:], stock, own in cases:
        assert machine_of(URL, {**STOCK, "device": "cuda"})["device"] == stock
        assert this_machine() == {"device": own, "versions": server_facts.versions(PACKAGES)}
    assert machine_of(URL, STOCK)["device"] == "cpu", "a server that does not use them"

"""A real SGLang server as a process: what the demo and the tests start."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

# Readiness is asked for five times a second.
QUIET = ("--uvicorn-access-log-exclude-prefixes", "/health")


def free_port() -> int:
    """A loopback TCP port that nobody listens on right now.

    Below the range that systems hand out for outgoing connections: a server takes its time until it binds, and a
    connection could have the port by then.
    """
    while True:
        port = random.randrange(12000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _group_runs(group: int) -> bool:
    """Whether any process of the group has not ended yet.

    One that has ended takes signals until its new parent asks for it, which may be seconds later.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state not in "ZX":
            return True
    return False


class ServerProcess:
    """``python -m sglang.launch_server`` as a context manager, ready for requests inside the block.

    Args:
        model_path: checkpoint directory.
        *args: further command line arguments.
        log_path: file that gets the server's stdout and stderr.
        env: variables added to this process's environment.
        timeout: seconds to wait for readiness.

    Raises:
        RuntimeError: if the process ends before it is ready; the message carries the end of its log.
        TimeoutError: likewise if it is not ready in time.
    """

    def __init__(
        self,
        model_path: str | Path,
        *args: str,
        log_path: str | Path,
        env: dict[str, str] | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]
        self.command += ["--port", str(self.port), *args]
        self.log_path = Path(log_path)
        # SGLang leaves its sockets behind.
        self.scratch = tempfile.TemporaryDirectory(prefix="sglang-", ignore_cleanup_errors=True)
        # /health would generate again, and look a second later for what came of it.
        quick = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        self.env = {**os.environ, **quick, "TMPDIR": self.scratch.name, **(env or {})}
        self.timeout = timeout
        self.start_seconds = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        # SGLang closes connections that were idle for five seconds, and a request could meet one that closes.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self.client = httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, limits=limits)

    def start(self) -> ServerProcess:
        """Start the process and return when it answers a generation request."""
        began = time.monotonic()
        self.process = self._open()
        try:
            self._wait(began + self.timeout)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def _open(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                [*self.command, *QUIET], stdout=log, stderr=subprocess.STDOUT, env=self.env, start_new_session=True
            )

    def _wait(self, deadline: float) -> None:
        assert self.process is not None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server exited with {self.process.returncode}; its log ends:\n{self.log_tail()}")
            try:
                # 503 until the warm-up request went through.
                if self.client.get("/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"server not ready after {self.timeout} s; its log ends:\n{self.log_tail()}")

    def stop(self) -> None:
        """Kill the main process, give its children time to follow and clean up, then kill what is left of the group.

        SIGTERM would drain requests first, which takes SGLang more than six seconds even if there are none.
        """
        if self.process is None:
            return
        self.process.kill()
        self.process.wait(10.0)
        deadline = time.monotonic() + 5.0
        while _group_runs(self.process.pid):
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                break
            time.sleep(0.05)
        self.process = None
        self.client.close()
        self.scratch.cleanup()

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of it."""
        return "\n".join(self.log().splitlines()[-lines:])

    def generate(self, **request: Any) -> Any:
        """POST ``/generate``; a dict for one prompt, a list for several.

        Raises:
            httpx.HTTPStatusError: with the server's message, if the answer is an error.
        """
        response = self.client.post("/generate", json=request)
        if response.is_error:
            raise httpx.HTTPStatusError(
                f"{response.status_code}: {response.text}", request=response.request, response=response
            )
        return response.json()

    def server_info(self) -> dict[str, Any]:
        """GET ``/server_info``: arguments, versions, and the counters of a sparse server."""
        return self.client.get("/server_info").raise_for_status().json()

    def flush_cache(self, timeout: float = 30.0) -> None:
        """Empty the radix cache; SGLang refuses while requests run, so try until it agrees."""
        deadline = time.monotonic() + timeout
        while self.client.post("/flush_cache").status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError(f"server still busy after {timeout} s")
            time.sleep(0.1)

    def openai(self) -> Any:
        """An ``openai.OpenAI`` client of this server."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False))

"""Servers, and scripts with engines, forked from a process that has imported SGLang and what it stands on.

A server is three processes, and each imports torch, transformers, SGLang and its models: nearly all the CPU time that a
start takes. What differs from ``python -m sglang.launch_server``: the scheduler and the detokenizer are forks of the
main process, hooks included, plugins find SGLang's modules imported, and a server's first request is the test's. The
demo and some tests of the command line start the plain way.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from launch.server import QUIET, ServerProcess
from sglang_sparse.hooks import bindings

IMPORTS = [
    "torch._dynamo",
    "torchvision",
    "triton",
    "transformers.generation.candidate_generator",
    "compressed_tensors",
    "flashinfer",
    "openai",
    "fastapi",
    "pandas",
    "scipy.stats",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    # Compiles while it is imported.
    "sglang.srt.dllm.algorithm",
    # Imported by a start.
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.arg_groups.resolution_hooks",
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.layers.attention.linear.gdn_backend",
    "sglang.srt.layers.attention.torch_native_backend",
    "smg_grpc_servicer.sglang.zmq_plugin",
    "uvicorn.protocols.http.h11_impl",
    # Reads the names of all that is imported, see below.
    "forked_server",
]
# Set in the process that servers are forked from.
_FORKS = "SGLANG_SPARSE_TESTS_FORK"
# The two servers of a pair are started at once.
_BEGINNING = threading.Lock()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context


def _begin() -> None:
    """Start the process that servers are forked from, if it does not run yet."""
    # It imports this module by the environment's path alone.
    path = os.environ.get("PYTHONPATH")
    os.environ.update({"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), _FORKS: "1"})
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[_FORKS]
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def _read_again() -> None:
    """Read again the variables that tests set and that SGLang reads while it is imported."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def _run(command: list[str], env: dict[str, str], log: str) -> None:
    """Become ``python`` with these arguments: ``-m`` and a module, or a script, and then its own."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(env)
    # Each flush of SGLang's cache collects garbage, which would look through all that was imported.
    gc.freeze()
    # Kept: the names of what was imported before the fork.
    bindings.forget = lambda: None
    _read_again()
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: (
        None
    )  # SGLang asks for "spawn", which would import it all again.
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")


class Forked:
    """Stand-in for ``subprocess.Popen``: the fork that runs ``python`` with these arguments, see `_run`."""

    def __init__(self, command: list[str], env: dict[str, str], log: str) -> None:
        with _BEGINNING:
            context = _context()
            _begin()
            self._process: ForkServerProcess = context.Process(target=_run, args=(command, env, log))
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout)
        return self.returncode


class ForkedServer(ServerProcess):
    """A ``ServerProcess`` that starts in a tenth of the time."""

    def _open(self) -> Any:
        self.log_path.write_bytes(b"")
        # SGLang's own first request comes a second after the start.
        return Forked([*self.command[1:], *QUIET, "--skip-server-warmup"], self.env, str(self.log_path))


if _FORKS in os.environ:
    bindings.read()

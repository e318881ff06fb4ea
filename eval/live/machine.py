"""What figures were measured on, for the header of a result file: device, versions, and the server's command line.

A server that a command starts itself runs on this machine and in this environment. One that is already there may run
anywhere, so nothing is taken for granted:

- A sparse server says itself on which device and with which packages it runs (``sglang_sparse.attention.counters``).
- SGLang alone says neither. This machine and this environment stand for it, but only where it is seen to be here: the
  URL is a loopback address, a Python process with SGLang listens there (behind a forwarded port it is another program),
  and it has the version of SGLang that is installed here. Its other packages may still be those of another
  environment, so ``told_by`` is "this machine" then, and not "the server".
- No server says its command line. It is that of the process which is seen to listen on a loopback address.

What nobody tells is null.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from eval.live.record import versions

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")
# In arguments with NUL between them, which none can hold.
SECRET = re.compile(r"(--[\w-]*(?:api-key|password)[=\0])[^\0]*")


def gpus() -> str | None:
    """The names of the GPUs that this process sees, each kind once; None without any."""
    return " or ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})) or None


def this_machine() -> dict[str, Any]:
    """``device`` and ``versions`` of the servers that this process starts."""
    return {"device": gpus() or "cpu", "versions": versions(PACKAGES)}


def machine_of(url: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a server runs on.

    Args:
        url: where it is.
        facts: what it says about itself, see `eval.live.record.server_facts`.

    Returns:
        ``device``, ``versions``, ``told_by`` and ``server_command``; see above.
    """
    line = listening(url)
    found = {"device": None, "versions": None, "told_by": None, "server_command": line}
    said = facts.get("sparse") or {}
    if "versions" in said:
        return found | {"device": said["device"], "versions": said["versions"], "told_by": "the server"}
    installed = versions(PACKAGES)
    if line is None or facts["version"] != installed["sglang"]:
        return found
    device = gpus() if facts["device"] == "cuda" else facts["device"]
    return found | {"device": device, "versions": installed, "told_by": "this machine"}


def listening(url: str) -> str | None:
    """The command line of the server of SGLang that listens at a loopback address.

    Args:
        url: the address.

    Returns:
        None where the address is another one, or no such process is seen.
    """
    address = httpx.URL(url)
    line = listener(address.port) if is_loopback(address.host) else []
    if not line or not Path(line[0]).name.startswith("python") or not any("sglang" in part for part in line[1:]):
        return None
    shown = SECRET.sub(r"\1...", "\0".join(line[1:])).split("\0")
    return shlex.join(["python", *shown])


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listener(port: int | None) -> list[str]:
    """The command line of the process that listens on a TCP port of this machine; empty where none is seen."""
    try:
        pids = [
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid
        ]
        # SGLang's workers share the socket of their parent, which is older.
        return psutil.Process(min(pids)).cmdline() if pids else []
    except psutil.Error:
        return []

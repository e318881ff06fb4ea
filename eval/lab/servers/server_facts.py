"""The machine and packages of a measured server, for a result file's header, and its state of memory and prompts.

A server that is already there may run anywhere, so nothing is taken for granted:

- A sparse server says itself on which device and with which packages it runs (``sglang_sparse.attention.counters``).
- SGLang alone says neither. This machine and this environment stand for it, but only where it is seen to be here: the
  URL is a loopback address, a Python process with SGLang listens there (behind a forwarded port it is another program),
  and it has the version of SGLang that is installed here. Its other packages may still be those of another
  environment, so ``told_by`` is "this machine" then, and not "the server".
- No server says its command line. It is that of the process which is seen to listen on a loopback address.

Facts that nobody tells are null.
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

from eval.live.record import PACKAGES, gpus, versions

# In arguments with NUL between them, which none can hold.
SECRET = re.compile(r"(--[\w-]*(?:api-key|password)[=\0])[^\0]*")


def machine_of(url: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Find the machine, the packages and the command line of a server.

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


def sglang_of(found: Mapping[str, Any]) -> str:
    """Return the SGLang version that a file's header, or a row with its fields, was measured with; empty if unknown."""
    servers = [found.get("server"), *(found.get("servers") or {}).values()]
    told = (found.get("versions") or {}).get("sglang")
    return told or next((server["version"] for server in servers if server and server.get("version")), "")


def kept(before: Mapping[str, Any], after: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Compare two states of a server whose method keeps a part of each prompt; all prompts have one length.

    Args:
        before: its state.
        after: its state, later.
        length: tokens of each prompt.

    Returns:
        ``kept``, the increase of each of its counts of prompts. Where some let go of their prompts also
        ``held_tokens``, the KV tokens of its prompt that such a request held then, on average. Empty where the method
        is none of these.
    """
    if "kept" not in after:
        return {}
    counts = {name: count - before["kept"][name] for name, count in after["kept"].items()}
    gone = counts.get("compacted")
    return {"kept": counts} | ({"held_tokens": length - counts["freed_tokens"] / gone} if gone else {})


def allocated(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int | float | None]:
    """Return the figures of the server's GPU allocator between two of its states.

    Returns:
        ``allocations_per_step`` of decode, and ``peak_bytes``, the most that it has ever held; both None on the CPU and
        on servers of older revisions.
    """
    earlier, later = before.get("allocator"), after.get("allocator")
    if not earlier or not later:
        return {"allocations_per_step": None, "peak_bytes": None}
    steps = after["decode_steps"] - before["decode_steps"]
    made = later["allocations"] - earlier["allocations"]
    return {"allocations_per_step": made / steps if steps else None, "peak_bytes": later["peak_bytes"]}

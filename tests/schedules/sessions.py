"""Streaming sessions in schedules: they open, take turns and close, and keep exact KV between turns."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput, SessionParams

# Sessions at a time, and tokens of each with all its turns: SGLang evicts none of them.
MOST = 2
LONGEST = 64
# How often a request is a turn, goes on in a session that can, and how often one closes where another opens.
TURNS = 0.6
GOES_ON = 0.85
CLOSES = 0.15


def history(session: Any) -> list[int]:
    """Return the tokens behind which SGLang puts a session's next turn."""
    for node in session.req_nodes.values():
        answer = node.req.output_ids[: node.req.sampling_params.max_new_tokens]
        return [*node.req.origin_input_ids[: session.committed_origin_len], *answer]
    return []


def kept(scheduler: Any) -> list[Any]:
    """Return what holds KV between two turns: ``kv`` as a request has it, ``rid``, and the ``tokens`` it is of."""
    found = []
    for name, slot in scheduler.tree_cache.session.slots.items():
        session = scheduler.session_controller.sessions[name]
        if slot.kv.holds_kv:
            found.append(SimpleNamespace(rid=f"session {name}", kv=slot.kv, tokens=history(session)))
    return found


def next_turn(scheduler: Any, rng: random.Random, busy: set[str]) -> tuple[str | None, list[int], list[Any]]:
    """Choose who takes a turn.

    Args:
        busy: sessions that have a turn, or are closed already.

    Returns:
        The session, or None for a request without one; the tokens that stand before its own; and the commands to send
        before it.
    """
    sessions, commands = scheduler.session_controller.sessions, []
    if rng.random() >= TURNS:
        return None, [], []
    idle = [name for name in sessions if name not in busy]
    name = rng.choice(idle) if idle and rng.random() < GOES_ON else None
    if name is None or len(history(sessions[name])) > LONGEST - 4:
        # A session that has become too long makes room.
        closed = [name] if name else [one for one in idle if rng.random() < CLOSES]
        commands = [CloseSessionReqInput(session_id=one) for one in closed]
        if len(busy.union(sessions)) >= MOST:
            return None, [], commands
        name = str(rng.getrandbits(40))
        commands.append(OpenSessionReqInput(capacity_of_str_len=4096, session_id=name, streaming=True))
        return name, [], commands
    return name, history(sessions[name]), commands


def turn_of(name: str | None) -> dict[str, Any]:
    """Return what a request says to be a session's turn."""
    return {} if name is None else {"session_params": SessionParams(id=name)}


def close_all(scheduler: Any) -> list[Any]:
    """Return the commands that close all sessions."""
    return [CloseSessionReqInput(session_id=name) for name in scheduler.session_controller.sessions]

"""A random schedule: what one seed makes the scheduler do, and what is counted and checked meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pairs
import sessions
import torch
from checks import BrokenInvariantError, LostPageError, check_running_kv, check_step, check_tree, holders, waiting
from engine import CONTEXT, GROUP, VOCABULARY, Engine, StopLoop, force_retraction, request
from sglang.srt.managers.io_struct import AbortReq, CloseSessionReqInput, FlushCacheReqInput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from twin import Answer

from sglang_sparse.debug import tree_check

DRAIN_LIMIT = 1500
RECOMPUTE_RUNNING = 0.05
# What a session keeps is in no tree, which is checked after every step.
RECOMPUTE_SESSIONS = 0.3
PROVE_AGAIN = 0.1
COMMANDS = {"admit": 45, "nothing": 20, "abort": 8, "retract": 15, "evict": 12}
# While a round comes to its end: what may still happen to requests in the middle of decoding.
DISTURBANCES = {"nothing": 85, "abort": 3, "retract": 7, "evict": 5}


@dataclass
class Counts:
    """Counts of the events in a schedule, or in several.

    ``full_pools`` counts the retractions that were not forced, ``evictions`` the tokens that were evicted by command,
    ``made_room`` those that SGLang evicted by itself, and ``prompts_evicted`` the prompts of which the tree evicted
    something while a request ran that had let go of them. ``turns`` counts those behind another turn.
    """

    iterations: int = 0
    requests: int = 0
    aborts: int = 0
    retractions: int = 0
    full_pools: int = 0
    evictions: int = 0
    made_room: int = 0
    flushes: int = 0
    cached_tokens: int = 0
    rectified_tokens: int = 0
    finish_tokens: int = 0
    divided: int = 0
    mixed_rows: int = 0
    compacted: int = 0
    compact_waits: int = 0
    prompts_evicted: int = 0
    arrived_pages: int = 0
    turns: int = 0
    answers_compared: int = 0
    tokens_compared: int = 0
    skipped: int = 0
    skipped_in_prefill: int = 0
    drafted: int = 0
    accepted: int = 0
    pages_checked: int = 0
    worst_difference: float = 0.0

    def add(self, other: Counts) -> None:
        """Add another schedule's counts; of the differences, keep the worst."""
        worst = max(self.worst_difference, other.worst_difference)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.worst_difference = worst


class Schedule:
    """One seed's commands for one engine, from an empty pool to an empty pool.

    Args:
        engine: idle and flushed.
        seed: of everything random in it.
        steps: most iterations with commands; prompts and outputs are sized to match.
    """

    def __init__(self, engine: Engine, seed: int, steps: int):
        self.engine = engine
        self.seed = seed
        self.counts = Counts()
        self._rng = random.Random(seed)
        # Many short prompts with long outputs fill the pool in the middle of decoding.
        self._decode_heavy = self._rng.random() < 0.2
        self._longest_output = max(4, (4 if self._decode_heavy else 2) * steps)
        self._longest_prompt = 8 if self._decode_heavy else max(16, 4 * steps)
        if engine.options.prefills_sparse:
            # Prompts of several groups, which part within them.
            self._longest_prompt *= 12
        if engine.options.skips:
            # Blocks between the first and the newest ones; a prompt that is short leaves room for retractions.
            self._longest_prompt = 20 if self._decode_heavy else CONTEXT - 80
        # The latest turn of each session, and the sessions that this iteration closes.
        self._turns: dict[str, str] = {}
        self._closed: set[str] = set()
        self._rounds = [self._rng.randint(max(1, steps // 2), steps) for _ in range(self._rng.choice([1, 1, 2]))]
        self._steps_left = self._rounds.pop()
        self._drained = 0
        if engine.options.keeps:
            # Longer than what they keep; SGLang never admits a prompt that nearly fills the pool.
            self._longest_prompt = min(6 * self._longest_prompt, engine.options.slots // 2)
        # A small alphabet, so that prompts share prefixes by accident as well.
        self._alphabet = self._rng.sample(range(1, VOCABULARY), self._rng.choice([2, 8, 60]))
        self._prompts: dict[str, list[int]] = {}
        self._sampling: dict[str, dict[str, Any]] = {}
        # Tokens that a request had when it was retracted for the first time: it attends to all in the pass that comes
        # after, so that what follows depends on when that was.
        self._undisturbed: dict[str, int] = {}
        self._retracted: dict[str, int] = {}
        self._retract = False
        self._idled = False

    def run(self) -> Counts:
        """Run it.

        Raises:
            AssertionError: an invariant is broken, by these checks or by SGLang's own.
            InexactTreeError: a page of the tree, or of a running request below its exact length, is not exact.
        """
        torch.manual_seed(self.seed)
        before = self._counted()
        self.engine.forget()
        try:
            self.engine.run(self._receive)
        finally:
            force_retraction(False)
        self._require_ended()
        self.counts.cached_tokens = self.engine.cached_tokens
        for name, value in self._counted().items():
            setattr(self.counts, name, value - before[name])
        self.counts.drafted += self.engine.drafted
        self.counts.accepted += self.engine.accepted
        self.counts.made_room -= self.counts.evictions
        return self.counts

    def answers(self) -> dict[str, Answer]:
        """Return what is to be compared of a schedule that ran, by request."""
        found = {}
        for rid, sampling in self._sampling.items():
            tokens, logprobs = self.engine.outputs.get(rid, []), self.engine.logprobs.get(rid, [])
            whole = self.engine.ended[rid] != "abort" and rid not in self._undisturbed
            end = self._undisturbed.get(rid, len(tokens))
            found[rid] = Answer(self._prompts[rid], sampling, tokens[:end], logprobs[:end], whole)
        self.counts.answers_compared = len(found)
        self.counts.tokens_compared = sum(len(answer.tokens) for answer in found.values())
        return found

    def _counted(self) -> dict[str, int]:
        backend = self.engine.runner.attn_backend
        counts, keeps = backend.counters.rectify, backend.keeps[0].snapshot() if backend.keeps else {}
        compacted = {name: keeps.get(name, 0) for name in ("compacted", "compact_waits")}
        compaction = self.engine.compaction
        compacted["prompts_evicted"] = compaction.prompts_evicted if compaction else 0
        rectified = {"rectified_tokens": counts.tokens, "finish_tokens": counts.finish_tokens}
        found = backend.counters.snapshot() if self.engine.options.skips else {"prefill": {}}
        drafts = backend.counters.drafts
        skipped = {"skipped": found.get("blocks_skipped", 0)}
        skipped["skipped_in_prefill"] = found["prefill"].get("blocks_skipped", 0)
        return {
            **rectified,
            "arrived_pages": backend.counters.arrived_pages,
            "divided": self.engine.divided,
            "made_room": self.engine.evicted_tokens,
            **compacted,
            **skipped,
            "drafted": drafts.drafted if drafts else 0,
            "accepted": drafts.accepted if drafts else 0,
        }

    def _receive(self) -> list[Any]:
        """Called by the event loop where it would read its sockets."""
        self.counts.iterations += 1
        self._check()
        self._closed.clear()
        if self._steps_left:
            self._steps_left -= 1
            return self._command(COMMANDS)
        if not self.engine.scheduler.is_fully_idle():
            self._drained += 1
            if self._drained > DRAIN_LIMIT:
                raise BrokenInvariantError(f"still busy {DRAIN_LIMIT} iterations after the last command")
            return self._command(DISTURBANCES)
        # One iteration more, for what the event loop does when it is idle.
        self._idled = not self._idled
        if self._idled:
            return []
        if closing := sessions.close_all(self.engine.scheduler):
            if self._rng.random() >= sessions.GOES_ON:
                return closing
            # Most turns end after the last command.
            return [*self._admit(), *self._admit()]
        if self._rounds:
            self._steps_left = self._rounds.pop()
            flush = self._rng.random() < 0.2
            self.counts.flushes += flush
            return [FlushCacheReqInput()] if flush else []
        self._finish()
        raise StopLoop

    def _check(self) -> None:
        self._note(check_step(self.engine))
        last = self.engine.scheduler.last_batch
        if last is not None and last.forward_mode.is_mixed():
            self.counts.mixed_rows += len(last.decoding_reqs)
        if self._rng.random() < (RECOMPUTE_SESSIONS if self.engine.options.sessions else RECOMPUTE_RUNNING):
            self.counts.worst_difference = max(self.counts.worst_difference, check_running_kv(self.engine))
        forced = self._retract
        for held in (*holders(self.engine.scheduler), *waiting(self.engine.scheduler)):
            seen = self._retracted.get(held.rid, 0)
            if held.retraction_count > seen:
                self.counts.retractions += held.retraction_count - seen
                self.counts.full_pools += 0 if forced else held.retraction_count - seen
                self._retracted[held.rid] = held.retraction_count
                self._undisturbed.setdefault(held.rid, len(held.output_ids))
                # Forced until one took place: only a step that decodes several requests can.
                self._retract = False
                # A retraction makes SGLang cautious: the pool would not run full again.
                self.engine.scheduler.new_token_ratio_tracker.reset()
        force_retraction(self._retract)

    def _note(self, report: Any) -> None:
        self.counts.pages_checked += report.pages_checked
        self.counts.worst_difference = max(self.counts.worst_difference, report.worst_abs_difference)

    def _command(self, weights: dict[str, int]) -> list[Any]:
        (kind,) = self._rng.choices([*weights], [*weights.values()])
        if kind == "admit" or not self._prompts:
            count = self._rng.choice([4, 8] if self._decode_heavy else [1, 2, 4])
            return [command for _ in range(count) for command in self._admit()]
        if kind == "abort":
            return self._abort()
        if kind == "retract":
            self._retract = True
            force_retraction(True)
        elif kind == "evict":
            tree = self.engine.scheduler.tree_cache
            self.counts.evictions += tree.evict(EvictParams(num_tokens=self._rng.randint(1, 80))).num_tokens_evicted
        return []

    def _admit(self) -> list[Any]:
        rid = f"{self.seed}-{self.counts.requests}"
        self.counts.requests += 1
        scheduler = self.engine.scheduler
        # SGLang refuses a prompt that never fits and clips an output to what the empty pool holds; the
        # larger pool of the dense twin would not, so each request here fits with all its tokens.
        room = scheduler.max_total_num_tokens - 2 * scheduler.page_size - self.engine.options.reserved
        session, before, commands = self._next_turn(rid)
        self.counts.turns += bool(before)
        if session:
            room = sessions.LONGEST - len(before)
        tokens = self._prompt()[: min(scheduler.max_req_input_len - 1, CONTEXT - 1, room - 1)]
        self._prompts[rid] = before + tokens
        longest_output = self._rng.choice([1, 2, *[self._rng.randint(3, self._longest_output)] * 4])
        sampling = {
            "max_new_tokens": min(longest_output, room - len(tokens)),
            "temperature": self._rng.choice([0.0, 0.0 if self.engine.options.repeats_greedy else 1.0]),
            # SGLang reserves all tokens of a request that ignores stop tokens, which the pool then never lacks.
            "ignore_eos": self._rng.random() < 0.15,
            "stop_token_ids": self._rng.sample(range(VOCABULARY), 1 if self._decode_heavy else 12),
            "custom_params": self._custom_params(),
        }
        self._sampling[rid] = sampling
        # SGLang mixes no batch that returns them.
        compared = self.engine.options.compared and not self.engine.options.mixed
        fields = pairs.FIELDS if self.engine.options.pair else {}
        logprob = self._rng.random() < 0.15 or compared
        return [*commands, request(rid, tokens, sampling, logprob, **fields, **sessions.turn_of(session))]

    def _next_turn(self, rid: str) -> tuple[str | None, list[int], list[Any]]:
        if not self.engine.options.sessions:
            return None, [], []
        busy = {name for name, turn in self._turns.items() if turn not in self.engine.ended}
        name, before, commands = sessions.next_turn(self.engine.scheduler, self._rng, busy | self._closed)
        self._closed |= {each.session_id for each in commands if isinstance(each, CloseSessionReqInput)}
        if name:
            self._turns[name] = rid
        return name, before, commands

    def _prompt(self) -> list[int]:
        rng = self._rng
        length = rng.randint(1, rng.choice([min(12, self._longest_prompt), self._longest_prompt]))
        fresh = [rng.choice(self._alphabet) for _ in range(length)]
        if not self._prompts or rng.random() < 0.4:
            return fresh
        rid = rng.choice([*self._prompts])
        earlier = self._prompts[rid] + self.engine.outputs.get(rid, [])
        kept = len(earlier) if rng.random() < 0.6 else rng.randint(0, len(earlier))
        if self.engine.options.drafter and rng.random() < 0.5:
            # Prompts that part right behind a group, which have no pair of tokens there in common.
            kept -= kept % GROUP
        return earlier[:kept] + fresh[: rng.randint(0 if kept else 1, len(fresh))]

    def _custom_params(self) -> dict[str, Any] | None:
        rng = self._rng
        kinds = ["none", "none", "dense", "ratio", "interval", "both"]
        if self.engine.options.prefills_sparse:
            # Requests of one namespace, mostly, or nobody would share a prefix.
            kinds += ["theta", "exact", *["none"] * 6]
        kind = rng.choice(kinds)
        if kind == "none" or (self.engine.options.method is None and kind in ("ratio", "interval", "both")):
            return None
        if kind == "dense":
            return {"sparse": False}
        if kind in ("theta", "exact"):
            theta = {"threshold_scale_factor": {"prefill": 5.0}} if self.engine.options.skips else {"theta": 1.0}
            return theta if kind == "theta" else {"exact_prefix": True}
        ratio = {"active_ratio": rng.choice([0.01, 0.2, 0.5, 1.0])}
        if self.engine.options.skips:
            ratio = {"threshold_scale_factor": {"decode": rng.choice([0.0, 3.0, 500.0])}}
        if self.engine.options.keeps:
            ratio = {"topk": rng.choice([1, 2, 8, 10**6])}
        interval = {"rectify_interval": rng.choice([2, 4, 13])}
        if not self.engine.options.rectifies or kind == "ratio":
            return ratio
        return interval if kind == "interval" else {**ratio, **interval}

    def _abort(self) -> list[Any]:
        scheduler = self.engine.scheduler
        candidates = [held.rid for held in (*holders(scheduler), *waiting(scheduler)) if not held.finished()]
        if not candidates:
            return []
        self.counts.aborts += 1
        return [AbortReq(rid=self._rng.choice(candidates))]

    def _finish(self) -> None:
        """With nothing running: everything is in the tree or free, and a flush frees the rest."""
        scheduler = self.engine.scheduler
        if self._rng.random() < PROVE_AGAIN:
            # Without trust in what was proven before.
            vars(scheduler.tree_cache).pop(tree_check.ATTRIBUTE, None)
            self._note(check_tree(scheduler))
        if not scheduler.flush_cache(empty_cache=False):
            raise BrokenInvariantError("an idle scheduler refused to flush its cache")
        self._note(check_step(self.engine))
        free = scheduler.token_to_kv_pool_allocator.available_size()
        if free != self.engine.options.pages * self.engine.options.page_size:
            raise LostPageError(f"{free} slots are free after a flush")

    def _require_ended(self) -> None:
        missing = [rid for rid in self._prompts if rid not in self.engine.ended]
        if missing:
            raise BrokenInvariantError(f"requests {missing} never ended")

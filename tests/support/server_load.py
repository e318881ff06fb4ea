"""Load on a server, with forced retractions and random aborts."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from server_requests import assert_exact, assert_nothing_leaked, sparse_state

from launch.server import ServerProcess

TOKENS = 90
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}


@dataclass
class Load:
    """Clients that send prompts until told to stop, and one that aborts some of what is running."""

    server: ServerProcess
    prompts: list[list[int]]
    seconds: float
    finished: list[tuple[int, list[int]]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: int = 0
    retracted: int = 0

    def run(self, clients: int = 8) -> None:
        until = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self._client, args=(seed, until)) for seed in range(clients)]
        threads.append(threading.Thread(target=self._abort, args=(until,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.seconds + 120.0)
            assert not thread.is_alive(), self.server.log_tail()

    def _client(self, seed: int, until: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            index, rid = rng.randrange(len(self.prompts)), f"{seed}-{rng.random()}"
            params = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            self.running.add(rid)
            answer = self.server.generate(input_ids=self.prompts[index], sampling_params=params, rid=rid)
            self.running.discard(rid)
            self.retracted += answer["meta_info"].get("num_retractions", 0)
            if answer["meta_info"]["finish_reason"]["type"] == "length":
                self.finished.append((index, answer["output_ids"]))
            else:
                self.aborted += 1

    def _abort(self, until: float) -> None:
        rng = random.Random(99)
        with httpx.Client(trust_env=False) as client:
            while time.monotonic() < until:
                time.sleep(rng.uniform(0.1, 1.0))
                if rids := sorted(self.running):
                    client.post(f"{self.server.url}/abort_request", json={"rid": rng.choice(rids)})


def chaos(
    serve, checkpoint, prompts: list[list[int]], config: dict[str, Any], seconds: float, more: Sequence[str] = ()
) -> Load:
    """Load a server with ``check_exactness`` until its pool is full, and prove its tree; ``more`` of its flags."""
    flags = ("--chunked-prefill-size", "512", "--max-total-tokens", "24000", *more)
    with serve(checkpoint, *flags, config=config, env=RETRACT) as server:
        load = Load(server, prompts, seconds)
        load.run()
        assert load.retracted and load.aborted and load.finished
        state = sparse_state(server)
        assert state["rectified_requests"] + state.get("verified_rounds", 0) > 0 and state["dense_fallback_rows"] == 0
        assert_exact(server)
        assert_nothing_leaked(server)
    return load

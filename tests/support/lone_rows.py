"""Whether a server with deterministic inference answers a prompt as if it were alone, bit by bit."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from server_requests import logprobs, random_prompts

from launch.server import ServerProcess

FLAGS = ("--enable-deterministic-inference", "--chunked-prefill-size", "512")
TOKENS = 40
LENGTHS = (400, 77, 700, 130, 300, 33)
Answer = tuple[list[int], list[float], int]


def answer(server: ServerProcess, prompt: list[int], options: dict[str, Any] | None = None) -> Answer:
    """Tokens, their log-probabilities, and how much of the prompt was cached."""
    params = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "custom_params": options}
    found = server.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    return found["output_ids"], logprobs(found), found["meta_info"]["cached_tokens"]


def assert_alone(server: ServerProcess, sizes: tuple[int, ...] = (2, 3, 6), turns: bool = True) -> None:
    """Ask each of some prompts alone, in company, behind cached prefixes, and with ``turns`` as a second turn."""
    prompts = random_prompts(5, LENGTHS, tokens=1000)
    alone = []
    for prompt in prompts:
        server.flush_cache()
        alone.append(answer(server, prompt)[:2])
    assert len({tuple(tokens) for tokens, _ in alone}) == len(prompts)
    for size in sizes:
        server.flush_cache()
        with ThreadPoolExecutor(size) as pool:
            together = [*pool.map(lambda prompt: answer(server, prompt)[:2], prompts[:size])]
        assert together == alone[:size], f"{size} at once"
    for prompt, expected in zip(prompts, alone, strict=True):
        server.flush_cache()
        # Two others that share a part of it, the longer one with tokens that a rectifying pass has written.
        answer(server, prompt[: len(prompt) // 3])
        answer(server, [*prompt[: len(prompt) // 2], 11, 12])
        tokens, found, cached = answer(server, prompt)
        assert cached >= len(prompt) // 2 // 16 * 16 - 32 and (tokens, found) == expected, cached
    if not turns:
        return
    second = [*prompts[0], *alone[0][0], 11, 12, 13]
    server.flush_cache()
    cold = answer(server, second)
    server.flush_cache()
    answer(server, prompts[0])
    warm = answer(server, second)
    assert warm[:2] == cold[:2] and cold[2] == 0 < warm[2]

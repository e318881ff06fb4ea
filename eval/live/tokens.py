"""A model's tokenizer and chat template, and prompts of an exact length in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from eval.live.counters import EvaluationError

TOLERANCE = 0.005
ATTEMPTS = 6
# A first turn that does not say what the next one asks for: what stands below the text, and the answer.
_FIRST_TURN = ("Remember this text.", "OK.")


class Tokens:
    """Text to token ids and back, as the model under test was trained to read them.

    It is loaded by transformers' ``AutoTokenizer`` from a folder or by a name; refused if nothing is there.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise EvaluationError(
                f"no tokenizer at {path!r}: give --tokenizer a folder or a name ({error.args[0]})"
            ) from error
        # Prompts longer than the tokenizer thinks right are the purpose here.
        self._tokenizer.model_max_length = 10**9

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens that are written out are read as such, none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def start(self) -> list[int]:
        """Return the first tokens of a raw prompt, such as a BOS token; often none."""
        return [i for i in self._tokenizer.encode("") if i != self._tokenizer.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def sizes(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        if not texts:
            return []
        found: Any = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [len(ids) for ids in found]

    def chat(self, messages: Sequence[dict[str, str]], prefix: str = "") -> list[int]:
        """Token ids of a chat up to where the answer begins, or goes on after `prefix`; refused without a template."""
        if self._tokenizer.chat_template is None:
            raise EvaluationError("the model has no chat template: use raw prompts (--no-chat, --raw or --form ruler)")
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return self.encode(str(text) + prefix)

    def prompt(self, text: str, chat: bool = True, prefix: str = "") -> list[int]:
        """Token ids of a text in the user's turn of a `chat`, or raw; the answer goes on after `prefix`."""
        if chat:
            return self.chat([{"role": "user", "content": text}], prefix)
        return [*self.start(), *self.encode(text + prefix)]

    def first_turn(self, text: str) -> list[int]:
        """Token ids of a chat that gives a text and asks nothing; see `chat`."""
        return self.prompt(f"{text}\n{_FIRST_TURN[0]}")

    def second_turn(self, text: str, question: str) -> list[int]:
        """Token ids of a chat that asks only after `first_turn` was answered."""
        said = (("user", f"{text}\n{_FIRST_TURN[0]}"), ("assistant", _FIRST_TURN[1]), ("user", question))
        return self.chat([{"role": role, "content": content} for role, content in said])


@cache
def tokens(path: str) -> Tokens:
    """The tokenizer at `path`, loaded once."""
    return Tokens(path)


def fit(make: Callable[[int], list[int]], wanted: int, spare: int = 0) -> list[int]:
    """A prompt of `wanted` tokens or a little fewer: .5 % or eight tokens, and up to 1 % if no try comes so near.

    Args:
        make: builds the prompt with a filling of about so many tokens; the same filling gives the same prompt.
        wanted: tokens of the whole prompt.
        spare: so many fewer are aimed for, within the same bounds.

    Raises:
        EvaluationError: what stands around the filling is already longer, or no filling fits.
    """
    least = wanted - max(8, int(TOLERANCE * wanted))
    # The share of a filling's tokens that it is asked for changes little from try to try.
    best: list[int] | None = None
    bare = len(make(0))
    if bare > wanted:
        raise EvaluationError(f"a prompt of {wanted} tokens has no room for its question: that alone takes {bare}")
    filling = max(0, wanted - spare - bare)
    for _ in range(ATTEMPTS):
        prompt = make(filling)
        if least <= len(prompt) <= wanted:
            return prompt
        if len(prompt) < wanted and (best is None or len(prompt) > len(best)):
            best = prompt
        made = len(prompt) - bare
        aim = max(least, min(wanted - spare, (least + wanted) // 2)) - bare
        filling = max(0, round(filling * aim / made)) if made > 0 else filling + wanted - len(prompt)
    if best is not None and len(best) >= 0.99 * wanted:
        return best
    raise EvaluationError(f"no filling gives a prompt of {wanted} tokens: the nearest has {len(best or [])}")


def random_prompts(batch: int, context: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, no two of which begin with the same one: refused where the vocabulary is smaller."""
    if vocabulary < batch:
        raise EvaluationError(f"a batch of {batch} needs as many first tokens, the vocabulary has {vocabulary}")
    rng = np.random.default_rng((seed, context))
    ids = rng.integers(vocabulary, size=(batch, context))
    ids[:, 0] = rng.choice(vocabulary, size=batch, replace=False)
    return ids.tolist()

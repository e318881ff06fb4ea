"""Token ids of uneven length in rectangular tensors, so that batches are put together on the GPU without a loop."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.texts.text import words

HIDDEN_ROLE, VALUE_ROLE, ANSWER_ROLE, BOOK_ROLE = 1, 2, 3, 4
"""What a token is to the loss; 0 is haystack and template text. A code is ``role * ROLE_STEP + token id``."""
ROLE_STEP = 1 << 16


@dataclass(frozen=True)
class Ragged:
    """Codes (..., width) of which the first `length` (...) of each row count."""

    codes: Tensor
    length: Tensor

    def mask(self) -> Tensor:
        """(..., width) bool: which entries count."""
        return torch.arange(self.codes.shape[-1], device=self.codes.device) < self.length[..., None]

    def take(self, index: Tensor) -> Ragged:
        """Picks along the dimension before the last: index (rows, picks) into codes (rows, n, width)."""
        width = self.codes.shape[-1]
        return Ragged(self.codes.gather(1, index[..., None].expand(-1, -1, width)), self.length.gather(1, index))

    def with_role(self, role: int) -> Ragged:
        """The same tokens, all with one role."""
        return Ragged(self.codes % ROLE_STEP + role * ROLE_STEP, self.length)


def compact(codes: Tensor, keep: Tensor) -> Ragged:
    """Moves the kept entries of each row to its front; codes and keep are (..., width)."""
    width = codes.shape[-1]
    at = torch.where(keep, keep.cumsum(-1) - 1, width)
    out = codes.new_zeros(*codes.shape[:-1], width + 1).scatter_(-1, at, codes)
    return Ragged(out[..., :width], keep.sum(-1))


def concat(parts: Sequence[Ragged]) -> Ragged:
    """Joins parts with equal leading dimensions end to end."""
    return compact(torch.cat([p.codes for p in parts], -1), torch.cat([p.mask() for p in parts], -1))


def flatten(turns: Ragged) -> Ragged:
    """(rows, n, width) -> (rows, n * width): the n pieces of a row one after the other."""
    return compact(turns.codes.flatten(1), turns.mask().flatten(1))


class Vocabulary:
    """Token tables of one tokenizer on one device.

    Args:
        encode: text -> token ids, special tokens in the text recognised, none added.
        split: which words keys are made of, "train" or "eval".
    """

    def __init__(self, encode: Callable[[str], list[int]], split: str, device: torch.device) -> None:
        self.encode, self.device = encode, device
        # A copy from the host waits for the GPU: each literal is sent once.
        self._literals: dict[str, Tensor] = {}
        # In random order, so that the first few are words like all others.
        self.words = random.Random(0).sample(words(split), len(words(split)))
        self.spaced = self._table([" " + word for word in self.words])
        self.bare = self._table(["-" + word for word in self.words])
        self.n_words = len(self.bare.length)
        self.digits = torch.tensor([encode(str(d))[0] for d in range(10)], device=device)
        self.mean_word = float(self.spaced.length.float().mean())

    def _table(self, texts: list[str]) -> Ragged:
        ids = [self.encode(text) for text in texts]
        width = max(map(len, ids))
        codes = torch.tensor([i + [0] * (width - len(i)) for i in ids], device=self.device)
        return Ragged(codes, torch.tensor([len(i) for i in ids], device=self.device))

    def literal(self, text: str, shape: Sequence[int]) -> Ragged:
        """The tokens of a text, repeated over `shape`."""
        if text not in self._literals:
            self._literals[text] = torch.tensor(self.encode(text), device=self.device, dtype=torch.long)
        ids = self._literals[text]
        return Ragged(ids.expand(*shape, -1), torch.full(tuple(shape), len(ids), device=self.device))

    def number(self, digits: Tensor) -> Ragged:
        """Digits (..., n) as tokens."""
        return Ragged(self.digits[digits], torch.full(digits.shape[:-1], digits.shape[-1], device=self.device))

    def key(self, index: Tensor, spaced: bool) -> Ragged:
        """Words (..., n) joined by hyphens; spaced: with a space before the first one."""
        parts = []
        for i in range(index.shape[-1]):
            table = self.spaced if i == 0 and spaced else self.bare
            codes, length = table.codes[index[..., i]], table.length[index[..., i]]
            if i == 0 and not spaced:
                codes, length = codes[..., 1:], length - 1
            parts.append(Ragged(codes, length))
        return concat(parts)

    def size(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.encode(text))


def render(vocabulary: Vocabulary, template: str, fields: dict[str, Tensor], key_kind: str) -> Ragged:
    """Tokens of a template as they stand in running text.

    The pieces between fields are tokenised alone. That is exact because every piece ends where the pre-tokenizer
    splits: digits are single tokens, and a word key takes the space before it along.

    Args:
        fields: name -> key words or digits (..., n) int64, all with the same leading dimensions.
        key_kind: "words", "digits" or "none".
    """
    shape = next(iter(fields.values())).shape[:-1]
    parts: list[Ragged] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        as_word = bool(name) and name != "value" and key_kind == "words"
        spaced = as_word and literal.endswith(" ")
        if literal[: -1 if spaced else None]:
            parts.append(vocabulary.literal(literal[: -1 if spaced else None], shape))
        if not name:
            continue
        value = fields[name]
        token = vocabulary.key(value, spaced) if as_word else vocabulary.number(value)
        parts.append(token.with_role(HIDDEN_ROLE))
    return concat(parts)

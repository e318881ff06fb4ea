"""Prompts from a user's own files."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sglang_sparse.tools.calibration.capture import CalibrationError, loading

# The two names of one argument, as messages have them.
FLAGS = "--data/--prompts"
FORMS = ".txt, .jsonl, or either of them with .xz"


@dataclass(frozen=True)
class Text:
    """Token ids of a text, and whether it is one prompt or a text to cut up."""

    tokens: Sequence[int]
    is_prompt: bool


class Prompts:
    """The texts of some files, cut into prompts.

    Args:
        files: ``.txt``, or ``.jsonl`` with an object a line that has ``text``, or ``messages`` as the OpenAI API
            takes them; ``.xz`` may follow.
        model_path: whose tokenizer and chat template to use.
        trust_remote_code: see `load_model`.
        revision: see `load_model`.

    Raises:
        CalibrationError: a file cannot be read or has another form, or there is no tokenizer or chat template.
    """

    def __init__(
        self,
        files: Sequence[Path],
        model_path: str,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        with loading(model_path, "no tokenizer: "):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model_path, trust_remote_code=trust_remote_code, revision=revision
            )
        # Texts are longer than a tokenizer thinks right.
        self._tokenizer.model_max_length = 10**9
        # What a raw prompt begins with, such as a BOS token; often nothing.
        self._start = [token for token in self._tokenizer.encode("") if token != self._tokenizer.eos_token_id]
        self._texts = [text for file in files for text in self._read(file)]

    def draw(self, length: int, n: int, seed: int) -> list[list[int]]:
        """Up to ``n`` prompts of ``length`` tokens: beginnings of prompts, and stretches of texts as `stretches` has.

        Raises:
            CalibrationError: all are shorter.
        """
        beginnings = [list(text.tokens[:length]) for text in self._texts if text.is_prompt]
        found = [tokens for tokens in beginnings if len(tokens) == length] + self._cut(length)
        if not found:
            longest = max((len(text.tokens) for text in self._texts), default=0)
            raise CalibrationError(
                f"{FLAGS}: a prompt of {length} tokens is needed and the longest of {len(self._texts)} texts has "
                f"{longest}: give longer texts or shorter --lengths",
                field=FLAGS,
                got=longest,
            )
        return _chosen(found, n, f"{seed} {length}")

    def stretches(self, length: int, n: int, seed: int) -> list[list[int]]:
        """Up to ``n`` stretches of ``length`` tokens of the texts that are no prompts; they do not overlap."""
        return _chosen(self._cut(length), n, f"{seed} {length}")

    def whole(self, shortest: int, longest: int, n: int, seed: int) -> list[list[int]]:
        """Up to ``n`` of the prompts of at least ``shortest`` tokens, none twice.

        They are as they stand. Of one that is longer than ``longest`` tokens the middle is left out, as the paper of
        RoBSA does with what exceeds a context: its end has the question and what the template opens an answer with.
        """
        prompts = [text.tokens for text in self._texts if text.is_prompt and len(text.tokens) >= shortest]
        return [_without_middle(tokens, longest) for tokens in _chosen(prompts, n, str(seed))]

    def _cut(self, length: int) -> list[list[int]]:
        size = length - len(self._start)
        return [
            [*self._start, *text.tokens[first : first + size]]
            for text in self._texts
            if not text.is_prompt
            for first in range(0, len(text.tokens) - size + 1, size)
        ]

    def _read(self, file: Path) -> Iterator[Text]:
        content = _content(file)
        if file.name.removesuffix(".xz").endswith(".txt"):
            yield Text(self.encode(content), is_prompt=False)
            return
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield Text(self._prompt(f"{FLAGS} {file}, line {number}", line), is_prompt=True)

    def _prompt(self, origin: str, line: str) -> list[int]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CalibrationError(f"{origin}: not valid JSON: {error}", field=FLAGS, got=line) from error
        fields = row if isinstance(row, dict) else {}
        text, messages = fields.get("text"), fields.get("messages")
        if isinstance(text, str):
            return self._start + self.encode(text)
        if not isinstance(messages, list):
            message = f'{origin}: allowed is an object with "text" (a string) or "messages" (a list)'
            raise CalibrationError(message, field=FLAGS, got=line)
        from jinja2 import TemplateError

        try:
            return self._chat(messages)
        # What transformers and the template of a model raise for messages, or for want of a template.
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            message = f"{origin}: the model's chat template refuses it: {error}"
            raise CalibrationError(message, field=FLAGS, got=line) from error

    def _chat(self, messages: Sequence[object]) -> list[int]:
        return self.encode(
            str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without a start or special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation; of a model without a chat template those of its texts, one after the other."""
        if self._tokenizer.chat_template is not None:
            return self._chat(messages)
        return self._start + self.encode("\n\n".join(message["content"] for message in messages))


T = TypeVar("T")


def _chosen(found: Sequence[T], n: int, seed: str) -> list[T]:
    return random.Random(seed).sample(found, min(n, len(found)))


def _without_middle(tokens: Sequence[int], longest: int) -> list[int]:
    if len(tokens) <= longest:
        return list(tokens)
    end = longest // 2
    return [*tokens[: longest - end], *tokens[len(tokens) - end :]]


def _content(file: Path) -> str:
    if not file.name.removesuffix(".xz").endswith((".txt", ".jsonl")):
        raise CalibrationError(field=FLAGS, got=file, allowed=FORMS)
    try:
        return lzma.open(file, "rt").read() if file.suffix == ".xz" else file.read_text()
    except (OSError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise CalibrationError(f"{FLAGS} {file}: cannot be read ({error})", field=FLAGS, got=file) from error

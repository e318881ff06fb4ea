"""The prompts of a RoBSA calibration: the default mix or the user's own, their lengths, and their groups."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from sglang_sparse.methods.robsa.calibration_file import PromptGroup
from sglang_sparse.tools.calibration.capture import CalibrationError
from sglang_sparse.tools.calibration.mix import mix
from sglang_sparse.tools.calibration.prompts import FLAGS, Prompts

# Of shorter prompts of the user's all positions are early ones, where any two attentions are alike.
SHORTEST = 32


class Prompt(NamedTuple):
    """Token ids, of which kind they are, and for which length they were made (see `PromptGroup`)."""

    kind: str
    tokens: list[int]
    length: int | None


class Group(NamedTuple):
    """A group of prompts as in the file, and the places of its prompts."""

    about: PromptGroup
    places: list[int]


def draw_mix(source: Prompts, n: int, lengths: Sequence[int], seed: int) -> list[Prompt]:
    """The default mix, see `mix`.

    Raises:
        CalibrationError: a length leaves no room.
    """
    made = mix(n, lengths, seed, lambda text: len(source.encode(text)))
    return [Prompt(one.kind, source.encode_messages(one.messages), one.length) for one in made]


def draw_files(source: Prompts, n: int, lengths: Sequence[int], seed: int) -> list[Prompt]:
    """Prompts of the user's files: the lines of .jsonl, then stretches of texts, as many of each length.

    Raises:
        CalibrationError: the files have too few.
    """
    lines = source.whole(SHORTEST, lengths[-1], n, seed)
    found, left = [Prompt("files", tokens, None) for tokens in lines], n - len(lines)
    for i, length in enumerate(lengths):
        # The first ones get what is left over.
        wanted = (left + len(lengths) - 1 - i) // len(lengths)
        drawn = source.stretches(length, wanted, seed)
        if len(drawn) < wanted:
            more = f" in addition to {len(lines)} lines of {SHORTEST} tokens or more" if lines else ""
            raise CalibrationError(
                f"{FLAGS}: {wanted} prompts of {length} tokens are needed and the files have {len(drawn)}{more}: "
                "give more texts, shorter --lengths or a smaller --n",
                field=FLAGS,
                got=len(drawn),
            )
        found += [Prompt("files", tokens, length) for tokens in drawn]
    return found


def fitting(lengths: Sequence[int], context: int, is_default: bool) -> list[int]:
    """The lengths that a model's context holds; of default ones, which are ascending, at least the context itself.

    Raises:
        CalibrationError: the user gave a longer one.
    """
    held = [length for length in lengths if length <= context]
    if len(held) < len(lengths) and not is_default:
        message = f"--lengths {max(lengths)}: the model's context is {context} tokens"
        raise CalibrationError(message, field="--lengths", got=max(lengths))
    return held or [context]


def groups(prompts: Sequence[Prompt]) -> list[Group]:
    """The prompts by kind and length, in the order in which these come first."""
    places: dict[tuple[str, int | None], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault((prompt.kind, prompt.length), []).append(place)
    found = []
    for (kind, length), several in places.items():
        tokens = round(statistics.fmean(len(prompts[place].tokens) for place in several))
        found.append(Group(PromptGroup(kind=kind, prompts=len(several), tokens=tokens, length=length), several))
    return found


def long_places(prompts: Sequence[Prompt], min_seq_len: int) -> list[int]:
    """Places of the prompts whose last position a server runs sparse."""
    return [place for place, prompt in enumerate(prompts) if len(prompt.tokens) >= min_seq_len]


def notes(left_out: Sequence[int], context: int, longest: int, min_seq_len: int) -> list[str]:
    """Return notes for a reader of the calibration.

    Args:
        left_out: default lengths that were not run.
        context: tokens that the model takes.
        longest: tokens of the longest prompt.
        min_seq_len: tokens from which a row runs sparse.
    """
    found = []
    if left_out:
        lengths = ", ".join(map(str, left_out))
        found.append(f"prompts of {lengths} tokens were left out: the model's context is {context} tokens")
    if longest < min_seq_len:
        found.append(
            f"no prompt has {min_seq_len} tokens (min_seq_len), from which rows run sparse; the longest has {longest}: "
            "layers were judged by shorter ones, in which similarities tend to be higher; give longer --lengths"
        )
    return found

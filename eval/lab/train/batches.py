"""Training rows, built on the GPU: a slice of text, records of one form written over it, questions at its end.

A batch is made of groups of rows. A group has one form, one number of records and one size of key, so that its tensors
are rectangular; all else is random per row.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.lab.train.ragged import (
    ANSWER_ROLE,
    BOOK_ROLE,
    HIDDEN_ROLE,
    ROLE_STEP,
    VALUE_ROLE,
    Ragged,
    Vocabulary,
    concat,
    flatten,
    render,
)
from eval.lab.train.schedule import FULL
from eval.texts.text import FORMS, IM_END, IM_START, NOISE, RULER_INTROS, Form

FILLS = (0.0, 0.02, 0.1, 0.3, 0.6, 0.95)
LM_WEIGHT = {0: 0.1, HIDDEN_ROLE: 0.0, VALUE_ROLE: 0.0, ANSWER_ROLE: 0.0, BOOK_ROLE: 1.0}
ANSWER_WEIGHT = {0: 0.0, HIDDEN_ROLE: 0.0, VALUE_ROLE: 1.0, ANSWER_ROLE: 0.3, BOOK_ROLE: 0.0}
# Only the first token of a value has to be looked up; the others follow from the one before.
FIRST_WEIGHT = 3.0


@dataclass(frozen=True)
class Batch:
    """Tokens (rows, length) int64; role of each token; weights of predicting the *next* token, float32."""

    tokens: Tensor
    roles: Tensor
    lm_weight: Tensor
    answer_weight: Tensor

    @property
    def answers(self) -> Tensor:
        """(rows, length) bool: tokens of answers, their ends included."""
        return (self.roles == VALUE_ROLE) | (self.roles == ANSWER_ROLE)

    def rows(self, index: Tensor) -> Batch:
        """Some of the rows; index (n,) int64."""
        return Batch(self.tokens[index], self.roles[index], self.lm_weight[index], self.answer_weight[index])


@dataclass(frozen=True)
class Plan:
    """What the rows of a group have in common."""

    form: Form
    chains: int
    hops: int
    turns: int
    key_size: int
    digits: int
    joiner: str
    intro: str
    near_miss: bool
    pool: int

    @property
    def head(self) -> str:
        """What the rows start with."""
        return (f"{IM_START}user\n" if self.form.chat else "") + self.intro


def answer_turn(form: Form, hops: int) -> list[tuple[str, int]]:
    """Templates of the parts of an asked and answered turn, with the role of each part's literal text."""
    question = form.question_template
    if form.chat:
        question += f"{IM_END}\n{IM_START}assistant\n"
    return [(question, 0), (form.answer_for_hops(hops), ANSWER_ROLE), (IM_END, VALUE_ROLE)]


def turn_starts(form: Form) -> tuple[str, str]:
    """What stands before the first question and before every later one."""
    return "\n", f"\n{IM_START}user\n" if form.chat else "\n"


class BatchBuilder:
    """Builds batches out of a stream of book tokens (n,) int64 on the device."""

    def __init__(self, vocabulary: Vocabulary, books: Tensor, seed: int, groups: int = 8) -> None:
        self.vocabulary, self.books, self.groups = vocabulary, books, groups
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device=books.device).manual_seed(seed)
        noise = torch.tensor(vocabulary.encode(NOISE + "\n"), device=books.device)
        self.noise = noise.repeat(-(-80_000 // len(noise)))
        self.mix = FULL
        self.lm_weight = torch.tensor([LM_WEIGHT[i] for i in range(5)], device=books.device)
        self.answer_weight = torch.tensor([ANSWER_WEIGHT[i] for i in range(5)], device=books.device)

    def batch(self, length: int, tokens: int, most_turns: int = 16) -> Batch:
        """A training batch of `tokens` tokens in rows of `length`."""
        rows = max(1, tokens // length)
        groups = min(self.groups, rows)
        sizes = [rows // groups + (i < rows % groups) for i in range(groups)]
        return self._pack(torch.cat([self._group(size, length, most_turns) for size in sizes]))

    def form_batch(self, form: str, length: int, rows: int, fill: float) -> Batch:
        """Rows of one form with one question each, as for measuring; chains have two hops."""
        plans = [self._plan(FORMS[form], length, fill, most_turns=1) for _ in range(min(4, rows))]
        if FORMS[form].link:
            plans = [replace(plan, hops=2, chains=max(1, plan.chains * plan.hops // 2)) for plan in plans]
        return self._pack(torch.cat([self._rows(plan, -(-rows // len(plans)), length) for plan in plans]))

    def _pack(self, codes: Tensor) -> Batch:
        tokens, roles = codes % ROLE_STEP, codes // ROLE_STEP
        following = torch.cat([roles[:, 1:], torch.full_like(roles[:, :1], HIDDEN_ROLE)], 1)
        first = (following == VALUE_ROLE) & (roles != VALUE_ROLE)
        answer = self.answer_weight[following] * torch.where(first, FIRST_WEIGHT, 1.0)
        return Batch(tokens, roles, self.lm_weight[following], answer)

    def _group(self, rows: int, length: int, most_turns: int) -> Tensor:
        if self.rng.random() < self.mix.book_share:
            return self._slices(self.books, rows, length) + BOOK_ROLE * ROLE_STEP
        (name,) = self.rng.choices(list(self.mix.forms), list(self.mix.forms.values()))
        return self._rows(self._plan(FORMS[name], length, self.rng.choice(FILLS), most_turns), rows, length)

    def _plan(self, form: Form, length: int, fill: float, most_turns: int) -> Plan:
        """Draws what a group has in common; as many questions as fit into half the row, as many records as asked."""
        rng, mix = self.rng, self.mix
        hops = rng.choice(mix.hops) if form.link else 1
        sizes = {"words": (1, 1, 2) if form.link else mix.key_sizes, "none": (1,)}
        key_size = rng.randint(*mix.json_digits) if form.keys == "digits" else rng.choice(sizes[form.keys])
        digits = rng.choice(mix.short_digits if form.link or form.keys == "none" else mix.digits)
        key = key_size if form.keys == "digits" else 1 + key_size * (self.vocabulary.mean_word + 1)
        record = sum(self._size(t, key, digits) for t in form.record_templates(hops)) + hops
        turn = sum(self._size(t, key, digits) for t, _ in answer_turn(form, hops)) + 4
        if form.keys == "none":
            chains = turns = 1
        else:
            turns = max(1, min(rng.randint(4, max(4, most_turns)), most_turns, int(length * 0.6 / turn)))
            chains = max(int(fill * (length - turns * turn) / record), 1 if rng.random() < 0.2 else turns)
        joiner = rng.choice((" ", "\n")) if form.last_record.endswith(".") else "\n"
        return Plan(
            form=form,
            chains=chains,
            hops=hops,
            turns=min(turns, chains),
            key_size=key_size,
            digits=digits,
            joiner=joiner,
            intro=rng.choice((*RULER_INTROS, "", "", "")) if "needle" in form.name else "",
            pool=min(self.vocabulary.n_words, rng.choice((64, 512, 10**6, 10**6))),
            near_miss=rng.random() < 0.4 and key_size > 1 and form.keys == "words",
        )

    def _size(self, template: str, key: float, digits: int) -> float:
        """Expected tokens of a template."""
        size = template.count("{key") * (key - 1) + template.count("{value}") * (digits - 1)
        fields = {f"key{i}": "a" for i in range(4)}
        return size + self.vocabulary.size(template.format(value="1", **fields))

    def _integers(self, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.books.device)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.books.device)

    def _slices(self, stream: Tensor, rows: int, length: int) -> Tensor:
        start = self._integers(len(stream) - length, (rows, 1))
        return stream[start + torch.arange(length, device=stream.device)]

    def _haystack(self, rows: int, length: int) -> Tensor:
        kind = self.rng.random()
        if kind < 0.75:
            return self._slices(self.books, rows, length)
        if kind < 0.9:
            return self._slices(self.noise, rows, length)
        table, index = self.vocabulary.spaced, self._integers(self.vocabulary.n_words, (rows, length))
        return flatten(Ragged(table.codes[index], table.length[index])).codes[:, :length]

    def _keys(self, plan: Plan, rows: int) -> tuple[Tensor, Tensor]:
        """Keys (rows, chains, hops, size) and which chains have no key in common with another (rows, chains)."""
        shape = (rows, plan.chains, plan.hops, plan.key_size)
        if plan.form.keys == "digits":
            keys, base = self._integers(10, shape), 10
            keys[..., 0] = keys[..., 0] % 9 + 1
        else:
            keys, base = self._integers(plan.pool, shape), self.vocabulary.n_words
        if plan.near_miss:
            few = self._integers(self.vocabulary.n_words, (8,))
            keys[..., self.rng.randrange(plan.key_size)] = few[self._integers(8, shape[:-1])]
        number = torch.zeros_like(keys[..., 0])
        for i in range(plan.key_size):
            number = number * base + keys[..., i]
        flat = number.flatten(1).sort(1)
        same = flat.values[:, 1:] == flat.values[:, :-1]
        edge = same.new_zeros(rows, 1)
        twice = torch.cat([edge, same], 1) | torch.cat([same, edge], 1)
        unique = ~torch.zeros_like(twice).scatter(1, flat.indices, twice).view(shape[:-1]).any(-1)
        return keys, unique

    def _rows(self, plan: Plan, rows: int, length: int) -> Tensor:
        """Codes (rows, length) of one group."""
        keys, unique = self._keys(plan, rows)
        value = self._integers(10, (rows, plan.chains, plan.digits))
        value[..., 0] = value[..., 0] % 9 + 1
        fields = {f"key{i}": keys[:, :, i] for i in range(plan.hops)} | {"value": value}
        records = [
            render(self.vocabulary, plan.joiner + template + plan.joiner.strip(" "), fields, plan.form.keys)
            for template in plan.form.record_templates(plan.hops)
        ]
        asked = (self._rand(rows, plan.chains) + unique).topk(plan.turns, 1).indices
        turns = self._turns(plan, {name: _pick(field, asked) for name, field in fields.items()})
        head = self.vocabulary.literal(plan.head, (rows,)) if plan.head else None
        start = head.codes.shape[1] if head else 0
        space = (length - start - flatten(turns).length).clamp(min=0)
        codes, intact = self._write_records(plan, self._haystack(rows, length), records, start, space)
        fair = (intact & unique).gather(1, asked)[..., None]
        turns = Ragged(torch.where(fair, turns.codes, turns.with_role(HIDDEN_ROLE).codes), turns.length)
        tail = flatten(turns)
        at = length - tail.length[:, None] + torch.arange(tail.codes.shape[1], device=codes.device)
        codes = _write(codes, at, tail.codes, tail.mask() & (at >= start))
        if head:
            codes[:, :start] = head.codes
        return codes

    def _turns(self, plan: Plan, fields: dict[str, Tensor]) -> Ragged:
        """Questions with answers (rows, turns, width); in the answer the value and its end have the role VALUE."""
        shape = fields["value"].shape[:2]
        parts = []
        for template, role in answer_turn(plan.form, plan.hops):
            part = render(self.vocabulary, template, fields, plan.form.keys)
            if role:
                hidden = part.codes // ROLE_STEP == HIDDEN_ROLE
                part = Ragged(part.codes % ROLE_STEP + ROLE_STEP * torch.where(hidden, VALUE_ROLE, role), part.length)
            parts.append(part)
        first, later = (self.vocabulary.literal(text, (shape[0], 1)) for text in turn_starts(plan.form))
        width = max(first.codes.shape[-1], later.codes.shape[-1])
        starts = [_padded(first, width), *[_padded(later, width)] * (shape[1] - 1)]
        opening = Ragged(torch.cat([s.codes for s in starts], 1), torch.cat([s.length for s in starts], 1))
        return concat([opening, *parts])

    def _write_records(
        self, plan: Plan, codes: Tensor, records: list[Ragged], start: int, space: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes records at random places of the first `space` (rows,) tokens behind `start`, in random order.

        The line break after a record is the same one as that before the next record if both stand together.

        Returns:
            The codes and which chains (rows, chains) stand there whole.
        """
        width = max(r.codes.shape[-1] for r in records)
        every = Ragged(
            torch.cat([_padded(r, width).codes for r in records], 1), torch.cat([r.length for r in records], 1)
        )
        order = self._rand(*every.length.shape).argsort(1)
        shuffled = every.take(order)
        size = shuffled.length - len(plan.joiner.strip(" "))
        end = size.cumsum(1)
        slack = (space[:, None] - end[:, -1:]).clamp(min=0)
        gaps = (self._rand(*end.shape).sort(1).values * (slack + 1)).long().minimum(slack)
        at = start + gaps + end - size
        places = at[..., None] + torch.arange(width, device=codes.device)
        keep = shuffled.mask() & (places < codes.shape[1])
        codes = _write(codes, places.flatten(1), shuffled.codes.flatten(1), keep.flatten(1))
        whole = at + size <= start + space[:, None]
        whole = torch.zeros_like(whole).scatter(1, order, whole)
        return codes, whole.view(-1, plan.hops, plan.chains).all(1)


def _pick(field: Tensor, index: Tensor) -> Tensor:
    """field (rows, chains, n) at index (rows, picks)."""
    return field.gather(1, index[..., None].expand(-1, -1, field.shape[-1]))


def _padded(part: Ragged, width: int) -> Ragged:
    return Ragged(torch.nn.functional.pad(part.codes, (0, width - part.codes.shape[-1])), part.length)


def _write(codes: Tensor, at: Tensor, new: Tensor, keep: Tensor) -> Tensor:
    """codes (rows, length) with new (rows, n) written at places `at` where `keep`."""
    length = codes.shape[1]
    padded = torch.nn.functional.pad(codes, (0, 1))
    return padded.scatter(1, torch.where(keep, at, length), new)[:, :length].contiguous()


class BatchPool:
    """Hands out batches of rows drawn at random from `ahead` batches that were built as one.

    A batch takes some 300 small kernels per group of rows, whatever its size. Built for eight steps at once, the same
    kernels serve eight times the rows, and each step sees more groups.
    """

    def __init__(self, builder: BatchBuilder, tokens: int, ahead: int, seed: int) -> None:
        self.builder, self.tokens, self.ahead = builder, tokens, ahead
        self.generator = torch.Generator(device=builder.books.device).manual_seed(seed)
        self._ready: dict[tuple[int, int], list[Batch]] = {}

    def clear(self) -> None:
        """Forgets what was built, because the mix has changed."""
        self._ready.clear()

    def next(self, length: int, most_turns: int) -> Batch:
        """A batch of `tokens` tokens in rows of `length`."""
        ready = self._ready.setdefault((length, most_turns), [])
        if not ready:
            rows = max(1, self.tokens // length)
            built = self.builder.batch(length, rows * length * self.ahead, most_turns)
            order = torch.randperm(rows * self.ahead, generator=self.generator, device=built.tokens.device)
            ready += [built.rows(part) for part in order.split(rows)]
        return ready.pop()

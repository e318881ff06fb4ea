"""The agreement of running text with the training rows."""

import difflib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from eval.lab.train.batches import BatchBuilder
from eval.lab.train.ragged import ROLE_STEP, Vocabulary, render
from eval.texts import text
from eval.texts.text import FORMS, IM_END

MODEL = Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa"
BOOK = " ".join(f"It was {word} upon the {word}, and so they went on." for word in text.words("eval")) * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def builder(tokenizer: Tokenizer) -> BatchBuilder:
    def encode(value: str) -> list[int]:
        return tokenizer.encode(value, add_special_tokens=False).ids

    vocabulary = Vocabulary(encode, "train", torch.device("cpu"))
    return BatchBuilder(vocabulary, torch.tensor(encode(BOOK)), seed=5)


def key_strings(words: list[str], keys: torch.Tensor, kind: str) -> list[str]:
    """Names of one chain: keys (hops, size)."""
    if kind == "digits":
        return ["".join(map(str, key)) for key in keys.tolist()]
    return ["-".join(words[i] for i in key) for key in keys.tolist()] if kind == "words" else []


@pytest.mark.parametrize("name", FORMS)
def test_records_are_tokenised_as_in_running_text(name: str, builder: BatchBuilder, tokenizer: Tokenizer) -> None:
    form = FORMS[name]
    for _ in range(20):
        plan = builder._plan(form, 512, 0.6, most_turns=4)
        keys, _ = builder._keys(plan, 1)
        fields = {f"key{i}": keys[:, :, i] for i in range(plan.hops)}
        fields["value"] = torch.randint(10, (1, plan.chains, plan.digits))
        for hop, template in enumerate(form.record_templates(plan.hops)):
            made = render(builder.vocabulary, plan.joiner + template, fields, form.keys)
            for chain in range(plan.chains):
                names = key_strings(builder.vocabulary.words, keys[0, chain], form.keys)
                value = "".join(map(str, fields["value"][0, chain].tolist()))
                record = "It rained." + plan.joiner + form.records(*names, value=value)[hop]
                ids = (made.codes[0, chain, : made.length[0, chain]] % ROLE_STEP).tolist()
                assert tokenizer.encode(record, add_special_tokens=False).ids[-len(ids) :] == ids


@pytest.mark.parametrize("name", FORMS)
def test_turns_are_tokenised_as_in_running_text(name: str, builder: BatchBuilder, tokenizer: Tokenizer) -> None:
    form = FORMS[name]
    for _ in range(20):
        plan = builder._plan(form, 512, 0.6, most_turns=4)
        keys, _ = builder._keys(plan, 1)
        keys = keys[:, : plan.turns]
        value = torch.randint(10, (1, plan.turns, plan.digits))
        fields = {f"key{i}": keys[:, :, i] for i in range(plan.hops)} | {"value": value}
        turns = builder._turns(plan, fields)
        names = [key_strings(builder.vocabulary.words, keys[0, i], form.keys) for i in range(plan.turns)]
        values = ["".join(map(str, v)) for v in value[0].tolist()]
        pairs = [(form.question(*n[:1]), form.answer(*n, value=v)) for n, v in zip(names, values, strict=True)]
        prompt = text.prompt_text(form, "It rained.", pairs[-1][0], pairs[:-1])
        whole = tokenizer.encode(prompt, add_special_tokens=False).ids
        whole += tokenizer.encode(pairs[-1][1] + IM_END, add_special_tokens=False).ids
        made = [i for turn in range(plan.turns) for i in turns.codes[0, turn, : turns.length[0, turn]].tolist()]
        assert [i % ROLE_STEP for i in made] == whole[-len(made) :]


@pytest.mark.parametrize("name", FORMS)
def test_rows_read_as_text_tokenise_nearly_to_themselves(
    name: str, builder: BatchBuilder, tokenizer: Tokenizer
) -> None:
    for row in builder.form_batch(name, 512, rows=4, fill=0.3).tokens.tolist():
        again = tokenizer.encode(tokenizer.decode(row, skip_special_tokens=False), add_special_tokens=False).ids
        assert difflib.SequenceMatcher(a=row, b=again, autojunk=False).ratio() > 0.95

"""Writes the model card: ``python -m eval.train.card --accuracy FILE --training FILE --out README.md``.

Every figure comes from the two result files and, if it is beside the card, robsa.json: what
``python -m sglang_sparse.calibrate --method robsa`` found of the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]

BLOCKS = """\
The prompt is read densely, the answer is decoded with block-sparse attention: blocks of 16, at least 16 blocks."""
SHAPES = {
    "tiny-gqa": {
        "kind": "A Qwen3 model",
        "architecture": "Qwen3ForCausalLM",
        "shape": "hidden 256, MLP 640, 8 query and 2 KV heads of 64",
        "modules": "`eval.train.gqa`",
        "attention": "dense attention",
        "other": "a sparse decode",
        "selectors": f"""{BLOCKS}
`quest` is the bound for the mean query of a group, `quest_scores` the mean of the heads' bounds, `mass` the true
attention mass.""",
        "remark": """\
Where nearly all of the text is records, the bound itself misses blocks while the true mass does not: those rows are
for reporting, not for gates.""",
    },
    "tiny-mla": {
        "kind": "A DeepSeek-V3 model with plain MLPs",
        "architecture": "DeepseekV3ForCausalLM",
        "shape": "hidden 256, MLP 640, 8 heads of 64 + 64 (rotary, interleaved) and 64 for values, latent rank 512, "
        "query rank 192",
        "modules": "`eval.train.mla`",
        "attention": "dense attention",
        "other": "a sparse decode",
        "selectors": f"""{BLOCKS}
The blocks are the same for all heads: `mass` takes those of the largest attention mass, the mean over the heads, `rope`
those of the largest mass by the scores of the rotary part alone.""",
        "remark": """\
In all layers but the last one the last stage of the training drew the scores of the rotary part and the full ones
together, so that the former stand for the latter there and not in the last one. What is selected in these three decides
an answer: a random selection finds nothing. The third one's weight in that was small in one run of the stage and larger
in the next (`--proxy-weights`; the training log has them).""",
    },
    "tiny-dsa": {
        "kind": "A DeepSeek-V3.2 model: tiny-mla with a lightning indexer",
        "architecture": "DeepseekV32ForCausalLM",
        "shape": "that of tiny-mla, with its weights from before the last stage was trained again; an indexer of 32 "
        "heads of 128 chooses 512 tokens",
        "modules": "`eval.train.dsa`",
        "attention": "every row attends to the 512 tokens of its indexer",
        "other": "another choice",
        "selectors": """\
All rows, those of the prompt too, attend to all tokens (`dense`, the trunk alone) or to 512 random ones (`random`);
`indexer` is the model itself.""",
        "remark": """\
Queries and keys of the indexer are rounded to e4m3 here as SGLang does on CUDA; transformers rounds nothing, so that
its choice differs in a few tokens. Up to 512 tokens the attention is dense. Only the indexers were trained: on 64 rows
in answers and 64 others of each sequence, in the stage "sparse" with a quarter of the tokens in a step.""",
    },
}
"""What the cards say of each model."""

HEAD = """# {model}

{kind} of {millions:.2f} M parameters that looks numbers up in long texts and does little else. It exists to test
sparse attention: small enough for a CPU server, and a right implementation of a block selector scores close to dense
attention while a random selection of the same size scores close to zero. Its accuracy says something about an
implementation and nothing about the quality of a method on real models.

| | |
| --- | --- |
| class | `{architecture}`, bfloat16, tied embedding, loads with transformers and SGLang |
| shape | 4 layers, {shape}, RoPE theta 1e6, context 40,960 |
| tokenizer | byte-level BPE, 4,096 entries, every digit a token; trained on the training books |
| stops at | `<\\|im_end\\|>` |
| training | {steps:,} steps of {tokens:,} tokens, seed {seed}, {seconds:.0f} s on one {device} |
| made by | `python -m eval.train.tokenizer`, {modules}, `eval.train.accuracy`, `eval.train.card` |

The stages end by accuracy or by time, so another run gives another model with the same seed.

## Asking it

Forms, example strings and helpers are in `eval/texts/text.py`. Chat: the long text and the question in the user's turn,
the answer alone in the assistant's; later questions are further turns.

| form | a record in the text | question | answer |
| --- | --- | --- | --- |
{forms}

The answer to a variable names every variable on the way. Values are 5, 7 or 8 digits, keys one to three lower-case
words joined by hyphens (JSON: 5-8 digits). Greedy decoding.

## Exact match, {attention}

Whole answer and end of turn; held-out books; keys of words unseen in training, except in rows named "known_words". The
percentage is the share of the text that is records; without one the text has a single record. n = {n_long} to {n}. An
empty cell was not measured.

{dense}

## Exact match with {other}, {sparse_length} tokens

{selectors} n = {n_sparse}.

{sparse}

{remark}

{partition}## Training

{training}

Exact match here is on rows built as in training (60 % records, one question) at the length of the stage.

## Data and licence

Trained on 16 novels and travel books in the public domain in the USA (their authors died in 1937 or earlier; Project
Gutenberg e-texts without its header and name) and on generated numbers. Tested on five other books by other authors.
Weights, tokenizer and this card: Apache-2.0.
"""

PARTITION = """\
## Layers that may select by their rotary part

Cosine similarity of the attention by the full scores and by those of the rotary part alone, as `robsa.json` has it:
mean and deviation over {prompts} prompts, and the mean over the {long} of at least {least} tokens. A layer is
sensitive, RoBSA's word for one whose rotary part is a reliable proxy, if both means are above theta2 = {theta2:g}.

{table}

"""
CALIBRATION = "robsa.json"


def read(path: Path) -> list[Line]:
    """Lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def dense_table(lines: list[Line]) -> str:
    """Tasks by lengths."""
    lengths = sorted({line["length"] for line in lines})
    found = {(line["task"], line["length"]): f"{line['exact_match']:.3f}" for line in lines}
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    return table(["task", *map(str, lengths)], [[t, *(found.get((t, n), "") for n in lengths)] for t in tasks])


def sparse_table(lines: list[Line]) -> str:
    """Tasks by selectors and ratios."""
    columns = list(dict.fromkeys((line["selector"], line["ratio"]) for line in lines))
    found = {(line["task"], line["selector"], line["ratio"]): f"{line['exact_match']:.2f}" for line in lines}
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    header = ["task", *(f"{selector} {ratio}" for selector, ratio in columns)]
    return table(header, [[t, *(found[t, s, r] for s, r in columns)] for t in tasks])


def training_table(stages: list[Line]) -> str:
    """Stages with their steps and their exact match by form."""
    forms = list(stages[-1]["exact_match"])
    rows = [
        [
            s["stage"],
            str(s["steps"]),
            f"{s['seconds']:.0f}",
            *(f"{s['exact_match'][f]:.2f}" if f in s["exact_match"] else "" for f in forms),
        ]
        for s in stages
    ]
    return table(["stage", "steps", "seconds", *forms], rows)


def partition(calibration: dict[str, Any]) -> str:
    """The section of the layers' similarity, from the content of a calibration file.

    Raises:
        ValueError: if the content is no config of RoBSA, or has no measured calibration.
    """
    from sglang_sparse.calibration.partition import RopeCalibration
    from sglang_sparse.methods.robsa import RobsaConfig

    config = RobsaConfig.model_validate(calibration)
    found = config.calibration
    if not isinstance(found, RopeCalibration):
        raise ValueError(f"calibration: got {found!r}, allowed is what sglang_sparse.calibrate --method robsa writes")
    sensitive = found.sensitive(config.theta2)
    rows = [
        [
            str(row.layer),
            f"{row.mean:.4f}",
            f"{row.deviation:.4f}",
            f"{row.long.mean:.4f}" if row.long else "",
            "yes" if row.layer in sensitive else "no",
        ]
        for row in found.layers
    ]
    return PARTITION.format(
        prompts=sum(group.prompts for group in found.prompts),
        long=found.long_prompts or 0,
        least=found.min_seq_len,
        theta2=config.theta2,
        table=table(["layer", "similarity", "deviation", "of long prompts", "sensitive"], rows),
    )


def read_calibration(folder: Path) -> dict[str, Any] | None:
    """Content of the calibration file in a model's folder, if it has one."""
    path = folder / CALIBRATION
    return json.loads(path.read_text()) if path.exists() else None


def forms_table() -> str:
    """One row per form, without the header."""
    from eval.texts.text import FORMS

    rows = []
    for form in FORMS.values():
        keys = {"words": ("lantern-hill", "copper-meadow"), "digits": ("48213977",), "none": ()}[form.keys]
        keys = keys[: 2 if form.link else 1]
        value = "48219" if form.link or not keys else "4821937"
        cells = (
            "<br>".join(form.records(*keys, value=value)),
            form.question(*keys[:1]),
            form.answer(*keys, value=value),
        )
        name = form.name if form.chat else f"{form.name} (raw prompt)"
        rows.append([name, *(f"`{cell}`" for cell in cells)])
    return table(["form", "record", "question", "answer"], rows).split("\n", 2)[2]


def card(accuracy: list[Line], training: list[Line], calibration: dict[str, Any] | None = None) -> str:
    """The model card as text; with the content of a calibration file it has a section of it, see `partition`."""
    settings, stages = training[0], [line for line in training if "stage" in line]
    model = settings.get("model", "tiny-gqa")
    own = "indexer" if model == "tiny-dsa" else "dense"
    dense = [line for line in accuracy if line["selector"] == own]
    sparse = [line for line in accuracy if line["selector"] != own]
    if own != "dense":
        compared = {(line["task"], line["length"]) for line in sparse}
        sparse = [line for line in dense if (line["task"], line["length"]) in compared] + sparse
    return HEAD.format(
        model=model,
        **SHAPES[model],
        millions=settings["parameters"] / 1e6,
        steps=sum(s["steps"] for s in stages),
        tokens=settings["tokens_per_step"],
        seed=settings["seed"],
        seconds=sum(s["seconds"] for s in stages),
        device=settings["device"],
        forms=forms_table(),
        n=max(line["n"] for line in dense),
        n_long=min(line["n"] for line in dense),
        n_sparse=sparse[-1]["n"],
        sparse_length=sparse[0]["length"],
        dense=dense_table(dense),
        sparse=sparse_table(sparse),
        partition=partition(calibration) if calibration else "",
        training=training_table(stages),
    )


def main() -> None:
    """Reads both result files, and the calibration in the card's folder, and writes the card."""
    parser = argparse.ArgumentParser(description="Writes the model card")
    parser.add_argument("--accuracy", type=Path, required=True)
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(card(read(args.accuracy), read(args.training), read_calibration(args.out.parent)))


if __name__ == "__main__":
    main()

"""What the cards of the tiny models say: texts with room for figures of `card`."""

BLOCKS = """\
The prompt is read densely, the answer is decoded with block-sparse attention: blocks of 16, at least 16 blocks."""
SHAPES = {
    "tiny-gqa": {
        "kind": "A Qwen3 model",
        "architecture": "Qwen3ForCausalLM",
        "shape": "hidden 256, MLP 640, 8 query and 2 KV heads of 64",
        "modules": "`eval.lab.train.gqa`",
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
        "modules": "`eval.lab.train.mla`",
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
        "modules": "`eval.lab.train.dsa`",
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
| made by | `python -m eval.lab.train.tokenizer`, {modules}, `eval.lab.train.accuracy`, `eval.lab.train.card` |

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

{sparse}{remark}

{partition}## Training

{training}

Exact match here is on rows built as in training (60 % records, one question) at the length of the stage.

## Data and licence

Trained on 16 novels and travel books in the public domain in the USA (their authors died in 1937 or earlier; Project
Gutenberg e-texts without its header and name) and on generated numbers. Tested on five other books by other authors.
Weights, tokenizer and this card: Apache-2.0.
"""

SPARSE = """\
## Exact match with {other}, {length} tokens

{selectors} n = {n}.

{table}

"""
PARTITION = """\
## Layers that may select by their rotary part

Cosine similarity of the attention by the full scores and by those of the rotary part alone, as `robsa.json` has it:
mean and deviation over {prompts} prompts, and the mean over the {long} of at least {least} tokens. A layer is
sensitive, RoBSA's word for one whose rotary part is a reliable proxy, if both means are above theta2 = {theta2:g}.

{table}

"""

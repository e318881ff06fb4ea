"""Tokenizer of the tiny models: byte-level BPE of 4,096 entries, every digit a token of its own.

``python -m eval.lab.train.tokenizer --books DIR --out DIR`` trains it on the training books only, and writes the list
of words that keys are made of.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eval.texts.text import END_OF_TEXT, IM_END, PAD, SPECIAL_TOKENS, WORDS_FILE, read_books

VOCAB_SIZE = 4096
MAX_LENGTH = 40960
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(books: list[str]) -> Tokenizer:
    """Byte-level BPE with the special tokens as its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(books, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """The content of tokenizer_config.json, readable by transformers 4 and 5."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "eos_token": IM_END,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (IM_END, PAD)],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def common_words(books: Sequence[str], least: int = 40) -> list[str]:
    """Lower-case words of 4-9 letters that stand at least `least` times in at least three books together, sorted."""
    total: dict[str, int] = {}
    in_books: dict[str, int] = {}
    for book in books:
        found = re.findall(r"(?<![A-Za-z'-])[a-z]{4,9}(?![A-Za-z'-])", book)
        for word in found:
            total[word] = total.get(word, 0) + 1
        for word in set(found):
            in_books[word] = in_books.get(word, 0) + 1
    return sorted(word for word, n in total.items() if n >= least and in_books[word] >= 3)


def main() -> None:
    """Trains and writes the tokenizer and the word list."""
    parser = argparse.ArgumentParser(description="Trains the tokenizer")
    parser.add_argument("--books", type=Path, required=True, help="folder with the training books")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--words", type=Path, default=WORDS_FILE, help="where the word list goes")
    args = parser.parse_args()
    books = list(read_books(args.books).values())
    args.out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(books).save(str(args.out / "tokenizer.json"))
    (args.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=1) + "\n")
    words = common_words(books)
    args.words.write_text("\n".join(words) + "\n")
    print(f"tokenizer of {VOCAB_SIZE} entries from {len(books)} books, {len(words)} words, {END_OF_TEXT} is id 0")


if __name__ == "__main__":
    main()

"""What the batches of each training stage are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mix:
    """What the batches of a stage are made of.

    Attributes:
        forms: weights of the forms.
        book_share: share of the groups that are plain text.
        text_weight: weight of the text's loss beside the answers'.
        key_sizes: numbers of words in a key; json_digits: smallest and largest number of digits in a key.
        digits: numbers of digits in a value; passkeys and variables have their own.
        hops: numbers of records in a chain.
    """

    forms: dict[str, float]
    book_share: float
    text_weight: float
    key_sizes: tuple[int, ...] = (1, 2, 2, 3)
    digits: tuple[int, ...] = (5, 7, 7, 8)
    short_digits: tuple[int, ...] = (5, 5, 7)
    json_digits: tuple[int, int] = (5, 8)
    hops: tuple[int, ...] = (1, 2, 2, 2, 3)


# Lookup by words appears first, and only then in reasonable time, on short forms with many questions a row.
SHORT = Mix(
    forms={"records": 0.5, "var_completion": 0.1, "needle_ruler": 0.2, "needle_sentence": 0.1, "json_completion": 0.1},
    book_share=0.05,
    text_weight=0.1,
    key_sizes=(1, 1, 2),
    digits=(3, 4, 5),
    short_digits=(3, 4, 5),
    json_digits=(3, 4),
)
# Looking up a name, where the other forms have numbers, is a second skill to be learned apart.
LINKS = replace(
    SHORT,
    forms={"var_completion": 0.6, "var": 0.15, "records": 0.1, "needle": 0.1, "json_completion": 0.05},
    short_digits=(3,),
)
FULL = Mix(
    forms={
        "needle": 0.22,
        "needle_sentence": 0.06,
        "needle_ruler": 0.12,
        "needle_boxed": 0.05,
        "passkey": 0.05,
        "passkey_completion": 0.03,
        "var": 0.14,
        "var_completion": 0.06,
        "json": 0.09,
        "json_completion": 0.06,
        "records": 0.12,
    },
    book_share=0.15,
    text_weight=0.5,
)

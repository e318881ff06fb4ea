"""Shares by length, as people write them: 0.89,32k=0.78."""

import argparse
from collections.abc import Mapping

from eval.texts.lengths import length, short_length

# Those that are not named.
OTHERS = "others"


def shares(text: str) -> dict[str, float]:
    """A share for every length, or others for some: "0.89", or "0.89,32k=0.78".

    Returns:
        Shares by `short_length`, and that of the others; see `share_at`.

    Raises:
        argparse.ArgumentTypeError: it is no such list, or a share is not between 0 and 1.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        tokens, _, share = part.rpartition("=")
        try:
            number = float(share)
        except ValueError:
            number = 0.0
        name = short_length(length(tokens)) if tokens else OTHERS
        if not 0 < number < 1 or name in found:
            raise argparse.ArgumentTypeError(
                f"{part!r} of {text!r}: allowed are shares between 0 and 1, one for all lengths or one a length, "
                "such as 0.89,32k=0.78"
            )
        found[name] = number
    return found


def share_at(shares_of: Mapping[str, float], tokens: int) -> float | None:
    """The share at a length; None where it is not named and the others have none."""
    return shares_of.get(short_length(tokens), shares_of.get(OTHERS))

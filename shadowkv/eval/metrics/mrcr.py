"""MRCR's metric, and the similarity of two answers that it is based on."""

from __future__ import annotations

from difflib import SequenceMatcher

NEXT_TURN = "\n\nUser:\n"
"""Header of the user's next turn in plain prompts. A model without a chat template does not stop before this header:
its output goes on with the user's turn."""


def similarity(answer: str, other: str) -> float:
    """Returns ``difflib.SequenceMatcher``'s ratio of two answers, in [0, 1]. Both are cut at the user's next turn."""
    return SequenceMatcher(None, own_turn(answer), own_turn(other)).ratio()


def mrcr(prediction: str, references: tuple[str, ...]) -> float:
    """Returns the similarity of the right text and the answer, after the prefix is removed from the answer
    (openai/mrcr). Returns 0 if the answer does not begin with the prefix.

    Args:
        references: the prefix, and the right text after it.
    """
    prefix, text = references
    return similarity(prediction.removeprefix(prefix), text) if prediction.startswith(prefix) else 0.0


def own_turn(answer: str) -> str:
    """Returns the answer up to the user's next turn."""
    return answer.split(NEXT_TURN)[0]

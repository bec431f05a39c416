"""How routers choose, as models say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen, and how their outputs are weighted.

    Attributes:
        experts: E, of a layer.
        per_token: k, how many of them a token is given to.
        scores: ``softmax`` over all experts, or ``sigmoid`` of each by itself.
        normalised: the weights of a token's experts are divided by their sum.
        scale: what weights are multiplied with.
        groups, groups_per_token: experts stand in so many groups of the same size, and those of a token are in so many
            of them: where the sum of the two best experts is largest (DeepSeek-V3, arXiv:2412.19437).
        corrected: a learned number is added to the score of each expert where experts are chosen, and not in weights.
    """

    experts: int
    per_token: int
    scores: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    corrected: bool = False

    def share_touched(self, tokens: int) -> float:
        """Share of the experts that so many tokens are given to, as expected where all are chosen equally often."""
        return 1 - (1 - self.per_token / self.experts) ** tokens

"""``Routing``: a model's rule for choosing experts. Models' configs define it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen, and how their outputs are weighted.

    Attributes:
        experts: E, the experts of a layer.
        per_token: k, the experts that a token goes to.
        scores: how scores are computed from logits: by ``softmax`` over all experts, or by ``sigmoid`` of each expert.
        normalised: whether the weights of a token's experts are divided by their sum.
        scale: factor of the weights.
        groups: number of groups of equal size into which the experts are divided.
        groups_per_token: number of groups from which a token's experts come. These are the groups with the largest sum
            of their two best scores (DeepSeek-V3, arXiv:2412.19437).
        corrected: whether experts are chosen by scores plus a learned correction per expert. Weights do not include the
            correction.
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
        """Returns the expected share of the experts that at least one of ``tokens`` tokens goes to, if all experts are
        equally likely."""
        return 1 - (1 - self.per_token / self.experts) ** tokens

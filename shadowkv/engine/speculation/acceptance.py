"""``accepted_at_random``: accepts drafted tokens at given rates, whatever the model says. ``SpeculativeConfig`` has the
rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shadowkv.engine.request import Request
from shadowkv.ops.sampling import mix64

STRIDE = np.uint64(0x9E3779B97F4A7C15)
"""Distance between the numbers of successive places that are hashed (SplitMix64)."""


def accepted_at_random(request: Request, draft: Sequence[int], rates: Sequence[float]) -> int:
    """Returns how many tokens of a draft are accepted: those before the first one that is not.

    A token's random number depends on the request's seed, on the token's place in the answer, and on the token. So the
    same draft at the same place has the same result. The token is included because greedy requests share one seed.

    Args:
        draft: drafted tokens that follow the newest token of the request's answer.
        rates: probability at each place of the draft that this token is accepted if all before it are. There are at
            least as many as drafted tokens.
    """
    places = np.arange(len(draft), dtype=np.uint64) + np.uint64(len(request.output_token_ids) + 1)
    seed = np.uint64(request.seed & (1 << 64) - 1)
    hashed = mix64(mix64(places * STRIDE + seed) ^ np.array(draft, np.uint64))
    is_accepted = (hashed >> np.uint64(11)) * 2.0**-53 < np.array(rates[: len(draft)])
    return int(np.logical_and.accumulate(is_accepted).sum())

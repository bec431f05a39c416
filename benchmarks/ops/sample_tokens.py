"""Sampling of tokens on a GPU: time of a call, compared with taking the largest logit.

Counted bytes are the logits, once. Calls get different copies of the logits, which together are larger than the L2
cache, because in an engine step the logits are read for the first time. ``spread`` is the standard deviation of the
logits: with 1, nearly all tokens are candidates; with 4, a few thousand are.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice, product

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, bench, microseconds
from shadowkv.ops.sample_tokens import reference, triton
from shadowkv.ops.sample_tokens.weights import PARAMETERS

CASES = list(product((1, 48, 76, 256), (128256, 49152), (1.0, 4.0)))  # rows, vocabulary, spread
SETTINGS: dict[str, dict[str, float]] = {
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "none": {},
    "temperature 0": {"temperature": 0.0},
}
CHECKED = 16
"""Number of rows that are checked for each shape and setting. It is small because the reference samples row by row."""


def parameters(rows: int, setting: dict[str, float]) -> Tensor:
    """Returns the sampling parameters. All rows have the same ones, except for their random numbers."""
    usual = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0, **setting}
    columns = [torch.full((rows,), usual[name], dtype=torch.float64) for name in PARAMETERS[:-1]]
    return torch.stack([*columns, torch.randint(2**32, (rows,)).double()], 1).cuda()


@bench(CASES)
def sample_tokens(case: tuple[int, int, float]) -> list[Row]:
    """A row for every setting, and one for taking the largest logit."""
    rows, vocabulary, spread = case
    logits = spread * torch.randn(rows, vocabulary, device="cuda")
    moved = logits.numel() * logits.element_size()
    copies = [logits.clone() for _ in range(max(1, min(16, 150 * 2**20 // moved)))]
    times = {"argmax": microseconds([lambda copy=copy: copy.argmax(-1) for copy in islice(cycle(copies), 16)])}
    for name, setting in SETTINGS.items():
        sampled = parameters(rows, setting)
        expected = reference.sample_tokens(logits[:CHECKED].cpu(), sampled[:CHECKED].cpu())
        assert torch.equal(triton.sample_tokens(logits, sampled)[:CHECKED].cpu(), expected), name
        calls = (partial(triton.sample_tokens, copy, sampled) for copy in islice(cycle(copies), 16))
        times[name] = microseconds([*calls])
    floor = moved / READ_SPEED * 1e6
    return [
        {
            "rows": rows, "vocabulary": vocabulary, "spread": spread, "sampled by": name, "us": round(time, 1),
            "beyond argmax us": round(time - times["argmax"], 1), "floor us": round(floor, 1),
            "times the floor": round(time / floor, 2),
        }
        for name, time in times.items()
    ]  # fmt: skip

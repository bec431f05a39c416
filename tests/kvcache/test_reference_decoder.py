"""The decoder of docs/reference_decoder.py, which is there to be read, equals the engine's cache."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import DEVICE, ROPE, SHAPE, Stream, decode, make_cache, prefill
from torch import Tensor

from shadowkv.kvcache.presets import preset

REFERENCE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "reference_decoder.py"))
PROMPT, STEPS, RANK, VALUES = 2400, 140, 16, "rotated-4bit"
CLOSE: dict[str, Any] = {"atol": 3e-4, "rtol": 0}
AT_AN_EDGE = 3
"""Samples of 256 that may be others: the last bits of a sum decide between two."""


def log_weights(chunks: Tensor, log_weight: Tensor | None) -> list[dict[int, float]]:
    """By kv head, what chunks [H, k] stand for."""
    weight = torch.zeros(chunks.shape) if log_weight is None else log_weight
    pairs = (zip(*x, strict=True) for x in zip(chunks.tolist(), weight.tolist(), strict=True))
    return [{chunk: stands_for for chunk, stands_for in head if chunk >= 0} for head in pairs]


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference computes on a CPU")
@pytest.mark.parametrize("name", ["shadowkv:place=device", f"turbo:values={VALUES}"])
def test_the_reference_decoder_equals_the_cache(name: str) -> None:
    cache, selections = make_cache(preset(name, rank=RANK)), []
    cache.selection_hook = lambda layer, q, batch, selection: selections.append(selection) or selection
    stream = Stream(3, cache.allocate(PROMPT, PROMPT + STEPS))
    prefill(cache, [(stream, PROMPT)])
    for _ in range(STEPS):  # two pages are sealed on the way
        decode(cache, [stream])
    assert stream.sequence is not None and stream.sequence.sealed > (PROMPT - 32) // 64 * 64 + 64
    others = 0
    for layer in range(SHAPE.num_layers):
        reference = REFERENCE["ReferenceLayer"]("turbo" in name, RANK, ROPE.theta, layer, values=VALUES)
        q, k, v = (x[layer, : PROMPT + STEPS] for x in (stream.q, stream.k, stream.v))
        engine = stream.output()[:, layer]
        torch.testing.assert_close(reference.prefill(q[:PROMPT], k[:PROMPT], v[:PROMPT]), engine[:PROMPT], **CLOSE)
        for step, at in enumerate(range(PROMPT, PROMPT + STEPS)):
            selected = selections[step * SHAPE.num_layers + layer]
            theirs = (selected.chunks[0], None if selected.log_weight is None else selected.log_weight[0])
            select = reference.select

            def checked(q: Tensor, select: Any = select, theirs: Any = theirs) -> tuple[Tensor, Tensor]:
                """What the engine selected, if the reference selects the same."""
                nonlocal others
                for mine, engines in zip(log_weights(*select(q)), log_weights(*theirs), strict=True):
                    others += len(mine.keys() - engines.keys())
                    assert len(mine.keys() ^ engines.keys()) <= 2 * AT_AN_EDGE
                    assert all(abs(mine[x] - engines[x]) < 0.01 for x in mine.keys() & engines.keys())
                return theirs[0], torch.zeros(theirs[0].shape) if theirs[1] is None else theirs[1]

            reference.select = checked
            torch.testing.assert_close(reference.decode(q[at], k[at], v[at]), engine[at], **CLOSE)
            reference.select = select
    assert others < 0.003 * 2 * STEPS * SHAPE.num_layers * 256

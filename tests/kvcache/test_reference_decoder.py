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
AT_AN_EDGE, ALIKE = 3, 0.97
"""Samples of 256 that may be others, as the last bits of a sum decide between two, in at least this share of the steps:
where they decide what is sampled from at all, the samples behind it are others, too."""


def stands_for(chunks: Tensor, log_weight: Tensor) -> list[dict[int, float]]:
    """By kv head, the logarithm of how many chunks each of [H, k] stands for."""
    heads = zip(chunks.tolist(), log_weight.tolist(), strict=True)
    return [{x: weight for x, weight in zip(*head, strict=True) if x >= 0} for head in heads]


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference computes on a CPU")
@pytest.mark.parametrize("name", ["shadowkv:place=device", f"turbo:values={VALUES}"])
def test_the_reference_decoder_equals_the_cache(name: str) -> None:
    cache, selections = make_cache(preset(name, rank=RANK)), []
    cache.selection_hook = lambda layer, q, batch, selection: selections.append(selection) or selection
    stream = Stream(3, cache.allocate(PROMPT, PROMPT + STEPS))
    prefill(cache, [(stream, PROMPT)])
    for _ in range(STEPS):  # two pages are compressed on the way
        decode(cache, [stream])
    assert stream.sequence is not None and stream.sequence.compressed > (PROMPT - 32) // 64 * 64 + 64
    alike = []
    for layer in range(SHAPE.num_layers):
        reference = REFERENCE["ReferenceLayer"]("turbo" in name, RANK, ROPE.theta, layer, values=VALUES)
        q, k, v = (x[layer, : PROMPT + STEPS] for x in (stream.q, stream.k, stream.v))
        engine = stream.output()[:, layer]
        torch.testing.assert_close(reference.prefill(q[:PROMPT], k[:PROMPT], v[:PROMPT]), engine[:PROMPT], **CLOSE)
        select = reference.select
        for step, at in enumerate(range(PROMPT, PROMPT + STEPS)):
            selection = selections[step * SHAPE.num_layers + layer]
            chunks, log_weight = selection.chunks[0], selection.log_weight
            engines = chunks, torch.zeros(chunks.shape) if log_weight is None else log_weight[0]

            def checked(q: Tensor, select: Any = select, engines: Any = engines) -> tuple[Tensor, Tensor]:
                """What the engine selected, once it is compared with what the reference selects."""
                for own, other in zip(stands_for(*select(q)), stands_for(*engines), strict=True):
                    weights = max(abs(own[x] - other[x]) for x in own.keys() & other.keys())
                    alike.append(len(own.keys() ^ other.keys()) <= 2 * AT_AN_EDGE and weights < 0.01)
                return engines

            reference.select = checked
            torch.testing.assert_close(reference.decode(q[at], k[at], v[at]), engine[at], **CLOSE)
    assert sum(alike) >= ALIKE * len(alike)

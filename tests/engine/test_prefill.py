"""A prefill goes no further than somebody asks for: with the logits of one that is scored, and the same stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shadowkv.engine.execution import forward


@pytest.fixture(params=["full", "quest", "shadowkv"])
def engines(make: Any, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Two that are alike."""
    return make(kv=request.param), make(kv=request.param)


def prefilled(engine: Any, work: list[list[int]], scored: bool) -> tuple[Any, ...]:
    """What a prefill returns, the sequences, and its pieces."""
    sequences = [engine.cache.allocate(len(tokens), len(tokens) + 8) for tokens in work]
    steps, pieces = engine.runner.prefill(list(zip(sequences, work)), scored), 0
    with torch.inference_mode():
        while True:
            try:
                next(steps)
                pieces += 1
            except StopIteration as end:
                return *end.value, sequences, pieces


@pytest.mark.parametrize("block", [64, 100, 512, 4096])
@pytest.mark.parametrize("lengths", [[1], [700], [300, 1, 64, 210], [512, 3]])
def test_what_is_not_asked_for_changes_nothing(
    engines: tuple[Any, Any], block: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newest tokens of a sequence may be of two blocks, and many sequences of one."""
    monkeypatch.setitem(forward.BLOCK_TOKENS, "cpu", block)
    draw = torch.Generator().manual_seed(sum(lengths))
    work = [torch.randint(0, 97, (length,), generator=draw).tolist() for length in lengths]
    found = [prefilled(engine, work, scored) for engine, scored in zip(engines, (True, False))]
    (logits, states, scored, many), (some, none, plain, few) = found
    torch.testing.assert_close(some, logits, atol=1e-4, rtol=1e-4)
    assert [len(one) for one in states] == lengths and none == []
    layers = len(engines[0].runner.layers)
    assert few == many == engines[0].runner.prefill_pieces(sum(lengths)) == layers * -(-sum(lengths) // block)
    for _ in range(3):
        tokens = [7] * len(work)
        after = [engine.runner.decode(one, tokens) for engine, one in zip(engines, (scored, plain))]
        torch.testing.assert_close(after[1], after[0], atol=1e-4, rtol=1e-4)

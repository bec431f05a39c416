"""Steps with several rows of a sequence: ops that read its pages once for all of them give what they give for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driver import SHAPE, Stream, make_cache, prefill
from folding_ops import fold
from torch import Tensor

from shadowkv.kvcache.decode import planning
from shadowkv.kvcache.decode.decode_batch import DecodePlan
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.presets import preset

DRAFTING = preset("full-speculative")
SPECS = {
    "full": preset("full"),
    "full-speculative": DRAFTING,
    "fp8": preset("fp8"),
}
LENGTHS = [300, 70, 610, 447]


def streams_of(cache: KVCache, lengths: list[int]) -> list[Stream]:
    streams = [Stream(n, cache.allocate(n, 3000)) for n in lengths]
    prefill(cache, list(zip(streams, lengths, strict=True)))
    return streams


def attended(cache: KVCache, plan: DecodePlan, streams: list[Stream], counts: list[int]) -> Tensor:
    """What the rows of a planned step attend to, [B, layers, H_q, d]. A plan can have more rows, for padding."""
    batch, outs = cache.decode_batch(plan), []
    for layer in range(SHAPE.num_layers):
        q, k, v = (
            torch.cat([getattr(s, name)[layer, s.length : s.length + n] for s, n in zip(streams, counts, strict=True)])
            for name in ("q", "k", "v")
        )
        more = plan.num_rows - len(q)
        q, k, v = (torch.cat((x, x.new_zeros(more, *x.shape[1:]))) for x in (q, k, v))
        cache.append(layer, k, v, batch)
        outs.append(cache.start(layer, q, batch)()[: sum(counts)])
    return torch.stack(outs, 1)


def plain(plan: DecodePlan) -> DecodePlan:
    """The same step, in which each row reads its pages."""
    return replace(
        plan, groups=tuple(replace(own, starts=None, segment_starts=None, most_rows=1) for own in plan.groups)
    )


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sequences of more than two pages long ones."""
    monkeypatch.setattr(planning, "MIN_EXACT_PAGES", 2)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [5, 1, 4, 2], [2, 1, 1, 1], [8, 8, 7, 8]], ids=str)
@pytest.mark.parametrize("turns", [1, 3])
def test_rows_of_a_sequence_attend_as_rows_for_themselves(
    monkeypatch: pytest.MonkeyPatch, name: str, counts: list[int], turns: int, seed: int
) -> None:
    """With rounded shapes too, and with several segments after several turns."""
    cache = make_cache(SPECS[name], slots=40)
    streams = streams_of(cache, LENGTHS)
    for turn in range(1, turns):
        prefill(cache, [(streams[0], 500 + turn), (streams[2], 300)])
    sequences = [stream.sequence for stream in streams]
    plan = cache.plan_decode(sequences, counts)
    assert any(own.of_sequence is not None for own in plan.groups) == (turns > 1 and SPECS[name].compresses)
    wanted = attended(cache, plain(plan), streams, counts)
    calls = fold(cache.ops, monkeypatch)
    for one in (plan, cache.rounded(plan, 64)):
        calls.clear()
        torch.testing.assert_close(attended(cache, one, streams, counts), wanted, atol=1e-5, rtol=1e-5)
        assert max(most for _, most in calls) == max(counts)
        assert {op for op, _ in calls} == {"paged_attention", *["attend_coded"] * SPECS[name].compresses}


def test_few_shapes_serve_drafts_that_end_early() -> None:
    """A draft can be shorter than others without another graph."""
    cache = make_cache(SPECS["full"], slots=16, blocks=2000)
    sequences = [stream.sequence for stream in streams_of(cache, [200 + n for n in range(15)])]
    shapes = set[tuple[int, ...]]()
    for short in range(5):
        counts = [4] * (15 - short) + [2] * short
        shapes.add(cache.rounded(cache.plan_decode(sequences, counts), 64).shape)
    assert len(shapes) <= 4


def test_drafts_of_one_sequence_have_few_shapes() -> None:
    """One for each power of 2 of rows, up to the largest step."""
    cache = make_cache(SPECS["full"])
    (stream,) = streams_of(cache, [400])
    shapes = [cache.rounded(cache.plan_decode([stream.sequence], [rows]), 25).shape for rows in range(2, 26)]
    assert [shape[0] for shape in shapes] == [2, *2 * [4], *4 * [8], *8 * [16], *9 * [25]]
    assert len(set(shapes)) == 5


def test_one_long_draft_among_many_and_short_sequences_are_read_by_each_row() -> None:
    cache = make_cache(SPECS["full"])
    sequences = [stream.sequence for stream in streams_of(cache, LENGTHS)]
    (own,) = cache.plan_decode(sequences, [20, 1, 1, 1]).groups
    assert own.starts is None and own.most_rows == 1
    (own,) = cache.plan_decode(sequences[:1], [20]).groups
    assert own.starts is not None and own.starts.tolist() == [0, 20] and own.most_rows == 32
    (own,) = cache.plan_decode(sequences[1:2], [20]).groups  # 70 tokens
    assert own.starts is None and own.most_rows == 1

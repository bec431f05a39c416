"""What answers are told to have attended to: held against the selection hook, and nothing for who does not ask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import drain, prompt, tokens

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import TokenOutput, TokenSelections
from shadowkv.engine.selections import MAX_CELLS
from shadowkv.kvcache.inspection import compressed_rows, exact_keys

PLAIN = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
ASKING = replace(PLAIN, return_selections=True)
HEADS = 2


@pytest.fixture
def build(tiny: Path, tmp_path: Path) -> Any:
    """Engines of a tiny model whose heads every policy takes."""
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 16}))

    def engine(kv: str, **options: Any) -> Engine:
        settings = {"kv_dense_below": 0, "max_num_seqs": 4, "max_cached_seqs": 2, **options}
        return Engine(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", kv=kv, **settings))

    return engine


def told(outputs: list[TokenOutput]) -> list[TokenSelections | None]:
    return [one for output in outputs for one in output.selections or []]


@pytest.mark.parametrize("kv", ["turbo:budget=128", "shadowkv", "quest"])
def test_they_are_what_the_index_selects(build: Any, kv: str) -> None:
    engine = build(kv, fetch_buffer=2.0)
    steps: list[list[dict[int, float]]] = []

    def watch(layer: int, q: Any, batch: Any, selected: Any) -> Any:
        if layer == 0:
            steps.append([])
        steps[-1].append(_weights(engine, layer, q, batch, selected))
        return selected

    engine.cache.selection_hook = watch
    engine.add_request("short", prompt(1, 20), PLAIN)  # dense: rows of the batch are not those of compressed pages
    engine.add_request("asks", prompt(2, 900), ASKING)
    engine.add_request("plain", prompt(3, 700), PLAIN)
    outputs = drain(engine)
    assert engine.cache.selection_hook == watch
    assert all(output.selections is None for name in ("short", "plain") for output in outputs[name])
    selections = told(outputs["asks"])
    assert len(selections) == 8 and selections[0] is None
    for number, one in enumerate(selections[1:]):
        assert one is not None and not one.everything
        assert one.length == 901 + number
        assert one.exact[0][0] == 0 and one.exact[1][1] == one.length
        assert [group.layers for group in one.groups] == [(0, 1), (1, 2)]
        for layer, group in enumerate(one.groups):
            assert group.layer == layer and len(group.cells) <= MAX_CELLS
            told_of = dict(zip(group.cells, group.weights))
            assert sum(told_of.values()) == pytest.approx(1, abs=1e-3)
            assert any(told_of == pytest.approx(layers[layer], abs=2e-5) for layers in steps)


def _weights(engine: Engine, layer: int, q: torch.Tensor, batch: Any, selected: Any) -> dict[int, float]:
    """Shares of the attention to what is selected, by cells of 16 tokens, of the row that selected farthest: from keys
    of all its pages."""
    chunk, chunks = engine.cache.spec.chunk, selected.chunks
    row = int(chunks.flatten(1).amax(1).argmax())
    names = "slots", "states", "first", "pages", "value_pages", "num_pages", "num_chunks", "budget"
    one = replace(batch, sampling=None, **{name: getattr(batch, name)[row : row + 1] for name in names})
    keys, _ = compressed_rows(engine.cache, layer, one)
    found: dict[int, float] = {}
    queries = q[row].unflatten(0, (HEADS, -1)) * q.shape[-1] ** -0.5
    for head in range(HEADS):
        there = [int(number) for number in chunks[row, head] if number >= 0]
        places = [number * chunk + offset for number in there for offset in range(chunk)]
        sampled = (
            torch.zeros(len(there)) if selected.log_weight is None else selected.log_weight[row, head, : len(there)]
        )
        scores = queries[head] @ keys[head, places].T + sampled.repeat_interleave(chunk)
        for place, weight in zip(places, scores.softmax(-1).mean(0).tolist()):
            found[place // 16] = found.get(place // 16, 0.0) + weight / HEADS
    return found


def test_answers_are_the_same_and_dense_ones_say_so(build: Any) -> None:
    engine = build("turbo:budget=128")
    answers = []
    for name, params in (("plain", PLAIN), ("asks", ASKING)):
        engine.add_request(name, prompt(2, 900), replace(params, cache_prompt=False))
        answers.append(tokens(drain(engine)[name]))
    assert answers[0] == answers[1]
    engine.add_request("short", prompt(1, 20), ASKING)
    first, *others = told(drain(engine)["short"])
    assert first is None
    assert [(one.length, one.everything, one.exact) for one in others if one is not None] == [
        (21 + number, True, [(0, 16), (16, 21 + number)]) for number in range(7)
    ]
    assert all(group.cells == [] for one in others if one is not None for group in one.groups)


def test_later_segments_have_their_own_positions(build: Any) -> None:
    engine = build("quest:budget=256", max_model_len=2048)
    first = prompt(4, 300)
    engine.add_request("first", first, PLAIN)
    answer = tokens(drain(engine)["first"])
    engine.add_request("second", first + answer + prompt(5, 1200), ASKING)
    outputs = drain(engine)["second"]
    assert outputs[-1].cached_tokens > 0
    last = told(outputs)[-1]
    assert last is not None
    assert all(sum(group.weights) == pytest.approx(1, abs=1e-3) for group in last.groups)
    cells = {cell for group in last.groups for cell in group.cells}
    assert min(cells) * last.cell < 300 < 1200 < max(cells) * last.cell < last.length


@pytest.mark.parametrize(
    ("kv", "options"),
    [
        ("full", {}),
        ("turbo", {"kv_dense_below": 2048}),
        ("fp8", {}),
        ("turboquant-4", {}),
        ("full:index=none,values=rotated", {}),
    ],
)
def test_where_everything_is_attended_to_all_of_it_is_weighted(build: Any, kv: str, options: dict[str, Any]) -> None:
    """By the scores of a reference: all keys of the sequence, from the cache's own pages."""
    engine = build(kv, **options)
    queries: list[tuple[int, torch.Tensor, Any]] = []
    engine.cache.query_hook = lambda layer, q, batch: queries.append((layer, q.clone(), batch))
    engine.add_request("short", prompt(1, 20), PLAIN)
    engine.add_request("asks", prompt(2, 400), ASKING)
    outputs = drain(engine)
    assert all(output.selections is None for output in outputs["short"])
    selections = told(outputs["asks"])
    assert selections[0] is None
    for number, one in enumerate(selections[1:]):
        assert one is not None and one.everything
        assert one.length == 401 + number
        (start, first), (end, length) = one.exact
        assert (start, first, length) == (0, 16, one.length)
        assert 320 <= end <= one.length - (0 if "dense" in kv else 1)
        for layer, group in enumerate(one.groups):
            assert (group.layers, group.layer) == ((layer, layer + 1), layer)
            assert sum(group.weights) == pytest.approx(1, abs=1e-3)
            assert all(first <= cell * one.cell < end for cell in group.cells)
    seen = [(q, batch) for layer, q, batch in queries if layer == 0 and len(q) == 2 and int(batch.positions[1]) == 404]
    (q, batch), last = seen[0], selections[5]
    assert last is not None and last.length == 405
    (_, first), (end, _) = last.exact
    if batch.compressed is None:
        keys = exact_keys(engine.cache, 0, batch.pages[1])[:, :405]
    else:
        rows = [row for row, first in enumerate(batch.compressed.num_pages.tolist()) if first]
        one_row = replace(batch.compressed, sampling=None, span=None).part(slice(rows[-1], rows[-1] + 1))
        keys = compressed_rows(engine.cache, 0, one_row)[0]
    weights = ((q[1].unflatten(0, (HEADS, -1)) @ keys[:, first:end].mT) * 16**-0.5).softmax(-1).mean((0, 1))
    expected = {cell: float(weights[cell * 16 - first :][:16].sum()) for cell in range(first // 16, -(-end // 16))}
    group = last.groups[0]
    assert dict(zip(group.cells, group.weights)) == pytest.approx(expected, abs=2e-5)


def test_who_does_not_ask_is_not_looked_at(build: Any) -> None:
    engine = build("full")
    engine.add_request("x", prompt(2, 400), PLAIN)
    while engine.has_work:
        engine.step()
        assert engine.cache.query_hook is None and engine.cache.selection_hook is None

"""A decode step's layers in one call against the ops that they are composed of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import by_threads
from precision import InFloat64, assert_close_like_lowp, draws_in_blocks
from test_quantized_blocks import random_blocks, rows_of
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.decode_layers.cpu import decode_layers, missing
from shadowkv.ops.decode_layers.layers import Layer, Layers, NewTokens, Projection
from shadowkv.ops.decode_layers.reference import decode_layers as reference
from shadowkv.ops.page import PAGE
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.reference import dequantize_rows

pytestmark = pytest.mark.skipif(bool(missing()), reason="the C++ extension is not built")

HIDDEN, INTERMEDIATE, QUERY_HEADS, HEADS, DIM, NUM_PAGES = 256, 512, 6, 2, 64, 24
FLOATS = ((1.0, None),)
MIXED = ((0.5, "Q4_K"), (0.25, None), (0.25, "Q6_K"))
FORMS = {"floats": FLOATS, **{form: ((1.0, form),) for form in ("Q4_0", "Q4_1", "Q8_0")}, "mixed": MIXED}


def projection(rows: int, columns: int, parts: Sequence[tuple[float, str | None]], bias: bool = False) -> Projection:
    """Weights whose products are about as large as their inputs."""
    row_blocks = []
    for share, form in parts:
        count = round(share * rows)
        plain = torch.randn(count, columns) / columns**0.5
        row_blocks.append(plain if form is None else rows_of(random_blocks(form, count, columns), form))
    return Projection(tuple(row_blocks), torch.randn(rows) if bias else None)


def make_layers(
    count: int,
    forms: str,
    norms: bool = False,
    bias: bool = False,
    *,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    dim: int = DIM,
    **rope: Any,
) -> Layers:
    """Layers with random weights, and pages full of random tokens. Matrices whose columns are not whole blocks are
    plain."""
    parts, made, query = FORMS[forms], [], QUERY_HEADS * dim

    def norm(size: int, there: bool) -> Tensor | None:
        return 1 + 0.3 * torch.randn(size) if there else None

    def weights(rows: int, columns: int, bias: bool = False) -> Projection:
        whole = all(form is None or columns % BLOCKS[form].values == 0 for _, form in parts)
        return projection(rows, columns, parts if whole else FLOATS, bias)

    for _ in range(count):
        arena = torch.randn(2, NUM_PAGES, HEADS, PAGE, dim)
        layer = Layer(
            attention_norm=1 + 0.3 * torch.randn(hidden),
            qkv=weights(query + 2 * HEADS * dim, hidden, bias),
            query_norm=norm(dim, norms),
            key_norm=norm(dim, norms),
            out=weights(hidden, query, bias),
            post_attention_norm=norm(hidden, norms),
            mlp_norm=1 + 0.3 * torch.randn(hidden),
            gate_up=weights(2 * intermediate, hidden),
            down=weights(hidden, intermediate),
            post_mlp_norm=norm(hidden, norms),
            k_pages=arena[0],
            v_pages=arena[1],
        )
        made.append(layer)
    return Layers(made, 1e-5, RotaryTables(RopeConfig(dim, **rope), 1000))


def part(layers: Layers, some: slice) -> Layers:
    return Layers(layers.layers[some], layers.eps, layers.rotary)


def copied(layers: Layers) -> Layers:
    """The layers with copies of the pages."""
    own = [replace(x, k_pages=x.k_pages.clone(), v_pages=x.v_pages.clone()) for x in layers]
    return Layers(own, layers.eps, layers.rotary)


def new_tokens(lengths: Sequence[int]) -> NewTokens:
    """The newest tokens of sequences with these lengths, in shuffled pages."""
    page_ids = torch.randperm(NUM_PAGES)
    width = max(-(-length // PAGE) for length in lengths)
    pages, counts = (
        torch.zeros(len(lengths), width, dtype=torch.int64),
        torch.zeros(len(lengths), width, dtype=torch.int64),
    )
    for row, length in enumerate(lengths):
        used = -(-length // PAGE)
        pages[row, :used], page_ids = page_ids[:used], page_ids[used:]
        counts[row] = (length - PAGE * torch.arange(width)).clamp(0, PAGE)
    newest = torch.tensor(lengths) - 1
    return NewTokens(newest, pages, counts, pages.gather(1, newest[:, None] // PAGE).squeeze(1), newest % PAGE)


def in_numbers(layers: Layers, dtype: torch.dtype) -> Layers:
    """The layers with all matrices as plain numbers in ``dtype``."""

    def plain(value: Any) -> Any:
        if isinstance(value, Projection):
            return Projection(tuple(map(plain, value.row_blocks)), plain(value.bias))
        numbers = dequantize_rows(value) if isinstance(value, QuantizedRows) else value
        return numbers.to(dtype) if isinstance(numbers, Tensor) else numbers

    own = [replace(x, **{name: plain(value) for name, value in vars(x).items()}) for x in layers]
    return Layers(own, layers.eps, layers.rotary)


def results(way: Callable[..., tuple[Tensor, ...]], x: Tensor, layers: Layers, tokens: NewTokens) -> list[Tensor]:
    """The results of ``way``, and the pages that it wrote to."""
    found = way(x, None, layers, tokens, False)
    return [*found, *(pages for layer in layers for pages in (layer.k_pages, layer.v_pages))]


def assert_as_reference(layers: Layers, tokens: NewTokens, threads: int = 1) -> None:
    """Compares results and pages with the reference's, for all layers in one call and for calls that end at
    attentions."""
    x, before = torch.randn(len(tokens.positions), len(layers.layers[0].attention_norm)), torch.get_num_threads()
    single, double = (in_numbers(layers, dtype) for dtype in (torch.float32, torch.float64))
    with InFloat64():
        exact = results(reference, x.double(), double, tokens)
    lowp = draws_in_blocks(lambda: results(reference, x, copied(single), tokens))
    try:
        torch.set_num_threads(threads)
        found = results(decode_layers, x, layers, tokens)
        for ours, *theirs in zip(found, exact, *lowp, strict=True):
            assert_close_like_lowp(ours, *theirs)
        stream, q, attended, lse = decode_layers(
            x, None, Layers(layers.layers[:1], layers.eps, layers.rotary), tokens, True
        )
        for number in range(1, len(layers.layers)):
            pair = Layers(layers.layers[number - 1 : number + 1], layers.eps, layers.rotary)
            stream, q, attended, lse = decode_layers(stream, attended, pair, tokens, True)
        final = Layers(layers.layers[-1:], layers.eps, layers.rotary)
        assert torch.equal(q, found[1]) and torch.equal(attended, found[2]) and torch.equal(lse, found[3])
        assert torch.equal(decode_layers(stream, attended, final, tokens, False)[0], found[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("lengths", [(70,), (1, 64, 65, 200), tuple(range(3, 23))])
def test_layers_of_any_weights_and_batch(seed: int, forms: str, lengths: tuple[int, ...]) -> None:
    assert_as_reference(make_layers(3, forms), new_tokens(lengths), threads=2)


@pytest.mark.parametrize("lengths", [(70,), tuple(range(3, 23))])
@pytest.mark.parametrize(
    ("forms", "sizes"), [("floats", (36, 56, 12)), ("Q4_1", (256, 330, 20)), ("mixed", (256, 330, 20))]
)
def test_columns_of_plain_numbers_that_are_no_whole_runs_of_integers(
    seed: int, forms: str, sizes: tuple[int, int, int], lengths: tuple[int, ...]
) -> None:
    hidden, intermediate, dim = sizes
    layers = make_layers(2, forms, hidden=hidden, intermediate=intermediate, dim=dim)
    assert_as_reference(layers, new_tokens(lengths), threads=2)


@pytest.mark.parametrize(
    "rope", [{}, {"rotary_dim": 32}, {"interleaved": True}, {"interleaved": True, "rotary_dim": 32}]
)
def test_norms_biases_and_kinds_of_rope(seed: int, rope: dict[str, Any]) -> None:
    assert_as_reference(make_layers(2, "floats", norms=True, bias=True, **rope), new_tokens((5, 130)), threads=3)


def test_more_threads_change_no_bit(seed: int) -> None:
    layers, tokens, x = make_layers(2, "Q4_1"), new_tokens((700, 3, 129)), torch.randn(3, HIDDEN)
    results = by_threads(lambda: decode_layers(x, None, layers, tokens, False))
    for found in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, results[0], strict=True))


def test_what_is_not_finite_stays_in_its_sequence(seed: int) -> None:
    layers, tokens = make_layers(2, "Q8_0"), new_tokens((5, 6, 7))
    x = torch.randn(3, HIDDEN)
    x[1, 3] = torch.nan
    finite = decode_layers(x, None, layers, tokens, False)[0].isfinite()
    assert finite[0].all() and finite[2].all() and not finite[1].any()


def test_arguments_that_do_not_fit_are_named(seed: int) -> None:
    layers, tokens, x = make_layers(2, "floats"), new_tokens((5,)), torch.randn(1, HIDDEN)
    with pytest.raises(RuntimeError, match="attention_norm has shape"):
        decode_layers(torch.randn(1, 128), None, layers, tokens, False)
    with pytest.raises(RuntimeError, match="x is Double, not Float"):
        decode_layers(x.double(), None, layers, tokens, False)
    with pytest.raises(IndexError, match=r"offset 64 is not in \[0, 64\)"):
        decode_layers(x, None, layers, replace(tokens, write_offset=torch.tensor([64])), False)
    with pytest.raises(IndexError, match=r"position 1000 is not in \[0, 1000\)"):
        decode_layers(x, None, layers, replace(tokens, positions=torch.tensor([1000])), False)
    with pytest.raises(RuntimeError, match="one layer cannot begin behind its attention and end with it"):
        decode_layers(x, torch.randn(1, QUERY_HEADS, DIM), part(layers, slice(1)), tokens, True)

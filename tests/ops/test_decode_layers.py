"""A decode step's layers in one call against the ops that they are composed of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from devices import by_threads
from precision import InFloat64, assert_close_like_lowp, draws_in_blocks
from test_quantized_blocks import random_blocks, rows_of
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.decode_layers.cpu import decode_layers, missing
from shadowkv.ops.decode_layers.layers import Attention, DeltaNet, Layer, Layers, NewTokens, Projection
from shadowkv.ops.decode_layers.reference import decode_layers as reference
from shadowkv.ops.page import PAGE
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.reference import dequantize_rows
from shadowkv.ops.recurrence import Spans

pytestmark = pytest.mark.skipif(bool(missing()), reason="the C++ extension is not built")

HIDDEN, INTERMEDIATE, QUERY_HEADS, HEADS, DIM, NUM_PAGES = 256, 512, 6, 2, 64, 24
NUM_STATES = 48
DTYPES = torch.float32, torch.float64
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


def make_delta_net(heads: int, key_heads: int, key_dim: int, value_dim: int, width: int = 4) -> DeltaNet:
    """Linear attention with random weights, whose states forget over about ten tokens."""
    channels = 2 * key_heads * key_dim + heads * value_dim
    return DeltaNet(
        convolution=torch.randn(channels, width) / width**0.5,
        log_rate=torch.randn(heads) - 2,
        rate_bias=torch.randn(heads),
        norm=1 + 0.3 * torch.randn(value_dim),
        inputs=torch.randn(NUM_STATES, channels, width - 1),
        matrices=torch.randn(NUM_STATES, heads, key_dim, value_dim) / key_dim**0.5,
    )


def make_layers(
    count: int,
    forms: str,
    norms: bool = False,
    bias: bool = False,
    *,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    dim: int = DIM,
    kinds: str = "",
    delta_net: tuple[int, ...] = (4, 4, 32, 64),
    gated: bool = False,
    tiled: bool = False,
    **rope: Any,
) -> Layers:
    """Layers with random weights, and pages full of random tokens. Matrices whose columns are not whole blocks are
    plain.

    Args:
        kinds: a letter for each layer: ``a`` for attention, ``l`` for linear attention. All have attention by default.
        delta_net: arguments of ``make_delta_net``.
    """
    parts, made, query = FORMS[forms], [], QUERY_HEADS * dim

    def norm(size: int, there: bool) -> Tensor | None:
        return 1 + 0.3 * torch.randn(size) if there else None

    def weights(rows: int, columns: int, bias: bool = False) -> Projection:
        whole = all(form is None or columns % BLOCKS[form].values == 0 for _, form in parts)
        return projection(rows, columns, parts if whole else FLOATS, bias)

    for kind in kinds or "a" * count:
        mixer: Attention | DeltaNet = make_delta_net(*delta_net)
        if isinstance(mixer, DeltaNet) and kind == "l":
            heads, value_dim = len(mixer.log_rate), len(mixer.norm)
            mixed, gates = heads * value_dim, projection(2 * heads, hidden, FLOATS)
            inputs = weights(len(mixer.convolution) + mixed, hidden)
            inputs = Projection(inputs.row_blocks + gates.row_blocks)
        else:
            arena = torch.randn(2, NUM_PAGES, HEADS, PAGE, dim)
            mixer, mixed = Attention(norm(dim, norms), norm(dim, norms), arena[0], arena[1]), query
            inputs = weights((1 + gated) * query + 2 * HEADS * dim, hidden, bias)
        layer = Layer(
            attention_norm=1 + 0.3 * torch.randn(hidden),
            mixer=mixer,
            inputs=inputs,
            out=weights(hidden, mixed, bias),
            post_attention_norm=norm(hidden, norms),
            mlp_norm=1 + 0.3 * torch.randn(hidden),
            gate_up=weights(2 * intermediate, hidden),
            down=weights(hidden, intermediate),
            post_mlp_norm=norm(hidden, norms),
        )
        made.append(layer)
    return Layers(made, 1e-5, RotaryTables(RopeConfig(dim, **rope), 1000), gated, tiled)


def changed(layers: Layers, change: Callable[[Tensor], Tensor]) -> Layers:
    """The layers with all tensors changed. Quantized rows are changed as plain numbers."""

    def of(value: Any) -> Any:
        if isinstance(value, QuantizedRows):
            return change(dequantize_rows(value))
        if isinstance(value, tuple):
            return tuple(map(of, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: of(getattr(value, field.name)) for field in fields(value)})
        return change(value) if isinstance(value, Tensor) else value

    return Layers([of(x) for x in layers], layers.eps, layers.rotary, layers.gated, layers.tiled)


def memory(layers: Layers) -> list[Tensor]:
    """The pages and the states of the layers, which a step changes."""
    return [*layers.k_pages, *layers.v_pages, *layers.convolution_states, *layers.matrix_states]


def restored(layers: Layers, before: Sequence[Tensor]) -> Layers:
    """The layers, whose memory is again what it was before a step."""
    for one, old in zip(memory(layers), before, strict=True):
        one.copy_(old)
    return layers


def new_tokens(lengths: Sequence[int], states: Spans | None = None) -> NewTokens:
    """The newest tokens of sequences with these lengths, in shuffled pages. By default each sequence reads a row of
    states, and writes another."""
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
    places = pages.gather(1, newest[:, None] // PAGE).squeeze(1), newest % PAGE
    if states is None:
        rows = torch.randperm(NUM_STATES)
        states = Spans(None, rows[: len(lengths)], rows[len(lengths) : 2 * len(lengths)])
    return NewTokens(newest, pages, counts, *places, states)


def results(way: Callable[..., tuple[Tensor, ...]], x: Tensor, layers: Layers, tokens: NewTokens) -> list[Tensor]:
    """The results of ``way``, and the pages and states that it wrote to."""
    return [*way(x, None, layers, tokens, False), *memory(layers)]


def assert_as_reference(layers: Layers, tokens: NewTokens, threads: int = 1) -> None:
    """Compares results and pages with the reference's, for all layers in one call and for calls that end at
    attentions."""
    x, before = torch.randn(len(tokens.positions), len(layers.layers[0].attention_norm)), torch.get_num_threads()
    single, double = (changed(layers, lambda y, dtype=dtype: y.to(dtype, copy=True)) for dtype in DTYPES)
    with InFloat64():
        exact = results(reference, x.double(), double, tokens)
    lowp = draws_in_blocks(lambda: results(reference, x, changed(single, Tensor.clone), tokens))
    old = [one.clone() for one in memory(layers)]
    try:
        torch.set_num_threads(threads)
        found = results(decode_layers, x, layers, tokens)
        for ours, *theirs in zip(found, exact, *lowp, strict=True):
            assert_close_like_lowp(ours, *theirs)
        whole = [one.clone() for one in found]
        restored(layers, old)
        attending = [number for number, attends in enumerate(layers.attentions) if attends]
        stream, *of_attention = decode_layers(x, None, layers.part(slice(attending[0] + 1)), tokens, True)
        for first, last in pairwise(attending):
            attention_result, between = (of_attention[1], of_attention[3]), layers.part(slice(first, last + 1))
            stream, *of_attention = decode_layers(stream, attention_result, between, tokens, True)
        attention_result, final = (of_attention[1], of_attention[3]), layers.part(slice(attending[-1], None))
        split = [decode_layers(stream, attention_result, final, tokens, False)[0], *of_attention, *memory(layers)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(split, whole, strict=True))
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


@pytest.mark.parametrize("forms", ["floats", "mixed"])
@pytest.mark.parametrize("lengths", [(1,), (1, 64, 65, 200), tuple(range(3, 23))])
def test_linear_attention_and_gates(seed: int, forms: str, lengths: tuple[int, ...]) -> None:
    layers = make_layers(5, forms, norms=True, kinds="llala", gated=True, rotary_dim=16)
    assert_as_reference(layers, new_tokens(lengths), threads=2)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("delta_net", [(6, 2, 32, 64), (6, 3, 20, 12, 3)])
def test_value_heads_that_share_key_heads(seed: int, delta_net: tuple[int, ...], tiled: bool) -> None:
    layers = make_layers(3, "floats", kinds="lal", delta_net=delta_net, tiled=tiled)
    assert_as_reference(layers, new_tokens((5, 130, 64)), threads=3)


def test_tokens_of_a_sequence_in_one_step(seed: int) -> None:
    """Each drafted token reads the states that the token before it writes."""
    read, write = torch.tensor([3, 7, 5, 9, 1]), torch.tensor([4, 5, 9, 2, 8])
    tokens = new_tokens((40, 7, 8, 9, 130), Spans(None, read, write, chained=True))
    assert_as_reference(make_layers(3, "Q8_0", kinds="lal", gated=True), tokens, threads=2)


def test_what_is_only_written_may_hold_anything(seed: int) -> None:
    """Rows that get states, and the new tokens' places in pages. All other memory keeps its bits."""
    layers, tokens, x = make_layers(3, "floats", kinds="lal", gated=True), new_tokens((1, 65)), torch.randn(2, HIDDEN)
    assert tokens.states is not None
    dirty = changed(layers, Tensor.clone)
    for states in (*dirty.convolution_states, *dirty.matrix_states):
        states[tokens.states.write] = torch.nan
    for pages in (*dirty.k_pages, *dirty.v_pages):
        pages[tokens.write_page, :, tokens.write_offset] = torch.nan
    before = [one.clone() for one in memory(layers)]
    results = [[*decode_layers(x, None, one, tokens, False), *memory(one)] for one in (layers, dirty)]
    assert all(torch.equal(clean, found) and found.isfinite().all() for clean, found in zip(*results, strict=True))
    for old, new in zip(before, memory(dirty), strict=True):
        assert len((old != new).nonzero()[:, 0].unique()) == 2  # the pages or rows that have changed


def narrow(layers: Layers) -> Layers:
    """The layers with a copy of the delta rule's states in bfloat16."""
    mixers = [
        replace(x.mixer, matrices=x.mixer.matrices.bfloat16()) if isinstance(x.mixer, DeltaNet) else x.mixer
        for x in layers
    ]
    made = [replace(x, mixer=mixer) for x, mixer in zip(layers, mixers, strict=True)]
    return Layers(made, layers.eps, layers.rotary, layers.gated, layers.tiled)


def test_states_in_bfloat16(seed: int) -> None:
    def rounded(layers: Layers) -> Layers:
        return changed(layers, lambda x: x.bfloat16().to(x.dtype) if x.dim() == 4 else x.clone())

    layers, tokens, x = rounded(make_layers(2, "floats", kinds="la")), new_tokens((5, 70)), torch.randn(2, HIDDEN)
    wide, half = changed(layers, Tensor.clone), narrow(layers)
    expected, found = decode_layers(x, None, wide, tokens, False), decode_layers(x, None, half, tokens, False)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(half.matrix_states[0], wide.matrix_states[0].bfloat16())


def test_tokens_of_a_sequence_with_states_in_bfloat16(seed: int) -> None:
    """The state after each drafted token is rounded, and the next token reads it rounded."""
    spans = Spans(None, torch.tensor([3, 7, 5, 9, 1]), torch.tensor([4, 5, 9, 2, 8]), chained=True)
    tokens, x = new_tokens((40, 7, 8, 9, 130), spans), torch.randn(5, HIDDEN)
    layers = narrow(make_layers(3, "floats", kinds="lal", gated=True))
    expected, found = (results(way, x, changed(layers, Tensor.clone), tokens) for way in (reference, decode_layers))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)
    # Another order of sums is rounded to another number now and then. A state that was rounded once more or less often
    # would differ in most numbers.
    states = zip(found[-2:], expected[-2:], strict=True)
    assert all((ours == theirs)[spans.write].float().mean() > 0.97 for ours, theirs in states)


@pytest.mark.parametrize("kinds", ["aa", "la"])
def test_more_threads_change_no_bit(seed: int, kinds: str) -> None:
    layers, tokens = make_layers(2, "Q4_1", kinds=kinds), new_tokens((700, 3, 129))
    x = torch.randn(3, HIDDEN)
    results = by_threads(lambda: decode_layers(x, None, layers, tokens, False))
    for found in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, results[0], strict=True))


@pytest.mark.parametrize("kinds", ["aa", "la"])
def test_what_is_not_finite_stays_in_its_sequence(seed: int, kinds: str) -> None:
    layers, tokens = make_layers(2, "Q8_0", kinds=kinds, gated=True), new_tokens((5, 6, 7))
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
    with pytest.raises(RuntimeError, match="one layer cannot begin after its attention and end with it"):
        decode_layers(
            x, (torch.randn(1, QUERY_HEADS, DIM), torch.empty(1, 0, DIM)), layers.part(slice(1)), tokens, True
        )
    hybrid = make_layers(2, "floats", kinds="la")
    with pytest.raises(IndexError, match=r"row 48 is not in \[0, 48\)"):
        decode_layers(x, None, hybrid, new_tokens((5,), Spans(None, torch.tensor([0]), torch.tensor([48]))), False)
    with pytest.raises(RuntimeError, match="layers with linear attention have no rows of states"):
        decode_layers(x, None, hybrid, replace(tokens, states=None), False)
    with pytest.raises(RuntimeError, match="the first layer has no attention to begin after"):
        decode_layers(x, (torch.randn(1, QUERY_HEADS, DIM), torch.empty(1, 0, DIM)), hybrid, tokens, False)
    with pytest.raises(RuntimeError, match="the last layer has no attention to end with"):
        decode_layers(x, None, make_layers(2, "floats", kinds="al"), tokens, True)

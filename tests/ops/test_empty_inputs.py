"""Behaviour on empty inputs: no rows, pages or selection; on the CPU, in Triton's interpreter and on a GPU."""

import math
from collections.abc import Callable

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU, TRITON_RUNS
from torch import Tensor

from shadowkv.kvcache.codecs import LATENT_CODECS, ROTATED_ROWS
from shadowkv.ops.activation_rows.reference import FP8
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected.sources import DenseRows, LatentKeys
from shadowkv.ops.choose_experts.routing import Routing
from shadowkv.ops.dense_attention.forms import Packed
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer
from shadowkv.ops.pooled_scores.reference import KeyNorm
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.recurrence import Spans
from shadowkv.ops.registry import CALLS, Ops
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.sketch_queries.reference import sketch_queries

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
B, H, G, D, N = 2, 2, 3, 64, 4
"""Rows, kv heads, query heads of each, head dim, pages."""


def floats(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def blocks_of(rows: int, width: int, form: str) -> QuantizedRows:
    return QuantizedRows((bytes_of(rows, width),), BLOCKS[form])


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=DEVICE)


def returns(found: object, *expected: tuple[tuple[int, ...], float | None]) -> None:
    """Checks shapes, and values if they are not None."""
    results = found if isinstance(found, tuple) else (found,)
    for result, (shape, value) in zip(results, expected, strict=True):
        assert result.shape == shape
        assert value is None or (result == value).all()


def unchanged(op: Callable[..., None], *fields: Tensor) -> Callable[..., None]:
    def call(*args: object) -> None:
        before = [field.clone() for field in fields]
        assert op(*args) is None
        assert all(torch.equal(*pair) for pair in zip(before, fields))

    return call


def rope() -> RotaryTables:
    return RotaryTables(RopeConfig(D), 64, DEVICE)


def no_spans() -> Spans:
    return Spans(None, whole(0), whole(0))


def nothing_to_append(ops: Ops) -> None:
    k, v = floats(N, H, 64, D), floats(N, H, 64, D)
    none = floats(0, H, D)
    unchanged(ops.append_tokens, k, v)(none, none, whole(0), rope(), k, v, whole(0), whole(0))


def no_block_to_append(ops: Ops) -> None:
    none = [floats(0, H, D) for _ in range(5)]
    assert ops.append_block(*none[:2], whole(0), rope(), *none[2:]) is None


def nothing_to_attend_to(ops: Ops) -> None:
    rows = DenseRows(floats(N, H, 8, 8, D), whole(B, 1))
    nothing = ((B, H * G, D), 0.0), ((B, H * G), -math.inf)
    returns(ops.attend_coded(floats(B, H * G, D), rows, rows, whole(B), whole(B)), *nothing)
    none = DenseRows(rows.rows, whole(B, 0))
    returns(ops.attend_coded(floats(B, H * G, D), none, none, whole(B), whole(B)), *nothing)
    nobody = DenseRows(rows.rows, whole(0, 1))
    shapes = ((0, H * G, D), None), ((0, H * G), None)
    returns(ops.attend_coded(floats(0, H * G, D), nobody, nobody, whole(0), whole(0)), *shapes)


def nothing_selected(ops: Ops) -> None:
    values, rank = floats(N, H, 8, 8, D), 12
    latents, basis, rotary = floats(N, 8, 8, rank), floats(3, rank, H, D), RotaryTables(RopeConfig(D), 64 * N, DEVICE)
    for rows in (B, 0):
        some, states = DenseRows(values, whole(rows, N)), whole(rows)
        keys = LatentKeys(latents, LATENT_CODECS["low-rank"], basis, None, states, whole(rows, N), states, rotary)
        found = ops.attend_selected(floats(rows, H * G, D), keys, some, whole(rows, H, 0))
        returns(found, ((rows, H * G, D), 0), ((rows, H * G), -math.inf))


def no_landmarks(ops: Ops) -> None:
    found = ops.chunk_mean_scores(
        floats(B, H * G, D), floats(N, H, 8, D), bytes_of(N, H, 8).bool(), whole(B, 0), whole(B)
    )
    assert found[0].shape == (B, H, G, 0)
    assert (found[1] == -math.inf).all()


def no_pooled_keys(ops: Ops) -> None:
    norm = KeyNorm(floats(D), D, 1e-6)
    for rows, pages in ((B, 0), (0, 3)):
        numbers = whole(rows, pages)
        found = ops.pooled_scores(floats(rows, H, D), floats(N, 64, D), numbers, numbers, norm, rope(), 4)
        returns(found, ((rows, pages, 16), None))


def no_bounds(ops: Ops) -> None:
    found = ops.min_max_scores(
        floats(B, H * G, D), floats(N, H, 2, 8, D), bytes_of(N, H, 8).bool(), whole(B, 0), whole(B)
    )
    assert found[0].shape == (B, H, G, 0)
    assert (found[1] == -math.inf).all()


def nothing_to_fetch(ops: Ops) -> None:
    host = floats(N, H, 8, 8, D)
    buffer = ChunkBuffer.empty(3, 5, 16, host)
    for rows, k in ((B, 0), (0, 4)):
        found = ops.fetch_chunks(host, whole(rows, 2), whole(rows), whole(rows, H, k) - 1, buffer)
        returns(found, ((rows, H, k), None))
    assert (buffer.owner == -1).all()
    assert (buffer.counters == 0).all()


def no_packed_sequences(ops: Ops, window: int | None = None) -> None:
    q, k = floats(0, H * G, D), floats(0, H, D)
    returns(ops.dense_attention(q, k, k, Packed(whole(1).int(), ()), window=window), ((0, H * G, D), None))


def no_exact_tokens(ops: Ops) -> None:
    pages = floats(N, H, 64, D)
    for rows, columns in ((0, 2), (B, 0), (B, 2)):
        found = ops.paged_attention(floats(rows, H * G, D), pages, pages, whole(rows, columns), whole(rows, columns))
        returns(found, ((rows, H * G, D), 0), ((rows, H * G), -math.inf))


def no_tokens_in_a_window(ops: Ops) -> None:
    pages = floats(N, H, 64, D)
    for rows, columns in ((0, 2), (B, 0), (B, 2)):
        tables = (whole(rows, columns) for _ in range(3))  # no page has a valid token
        found = ops.paged_window_attention(floats(rows, H * G, D), pages, pages, *tables)
        returns(found, ((rows, H * G, D), 0), ((rows, H * G), -math.inf))


def no_latents_to_write(ops: Ops) -> None:
    codec, field = LATENT_CODECS["low-rank-int8"], torch.zeros(1, N, 8, 8, 32, dtype=torch.int8, device=DEVICE)
    means = floats(1, 3, 32, dtype=torch.float32)
    args = floats(1, 0, 64, H, D), codec, floats(1, 3, 32, H, D), means, means, whole(0), field, whole(0)
    unchanged(ops.project_latents, field)(*args)


def no_codes_to_write(ops: Ops) -> None:
    codes, scale = bytes_of(1, N, H, 8, 8, D // 2), floats(1, N, H, 64, 1, dtype=torch.float16)
    rotation = torch.eye(D, device=DEVICE)
    args = floats(1, 0, 64, H, D), ROTATED_ROWS[4], rotation, (), codes, whole(0), scale, whole(0)
    unchanged(ops.quantize_rows, codes, scale)(*args)


def no_sketches_to_write(ops: Ops) -> None:
    planes, scale = bytes_of(2, 1, N, H, 64, 8), bytes_of(1, N, H, 64)
    state = floats(1, 3, H, D, dtype=torch.float32), floats(1, 3, H, D, D, dtype=torch.bfloat16)
    unchanged(ops.sketch_keys, planes, scale)(floats(1, 0, 64, H, D), *state, whole(0), *planes, scale, whole(0))


def no_rows_to_write(ops: Ops) -> None:
    field = floats(1, N, H, 8, 8, D)
    unchanged(ops.write_rows, field)(floats(1, 0, 64, H, D), field, whole(0), False)


def no_pages_to_rebuild(ops: Ops) -> None:
    ops.rebuild_rows(DenseRows(floats(N, H, 8, 8, D), whole(1, N)), 0, floats(H, 0, D), False)


def sketch(rows: int, columns: int) -> tuple:
    maps = torch.eye(D, device=DEVICE, dtype=torch.bfloat16).expand(1, H, D, D).contiguous()
    queries = sketch_queries(floats(rows, H * G, D), maps, whole(rows))
    return queries, *bytes_of(2, N, H, 64, 8), bytes_of(N, H, 64), whole(rows, columns), whole(rows)


def nothing_to_score(ops: Ops) -> None:
    for rows, columns in ((0, 2), (B, 0), (B, 2)):
        queries, signs, _, *rest = sketch(rows, columns)
        returns(ops.sign_scores(queries, signs, *rest), ((rows, H, 8 * columns), -math.inf))


def nothing_to_find(ops: Ops) -> None:
    for rows, columns in ((0, 2), (B, 0), (B, 2)):
        for sampling in (None, Sampling(whole(rows), whole(rows))):
            queries, *fields = sketch(rows, columns)
            coarse = torch.full((rows, H, 8 * columns), -math.inf, dtype=torch.float16, device=DEVICE)
            chunks, log_weight = ops.select_by_sketch(queries, coarse, *fields, whole(rows), 1, 5, sampling)
            returns(chunks, ((rows, H, 5), -1))
            assert (log_weight is None) == (sampling is None)
            assert log_weight is None or log_weight.shape == chunks.shape


def no_chunks_to_choose_from(ops: Ops) -> None:
    for rows, chunks, k in ((0, 9, 5), (B, 0, 5), (B, 9, 0)):
        logits = floats(rows, H, G, chunks, dtype=torch.float32)
        lse = logits.logsumexp(-1, keepdim=True)
        returns(ops.select_top_chunks(logits, lse, whole(rows) + k, k), ((rows, H, k), None if chunks else -1))


def no_queries_to_sketch(ops: Ops) -> None:
    made = ops.sketch_queries(floats(0, H * G, D), floats(1, H, D, D, dtype=torch.bfloat16), whole(0))
    assert made.whole.shape == (0, H * G, 8, 8)
    assert made.length.shape == (0, H * G)


CHECKS: dict[str, Callable[[Ops], None]] = {
    "add_rms_norm": lambda ops: returns(
        ops.add_rms_norm(floats(0, D), floats(0, D), floats(D), 1e-5), ((0, D), None), ((0, D), None)
    ),
    "append_block": no_block_to_append,
    "append_tokens": nothing_to_append,
    "gather_context": lambda ops: returns(
        ops.gather_context(*(floats(0, H, D),) * 2, *(floats(N, H, 64, D),) * 2, whole(0), whole(1).int()),
        ((0, H, D), None),
        ((0, H, D), None),
    ),
    "attend_coded": nothing_to_attend_to,
    "attend_selected": nothing_selected,
    "causal_convolution": lambda ops: returns(
        ops.causal_convolution(floats(0, D), floats(D, 4), floats(N, D, 3, dtype=torch.float32), no_spans()),
        ((0, D), None),
    ),
    "chunk_mean_scores": no_landmarks,
    "pooled_scores": no_pooled_keys,
    "dequantize_rows": lambda ops: returns(ops.dequantize_rows(blocks_of(0, 34, "Q8_0")), ((0, 32), None)),
    "sample_tokens": lambda ops: returns(
        ops.sample_tokens(floats(0, 9, dtype=torch.float32), floats(0, 5, dtype=torch.float64)), ((0,), None)
    ),
    "fetch_chunks": nothing_to_fetch,
    "find_outliers": lambda ops: returns(ops.find_outliers(floats(64, H, D), 8, 0), ((H, 0), None)),
    "gated_delta_rule": lambda ops: returns(
        ops.gated_delta_rule(
            *(floats(0, heads, D) for heads in (H, H, H * G)),
            *(floats(0, H * G, dtype=torch.float32) for _ in range(2)),
            floats(N, H * G, D, D, dtype=torch.float32),
            no_spans(),
        ),
        ((0, H * G, D), None),
    ),
    "ssd": lambda ops: returns(
        ops.ssd(
            floats(0, H * G, D),
            floats(0, H * G, dtype=torch.float32),
            floats(H * G, dtype=torch.float32),
            *(floats(0, H, D) for _ in range(2)),
            floats(H * G, dtype=torch.float32),
            floats(N, H * G, D, D, dtype=torch.float32),
            no_spans(),
        ),
        ((0, H * G, D), None),
    ),
    "merge_attention": lambda ops: returns(
        ops.merge_attention([(floats(0, H, D), floats(0, H, dtype=torch.float32))] * 2), ((0, H, D), None)
    ),
    "min_max_scores": no_bounds,
    "paged_attention": no_exact_tokens,
    "paged_window_attention": no_tokens_in_a_window,
    "project_latents": no_latents_to_write,
    "quantize_rows": no_codes_to_write,
    "quantized_matmul": lambda ops: returns(
        (
            ops.quantized_matmul(floats(0, 64), blocks_of(3, 36, "Q4_0")),
            ops.quantized_matmul(floats(2, 64), blocks_of(0, 36, "Q4_0")),
        ),
        ((0, 3), None),
        ((2, 0), None),
    ),
    "quantize_tokens": lambda ops: returns(ops.quantize_tokens(floats(0, D)), ((0, D), None), ((0, 1), None)),
    "dense_attention.packed": no_packed_sequences,
    "dense_attention.windowed": lambda ops: no_packed_sequences(ops, window=5),
    "rebuild_rows": no_pages_to_rebuild,
    "grouped_matmul": lambda ops: returns(
        ops.grouped_matmul(floats(0, D), floats(3, 8, D), torch.zeros(4, dtype=torch.int32, device=DEVICE)),
        ((0, 8), None),
    ),
    "grouped_quantized_matmul": lambda ops: returns(
        ops.grouped_quantized_matmul(
            floats(0, 64), [blocks_of(6, 36, "Q4_0")], torch.zeros(4, dtype=torch.int32, device=DEVICE)
        ),
        ((0, 2), None),
    ),
    "choose_experts": lambda ops: returns(
        ops.choose_experts(floats(0, 8), None, Routing(8, 2)), ((0, 2), None), ((0, 2), None)
    ),
    "sort_by_expert": lambda ops: returns(
        ops.sort_by_expert(whole(0, 2), 0, 8), ((0,), None), ((0,), None), ((0, 2), None), ((9,), 0)
    ),
    "sum_experts": lambda ops: returns(
        ops.sum_experts(floats(0, D), whole(0, 2), floats(0, 2).float()), ((0, D), None)
    ),
    "rms_norm": lambda ops: returns(ops.rms_norm(floats(0, D), floats(D), 1e-5), ((0, D), None)),
    "apply_rope": lambda ops: returns(ops.apply_rope(floats(0, H, D), whole(0), rope()), ((0, H, D), None)),
    "scaled_matmul": lambda ops: returns(
        ops.scaled_matmul(
            floats(0, D).to(FP8), whole(0, 1).float(), floats(H * D, D).to(FP8), whole(H * D, 1).float(), None, DTYPE
        ),
        ((0, H * D), None),
    ),
    "select_by_sketch": nothing_to_find,
    "select_top_chunks": no_chunks_to_choose_from,
    "sign_scores": nothing_to_score,
    "add_sinks": lambda ops: returns(
        ops.add_sinks(floats(0, 4, D), floats(0, 4, dtype=torch.float32), floats(4, dtype=torch.float32)),
        ((0, 4, D), None),
        ((0, 4), None),
    ),
    "gated_activation": lambda ops: returns(ops.gated_activation(floats(0, 2 * D), "silu"), ((0, D), None)),
    "sketch_keys": no_sketches_to_write,
    "sketch_queries": no_queries_to_sketch,
    "whiten_rows": lambda ops: returns(
        ops.whiten_rows(floats(0, 3, D, dtype=torch.float32), floats(0, 3, 3, dtype=torch.float32)), ((0, 3, D), None)
    ),
    "write_rows": no_rows_to_write,
}

AT_LEAST_ONE = {
    *("attend_blocks", "dense_attention.causal", "dense_attention.partial", "low_rank_basis"),
    *("decode_layers", "select_blocks"),
}
"""Ops whose docstrings require at least one query, row or sequence."""


def test_every_op_is_here() -> None:
    assert set(CALLS) == CHECKS.keys() | AT_LEAST_ONE


if TRITON_RUNS:
    # Dense rows, which ``attend_coded`` in CUDA does not support. Packed weights have their own tests.
    PACKED = dict.fromkeys(("quantized_matmul", "grouped_quantized_matmul"), "reference")
    CHOSEN = Ops("cuda", overrides={"attend_coded": "triton", **PACKED})

    @pytest.mark.parametrize("name", CHECKS)
    def test_nothing_on_a_gpu(seed: str, name: str) -> None:
        if INTERPRETED and CHOSEN.backends[name] != "triton":
            pytest.skip("no Triton kernel")
        CHECKS[name](CHOSEN)

else:

    @pytest.mark.parametrize("name", CHECKS)
    def test_nothing(seed: str, ops: Ops, name: str) -> None:
        CHECKS[name](ops)

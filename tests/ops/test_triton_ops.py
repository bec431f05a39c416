"""Small Triton kernels against their references: on a GPU, or on the CPU through Triton's interpreter."""

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU, TRITON_RUNS

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables

triton = pytest.importorskip("triton")


if TRITON_RUNS:
    from shadowkv.ops.activation_rows import reference as add_rms_norm_reference
    from shadowkv.ops.activation_rows import reference as gates_reference
    from shadowkv.ops.activation_rows import reference as quantize_tokens_reference
    from shadowkv.ops.activation_rows import reference as rms_norm_reference
    from shadowkv.ops.activation_rows import triton as add_rms_norm_triton
    from shadowkv.ops.activation_rows import triton as gates_triton
    from shadowkv.ops.activation_rows import triton as quantize_tokens_triton
    from shadowkv.ops.activation_rows import triton as rms_norm_triton
    from shadowkv.ops.apply_rope import reference as rope_reference
    from shadowkv.ops.apply_rope import triton as rope_triton
    from shadowkv.ops.chunk_scores import reference as chunk_mean_reference
    from shadowkv.ops.chunk_scores import reference as min_max_reference
    from shadowkv.ops.chunk_scores import triton as chunk_mean_triton
    from shadowkv.ops.chunk_scores import triton as min_max_triton
    from shadowkv.ops.copies import reference as append_block_reference
    from shadowkv.ops.copies import reference as append_reference
    from shadowkv.ops.copies import reference as gather_context_reference
    from shadowkv.ops.copies import triton as append_block_triton
    from shadowkv.ops.copies import triton as append_triton
    from shadowkv.ops.copies import triton as gather_context_triton
    from shadowkv.ops.partial_attention import reference as merge_reference
    from shadowkv.ops.partial_attention import triton as merge_triton

    DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
    TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}
    ROPES = [
        RopeConfig(64),
        RopeConfig(96, theta=500000.0),
        RopeConfig(128, rotary_dim=64, interleaved=True),
        RopeConfig(64, scaling="yarn", factor=4.0, original_max_position=2048),
    ]

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rope", ROPES, ids=["64", "96", "half, interleaved", "yarn"])
    @pytest.mark.parametrize("inverse", [False, True])
    def test_rotate(rope: RopeConfig, inverse: bool, dtype: torch.dtype) -> None:
        tables = RotaryTables(rope, 5000, DEVICE)
        joined = random(7, 9 * rope.head_dim, dtype=dtype)  # queries of a joined projection are not contiguous
        x = joined[:, : 6 * rope.head_dim].unflatten(1, (6, -1))
        positions = torch.tensor([0, 1, 4999, 63, 64, 3000, 2], device=DEVICE)
        wanted = rope_reference.apply_rope(x, positions, tables, inverse)
        torch.testing.assert_close(rope_triton.apply_rope(x, positions, tables, inverse), wanted, **TOLERANCE[dtype])

    def test_rotate_more_leading_dimensions() -> None:
        tables = RotaryTables(RopeConfig(64), 500, DEVICE)
        x, positions = random(3, 5, 2, 64), torch.randint(0, 500, (3, 5), device=DEVICE)
        wanted = rope_reference.apply_rope(x, positions, tables)
        torch.testing.assert_close(rope_triton.apply_rope(x, positions, tables), wanted, **TOLERANCE[torch.float32])

    @pytest.mark.parametrize("shape", [(3, 1), (3, 5)], ids=str)
    def test_rotate_layers_of_the_same_positions(shape: tuple[int, int]) -> None:
        tables, x = RotaryTables(RopeConfig(64), 500, DEVICE), random(*shape, 2, 64)
        # What lies behind the positions is none. Of one token all are one number in memory, also when flattened.
        positions = torch.tensor([7, 90, 3, 4, 5, 499, 498, 497], device=DEVICE)[: shape[1]].expand(shape)
        wanted = rope_reference.apply_rope(x, positions, tables)
        torch.testing.assert_close(rope_triton.apply_rope(x, positions, tables), wanted, **TOLERANCE[torch.float32])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rope", ROPES, ids=["64", "96", "half, interleaved", "yarn"])
    def test_append_tokens(rope: RopeConfig, dtype: torch.dtype) -> None:
        tables, heads, dim = RotaryTables(rope, 5000, DEVICE), 3, rope.head_dim
        k, v = random(4, 2 * heads * dim, dtype=dtype).unflatten(1, (2 * heads, dim)).split(heads, dim=1)
        pages, positions = torch.tensor([5, 0, 2, 7], device=DEVICE), torch.tensor([0, 4999, 130, 64], device=DEVICE)
        got, wanted = ([torch.full((9, heads, 64, dim), 7.0, device=DEVICE, dtype=dtype)] * 2 for _ in range(2))
        got, wanted = [x.clone() for x in got], [x.clone() for x in wanted]
        append_triton.append_tokens(k, v, positions, tables, *got, pages, positions % 64)
        append_reference.append_tokens(k, v, positions, tables, *wanted, pages, positions % 64)
        torch.testing.assert_close(got[0], wanted[0], **TOLERANCE[dtype])
        assert torch.equal(got[1], wanted[1])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rope", ROPES, ids=["64", "96", "half, interleaved", "yarn"])
    @pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (16, 4), (37, 5)])
    def test_append_block(rope: RopeConfig, tokens: int, heads: int, dtype: torch.dtype) -> None:
        """Of a joined projection, into some rows of larger tensors, of which the others stay as they are."""
        tables, dim = RotaryTables(rope, 5000, DEVICE), rope.head_dim
        k, v = random(tokens, 2 * heads * dim, dtype=dtype).unflatten(1, (2 * heads, dim)).split(heads, dim=1)
        positions = torch.randint(0, 5000, (tokens,), device=DEVICE)
        wanted = torch.full((3, tokens + 7, heads, dim), float("nan"), device=DEVICE, dtype=dtype)
        got = wanted.clone()
        append_block_triton.append_block(k, v, positions, tables, *got[:, 3 : tokens + 3])
        append_block_reference.append_block(k, v, positions, tables, *wanted[:, 3 : tokens + 3])
        assert torch.equal(got[[0, 2]].nan_to_num(), wanted[[0, 2]].nan_to_num())
        torch.testing.assert_close(got[1], wanted[1], equal_nan=True, **TOLERANCE[dtype])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "count"), [(1, 1), (40, 33), (16, 0), (50, 50)])
    def test_gather_context(rows: int, count: int, dtype: torch.dtype) -> None:
        """New tokens of joined projections, and rows of larger pages; rows that are not needed stay as they are."""
        heads, dim = 3, 96
        new = random(7, 2 * heads * dim, dtype=dtype).unflatten(1, (2 * heads, dim)).split(heads, dim=1)
        pages = random(2, 5, 2, heads, 64, dim, dtype=dtype)[:, :, 1]
        sources = torch.randint(-7, 5 * 64, (rows,), device=DEVICE)
        needed = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        got = gather_context_triton.gather_context(*new, *pages, sources, needed)
        wanted = gather_context_reference.gather_context(*new, *pages, sources, needed)
        for x, y, own, of_pages in zip(got, wanted, new, pages, strict=True):
            assert torch.equal(x[:count], y[:count])
            for row, source in enumerate(sources.tolist()):
                known = own[-1 - source] if source < 0 else of_pages[source // 64, :, source % 64]
                assert torch.equal(y[row], known)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [16, 300, 1024])
    def test_quantize_tokens(size: int, dtype: torch.dtype) -> None:
        if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no 8-bit floats")
        x = random(9, 2 * size, dtype=dtype)[:, size:]  # rows of a joined tensor are not contiguous
        x[1] *= torch.exp2(-torch.arange(size, device=DEVICE) / 10)  # down to codes below the smallest
        x[2] = 0
        x[3, 5] = 3e4
        x[4] = torch.arange(size, device=DEVICE) / 8  # numbers half way between two codes
        x[5] = 1e-36  # whose scale would be subnormal
        x[6, 3], x[7, 3] = float("nan"), float("inf")
        got, wanted = (op.quantize_tokens(x) for op in (quantize_tokens_triton, quantize_tokens_reference))
        if not INTERPRETED:  # which makes a number of a NaN
            assert got[0].float().isnan().any(1).tolist() == [row in (6, 7) for row in range(9)]
        kept = [0, 1, 2, 3, 4, 5, 8]
        assert torch.equal(got[0][kept].float(), wanted[0][kept].float())
        assert torch.equal(got[1][kept], wanted[1][kept])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("dim", [64, 96])
    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_merge_attention(count: int, dim: int, dtype: torch.dtype) -> None:
        parts = [(random(5, 3, dim, dtype=dtype), 10 * random(5, 3)) for _ in range(count)]
        for _, lse in parts[1:]:
            lse[2] = float("-inf")
        for _, lse in parts[:-1]:
            lse[3] = float("-inf")
        wanted = merge_reference.merge_attention(parts)
        torch.testing.assert_close(merge_triton.merge_attention(parts), wanted, **TOLERANCE[dtype])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [64, 576, 4096])
    def test_norms(size: int, dtype: torch.dtype) -> None:
        x, delta, weight = random(5, size, dtype=dtype), random(5, size, dtype=dtype), random(size, dtype=dtype)
        wanted = rms_norm_reference.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(rms_norm_triton.rms_norm(x, weight, 1e-5), wanted, **TOLERANCE[dtype])
        wanted = add_rms_norm_reference.add_rms_norm(x, delta, weight, 1e-5)
        got = add_rms_norm_triton.add_rms_norm(x, delta, weight, 1e-5)
        torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])

    def test_norms_with_weights_in_float32() -> None:
        """The only rounding is that of the result, so it is the nearest number but where float32's sums differ."""
        low = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter has no bfloat16
        x, delta, weight = random(5, 576, dtype=low), random(5, 576, dtype=low), 1 + 1e-3 * random(576)
        for got, wanted in (
            (rms_norm_triton.rms_norm(x, weight, 1e-5), rms_norm_reference.rms_norm(x, weight, 1e-5)),
            (
                add_rms_norm_triton.add_rms_norm(x, delta, weight, 1e-5)[1],
                add_rms_norm_reference.add_rms_norm(x, delta, weight, 1e-5)[1],
            ),
        ):
            assert got.dtype == wanted.dtype == low
            assert (got != wanted).float().mean() < 0.01
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=torch.finfo(low).eps)

    def test_norm_of_a_part_of_a_row() -> None:
        x, weight = random(5, 8 * 64)[:, 64:192].unflatten(1, (2, 64)), random(64)
        wanted = rms_norm_reference.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(rms_norm_triton.rms_norm(x, weight, 1e-5), wanted, **TOLERANCE[torch.float32])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("activation", gates_triton.VARIANTS)
    def test_gated_activation(activation: str, dtype: torch.dtype) -> None:
        x = 3 * random(5, 2 * 1536, dtype=dtype)
        x[0, :4] = torch.tensor([-60.0, 60.0, 0.0, -1e4])
        if activation == "clamped_silu":
            x[1, 1536:1540] = x[0, :4]
        wanted = gates_reference.gated_activation(x, activation)
        torch.testing.assert_close(gates_triton.gated_activation(x, activation), wanted, **TOLERANCE[dtype])

    def test_rows_of_no_expert_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
        x, offsets = random(5, 2 * 1536), torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=DEVICE)
        wanted = gates_reference.gated_activation(x[:3], "silu")
        monkeypatch.setattr(torch, "empty", lambda *shape, **rest: torch.full(shape, 7.0, **rest))
        found = gates_triton.gated_activation(x, "silu", offsets)
        torch.testing.assert_close(found[:3], wanted, **TOLERANCE[torch.float32])
        assert (found[3:] == 7).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "group", "dim", "chunks"), [(2, 3, 64, 8), (1, 8, 96, 1), (3, 1, 128, 4)])
    @pytest.mark.parametrize("bounds", [False, True])
    def test_chunk_scores(heads: int, group: int, dim: int, chunks: int, bounds: bool, dtype: torch.dtype) -> None:
        counts = torch.tensor([30 * chunks, 0, 17 * chunks + 1, 1], device=DEVICE)
        pages = torch.randperm(120, device=DEVICE).view(4, 30)
        excluded = torch.rand(130, heads, chunks, device=DEVICE) < 0.2
        q = random(4, heads * group, dim, dtype=dtype)
        keys = random(130, heads, 2, chunks, dim, dtype=dtype).sort(dim=2).values
        poison = excluded if chunks > 1 else torch.zeros_like(excluded)
        keys = keys.masked_fill(poison[:, :, None, :, None], float("nan"))
        if bounds:
            got = min_max_triton.min_max_scores(q, keys, excluded, pages, counts)
            wanted = min_max_reference.min_max_scores(q.float(), keys.float(), excluded, pages, counts)
        else:
            keys = keys[:, :, 0].contiguous()
            got = chunk_mean_triton.chunk_mean_scores(q, keys, excluded, pages, counts)
            wanted = chunk_mean_reference.chunk_mean_scores(q.float(), keys.float(), excluded, pages, counts)
        torch.testing.assert_close(got[0], wanted[0], atol=2e-5, rtol=2e-5)  # bf16 products are exact in float32
        torch.testing.assert_close(got[1].logsumexp(-1), wanted[1].squeeze(-1), atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "group", "dim", "chunks"), [(2, 3, 64, 8), (1, 8, 96, 1), (3, 1, 256, 4)])
    def test_scores_of_landmarks_in_eight_bits(
        heads: int, group: int, dim: int, chunks: int, dtype: torch.dtype
    ) -> None:
        counts = torch.tensor([30 * chunks, 0, 17 * chunks + 1, 1], device=DEVICE)
        pages = torch.randperm(120, device=DEVICE).view(4, 30)
        excluded = torch.rand(130, heads, chunks, device=DEVICE) < 0.2
        q, scale = random(4, heads * group, dim, dtype=dtype), torch.rand(260, heads, device=DEVICE)[::2]
        keys = torch.randint(0, 256, (130, heads, chunks, dim), device=DEVICE).byte()  # every number there is
        keys = torch.where(keys & 127 == 127, 0, keys).view(torch.float8_e4m3fn)
        rest = excluded, pages, counts, scale / 100
        got = chunk_mean_triton.chunk_mean_scores(q, keys, *rest)
        wanted = chunk_mean_reference.chunk_mean_scores(q.float(), keys, *rest)
        torch.testing.assert_close(got[0], wanted[0], atol=1e-4, rtol=2e-5)
        torch.testing.assert_close(got[1].logsumexp(-1), wanted[1].squeeze(-1), atol=1e-4, rtol=2e-5)

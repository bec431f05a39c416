"""Triton kernels that store prompts against their references: on a GPU, or on the CPU through Triton's interpreter."""

from collections.abc import Iterator
from copy import copy

import pytest
import torch
from devices import DEVICE, ON_GPU, TRITON_RUNS

from shadowkv.baselines.polarquant import renormalised
from shadowkv.baselines.shard import MixedLatents
from shadowkv.baselines.vq import ENTRIES, GROUP, VectorRows
from shadowkv.kvcache.codecs.fp8 import LARGEST, Fp8Rows
from shadowkv.kvcache.codecs.latents import DenseLatents, Int4Latents, Int8Latents
from shadowkv.kvcache.codecs.lloyd import LLOYD_ROWS, Rule, least_squares, norm, unbiased
from shadowkv.kvcache.codecs.rotated import ROTATED_ROWS
from shadowkv.ops.codec import LatentCodec, RowCodec
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sign_scores.reference import STEP, plane_bits
from shadowkv.ops.sketch_queries.reference import plane_bytes

triton = pytest.importorskip("triton")

TIE = 1e-3
"""Distance from a tie, in steps, up to which another order of sums may round a value differently."""

if TRITON_RUNS:
    from shadowkv.ops.chunk_scores import reference as outliers_reference
    from shadowkv.ops.chunk_scores import triton as outliers_triton
    from shadowkv.ops.copies import reference as write_reference
    from shadowkv.ops.copies import triton as write_triton
    from shadowkv.ops.project_latents import reference as latents_reference
    from shadowkv.ops.project_latents import triton as latents_triton
    from shadowkv.ops.quantize_rows import reference as rows_reference
    from shadowkv.ops.quantize_rows import triton as rows_triton
    from shadowkv.ops.quantize_rows.triton import levels_of
    from shadowkv.ops.sketch_keys import reference as sketch_reference
    from shadowkv.ops.sketch_keys import triton as sketch_triton

    DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
    LAYERS, PAGES, NAMES = (2, 5, 23) if ON_GPU else (2, 2, 7)

    def pages_of(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """[L, n, 64, H, d], with a row of zeros, strided as tokens of exact pages or of a joined projection are."""
        if heads % 2:
            x = torch.randn(LAYERS, PAGES, heads, 64, dim, device=DEVICE).to(dtype).transpose(2, 3)
        else:
            x = torch.randn(LAYERS, PAGES, 64, 2 * heads, dim, device=DEVICE).to(dtype)[:, :, :, heads:]
        x[0, 0, 5, 0] = 0
        return x

    def arena(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        """[L, N, *shape] among other bytes, all 77."""
        size = torch.Size(shape).numel()
        row = -(-size * dtype.itemsize // 256) * 256 // dtype.itemsize
        flat = torch.full((LAYERS, NAMES * row), 77, device=DEVICE).to(dtype)
        strides = torch.empty(shape, device="meta").stride()
        return flat.as_strided((LAYERS, NAMES, *shape), (NAMES * row, row, *strides))

    def page_ids() -> torch.Tensor:
        return torch.randperm(NAMES, device=DEVICE)[:PAGES]

    def differing(a: torch.Tensor, b: torch.Tensor, before_rounding: torch.Tensor, offset: float = 0.0) -> None:
        """Checks that few values differ, by one, and only those within ``TIE`` of a tie."""
        wrong = a != b
        assert ((a - b).abs()[wrong] <= 1).all()
        near = (before_rounding + offset - (before_rounding + offset).round()).abs()
        assert (near[wrong] < TIE).all(), near[wrong].max()
        assert wrong.float().mean() < 1e-3

    def skip_what_compiles_for_long(dim: int, dtype: torch.dtype) -> None:
        if ON_GPU and dtype != torch.bfloat16 and dim > 64:
            pytest.skip("products in float32 compile for seconds; 64 dimensions show the same")

    def untouched(field: torch.Tensor, pages: torch.Tensor) -> None:
        others = torch.ones(NAMES, dtype=torch.bool, device=DEVICE)
        others[pages] = False
        assert (field[:, others] == 77).all()

    def coded_by_both(
        x: torch.Tensor, codec: RowCodec, rotation: torch.Tensor | None, state: tuple[torch.Tensor, ...], chunk: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Codes [L, n, H, 64, w] of the kernel and of the reference, then scales [L, n, H, 64, s] of both."""
        heads, dim = x.shape[3:]
        found, pages, scale_pages = [], page_ids(), page_ids()
        for op in (rows_triton, rows_reference):
            codes = arena(heads, 64 // chunk, chunk, codec.row_bytes(dim), dtype=torch.uint8)
            scale = arena(heads, 64, codec.scales(dim), dtype=torch.float16)
            op.quantize_rows(x, codec, rotation, state, codes, pages, scale, scale_pages)
            untouched(codes, pages)
            untouched(scale, scale_pages)
            found.append((codes[:, pages].flatten(3, 4), scale[:, scale_pages]))
        return zip(*found, strict=True)

    def projected_by_both(
        x: torch.Tensor, codec: LatentCodec, basis: torch.Tensor, mean: torch.Tensor | None, step: torch.Tensor | None,
        states: torch.Tensor, chunk: int, widths: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Latents [L, n, 64, w] of the kernel and of the reference."""
        width, stored = codec.field(basis.shape[2], x.dtype)
        found, pages = [], page_ids()
        for op in (latents_triton, latents_reference):
            latents = arena(64 // chunk, chunk, width, dtype=stored)
            op.project_latents(x, codec, basis, mean, step, states, latents, pages, widths)
            untouched(latents, pages)
            found.append(latents[:, pages].flatten(2, 3))
        return found

    def sketched_by_both(
        x: torch.Tensor, mean: torch.Tensor, maps: torch.Tensor, states: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Signs, rest and scale, [L, n, H, 64, ...] each, of the kernel and of the reference."""
        heads, dim = x.shape[3:]
        found, pages = [], page_ids()
        for op in (sketch_triton, sketch_reference):
            fields = [arena(heads, 64, *plane, dtype=torch.uint8) for plane in 2 * [(plane_bytes(dim),)] + [()]]
            op.sketch_keys(x, mean, maps, states, *fields, pages)
            for field in fields:
                untouched(field, pages)
            found.append([field[:, pages] for field in fields])
        return found

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("heads", "dim", "bits", "chunk"),
        [(2, 128, 4, 8), (3, 64, 4, 1), (1, 96, 4, 16), (3, 64, 2, 8), (2, 128, 2, 8), (3, 64, 3, 4), (2, 128, 3, 8),
         (1, 96, 2, 8), (1, 16, 4, 8)],
    )  # fmt: skip
    def test_quantized_rows(heads: int, dim: int, bits: int, chunk: int, dtype: torch.dtype) -> None:
        x, rotation = pages_of(heads, dim, dtype), random_rotation(dim, "values").to(DEVICE)
        codec = ROTATED_ROWS[bits]
        codes, (scale, wanted_scale) = coded_by_both(x, codec, rotation, (), chunk)
        ours, theirs = (each.transpose(2, 3) for each in codes)
        assert ours.shape == codec.encode(x, rotation)[0].shape
        one = torch.ones(*ours.shape[:-1], 1, device=DEVICE)
        levels = [codec.decode(codes, one, None, dim) for codes in (ours, theirs)]
        y = x.double() @ rotation.double()
        step = codec.step * y.norm(dim=-1, keepdim=True) / dim**0.5
        differing(*levels, (y / step.masked_fill(step == 0, 1)))
        same = (levels[0] == levels[1]).all(-1).transpose(2, 3)
        torch.testing.assert_close(scale[same], wanted_scale[same], rtol=2e-3, atol=0)
        assert scale[0, 0, 0, 5, 0] == 0

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("heads", "dim", "bits", "chunk", "rule"),
        [(2, 128, 4, 8, least_squares), (3, 64, 4, 1, unbiased), (1, 96, 4, 16, norm), (3, 64, 2, 8, renormalised),
         (2, 128, 3, 8, unbiased), (3, 64, 3, 4, least_squares), (1, 96, 8, 8, unbiased), (2, 128, 2, 8, unbiased),
         (2, 128, 8, 1, least_squares)],
    )  # fmt: skip
    def test_rows_of_levels(heads: int, dim: int, bits: int, chunk: int, rule: Rule, dtype: torch.dtype) -> None:
        x, rotation = pages_of(heads, dim, dtype), random_rotation(dim, "values").to(DEVICE)
        x[0, 1, 7, heads - 1, 3] = torch.nan
        codec = copy(LLOYD_ROWS[bits])
        codec.rule = rule
        codes, (scale, wanted_scale) = coded_by_both(x, codec, rotation, (), chunk)
        assert scale[0, 0, 0, 5, 0] == 0
        assert scale[0, 1, heads - 1, 7, 0].isnan()
        steps = scale.transpose(2, 3)
        assert steps.isnan().sum() == 1
        ours, theirs = (each.transpose(2, 3) for each in codes)
        one = torch.full_like(steps, dim**0.5, dtype=torch.float32)
        levels = torch.stack([codec.decode(codes, one, None, dim) for codes in (ours, theirs)])
        ascending = levels_of(codec, dim, x.device)[0] * dim**0.5
        index = torch.bucketize(levels.contiguous(), (ascending[1:] + ascending[:-1]) / 2)
        wrong = (index[0] != index[1]) & ~steps.isnan()
        assert wrong.float().mean() < 1e-3
        assert ((index[0] - index[1]).abs()[wrong] == 1).all()
        y = x.double() @ rotation.double()
        near = y * dim**0.5 / y.norm(dim=-1, keepdim=True) - levels.mean(0)  # the boundary between both
        assert (near[wrong].abs() < TIE * 2.0 ** (4 - bits)).all(), near[wrong].abs().max()
        same = ~wrong.any(-1).transpose(2, 3)
        torch.testing.assert_close(scale[same], wanted_scale[same], rtol=2e-3, atol=0, equal_nan=True)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "dim", "chunk"), [(2, 128, 8), (1, 96, 64), (1, 256, 1)])
    @pytest.mark.parametrize("shared", [False, True])
    def test_rows_of_8_bit_floats(heads: int, dim: int, chunk: int, shared: bool, dtype: torch.dtype) -> None:
        x, codec = pages_of(heads, dim, dtype), Fp8Rows()
        x[0, 1] *= torch.logspace(-5, 2, dim, device=DEVICE).to(dtype)  # from nothing to what is clipped
        x[0, 1, 7, 0, 3] = torch.nan
        step = (1 + torch.rand(LAYERS, 1 if shared else PAGES, heads, 1, device=DEVICE)) / 64
        one = (torch.ones((), device=DEVICE),)
        every = codec.decode(torch.arange(256, device=DEVICE).to(torch.uint8), x, None, 256, one)
        finite = every[every.isfinite()].sort().values
        ties = torch.cat((finite, (finite[1:] + finite[:-1]) / 2)).to(dtype)
        x[1, 0, :4, 0] = ties[torch.arange(4 * dim, device=DEVICE) % len(ties)].view(4, dim)
        step[1, 0, 0] = 1
        (got, wanted), _ = coded_by_both(x, codec, None, (step,), chunk)
        nan = (wanted & 0x7F) == 0x7F
        assert nan.sum() == 1
        assert torch.equal((got & 0x7F) == 0x7F, nan)
        assert torch.equal(got[~nan], wanted[~nan])
        assert (got[0, 1] & 0x7F == 0x7E).sum() > 1, f"some are {LARGEST}"

    @pytest.mark.parametrize("dtype", DTYPES)
    # In the interpreter, which takes seconds for each, every value of every parameter once.
    @pytest.mark.parametrize(
        ("heads", "dim", "chunk", "shared"),
        [(2, 128, 8, True), (3, 64, 1, False), *[(2, 128, 8, False), (3, 64, 1, True)] * ON_GPU],
    )
    def test_rows_of_vectors(heads: int, dim: int, chunk: int, shared: bool, dtype: torch.dtype) -> None:
        """Another entry than the reference's is as near; NaN, and the first of entries that are the same."""
        skip_what_compiles_for_long(dim, dtype)
        x, codec = pages_of(heads, dim, dtype), VectorRows()
        x[0, 1, 7, 0, 3] = torch.nan
        states = 1 if shared else PAGES
        largest = 1 + torch.rand(LAYERS, states, heads, dim, device=DEVICE)
        codebook = torch.randn(LAYERS, states, 1, ENTRIES, GROUP, device=DEVICE)
        codebook[:, :, :, 0], codebook[:, :, :, 200] = 0, codebook[:, :, :, 9]
        rotation = codec.rotation_matrix(dim, "values").to(DEVICE)
        (ours, theirs), _ = coded_by_both(x, codec, rotation, (largest, codebook), chunk)  # [L, n, H, 64, groups]
        assert (ours[0, 1, 0, 7] == 0).all()
        assert not (ours == 200).any()
        wrong = ours != theirs
        assert wrong.float().mean() < 1e-3
        learned = largest[:, :, :, None], codebook[:, :, :, None]
        y = (x.transpose(2, 3).float() @ rotation / learned[0]).unflatten(-1, (-1, GROUP))
        entries = codebook.expand(LAYERS, PAGES, heads, ENTRIES, GROUP)
        distances = [
            (y - entries.gather(3, code.flatten(3).long()[..., None].expand(-1, -1, -1, -1, GROUP)).view_as(y)).norm(
                dim=-1
            )
            for code in (ours, theirs)
        ]
        torch.testing.assert_close(distances[0][wrong], distances[1][wrong], rtol=TIE, atol=TIE)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "dim", "rank", "chunk"), [(2, 64, 48, 8), (3, 64, 44, 1), (1, 64, 16, 64)])
    @pytest.mark.parametrize("shared", [False, True])
    def test_latents_of_mixed_widths(
        heads: int, dim: int, rank: int, chunk: int, shared: bool, dtype: torch.dtype
    ) -> None:
        codec, x = MixedLatents(), pages_of(heads, dim, dtype)
        states = torch.tensor([4] if shared else [4, *[1, 8, 0, 4][: PAGES - 1]], device=DEVICE)
        pairs = torch.tensor([[8, 0], [6, 2], [4, 4], [4, 0]], dtype=torch.uint8, device=DEVICE)
        widths = pairs[torch.randint(4, (LAYERS, 9, rank // 2), device=DEVICE)].flatten(2)
        most = ((1 << widths.int() >> 1) - 1).clamp(min=1)
        step = 2 / most  # most latents, not all, are within their widths
        basis = torch.randn(LAYERS, 9, rank, heads, dim, device=DEVICE) / (heads * dim) ** 0.5
        basis = (basis * step[..., None, None]).to(dtype)
        mean = torch.randn(LAYERS, 9, heads, dim, device=DEVICE).to(dtype)
        products = (basis.float().flatten(3) @ mean.float().flatten(2).unsqueeze(3)).squeeze(3)
        got, wanted = projected_by_both(x, codec, basis, products, step, states, chunk, widths)
        own = widths[:, states].unsqueeze(2)
        spare = 4 * rank // 8 - -(-own.int().sum(3) // 8)  # bytes behind the last code, in rows of 64 tokens
        last = got.flip(3).cumsum(3)[..., : int(spare.max())]
        behind = torch.arange(last.shape[3], device=DEVICE) < spare.unsqueeze(3)
        assert (last.masked_fill(~behind, 0) == 0).all()
        ours, theirs = (codec.decode(latents, rank, own).double() for latents in (got, wanted))
        exact = (x.double() - mean[:, states].double().unsqueeze(2)).flatten(3)
        exact = (
            exact
            @ basis[:, states].double().flatten(3).transpose(2, 3)
            / step[:, states].double().square().unsqueeze(2)
        )
        assert (exact.abs() > most[:, states].unsqueeze(2)).any()
        differing(ours, theirs, exact, offset=0.5)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "dim"), [(2, 128), (3, 64), (1, 96)])
    @pytest.mark.parametrize("shared", [False, True])
    def test_sketched_keys(heads: int, dim: int, shared: bool, dtype: torch.dtype) -> None:
        skip_what_compiles_for_long(dim, dtype)
        x, rotation = pages_of(heads, dim, dtype), random_rotation(dim, "sketch").to(DEVICE)
        maps = (rotation + 0.3 * torch.randn(LAYERS, 9, heads, dim, dim, device=DEVICE) / dim**0.5).bfloat16()
        mean = 0.5 * torch.randn(LAYERS, 9, heads, dim, device=DEVICE)
        mean[0, 4, 0] = 0
        states = torch.tensor([4] if shared else [4, *[1, 8, 0, 4][: PAGES - 1]], device=DEVICE)
        both = sketched_by_both(x, mean, maps, states)
        (signs, rest, scale), (*_, wanted_scale) = both
        codes = [(2 * plane_bits(a, dim).int() + plane_bits(b, dim).int()).transpose(2, 3) for a, b, _ in both]
        assert (signs[..., dim // 8 :] == 0).all()
        assert (rest[..., dim // 8 :] == 0).all()
        centred = x.double() - mean[:, states].unsqueeze(2).double()
        mapped = (centred.transpose(2, 3) @ maps[:, states].double()).transpose(2, 3)
        sigma = mapped.norm(dim=-1, keepdim=True) / dim**0.5
        differing(*codes, mapped / (STEP * sigma).clamp(min=1e-30))
        same = (codes[0] == codes[1]).all(-1).transpose(2, 3)
        found, expected = scale[same].int(), wanted_scale[same].int()
        assert ((found - expected).abs() <= 1).all()  # other sums may be rounded the other way
        assert (found != expected).float().mean() < 2e-3
        assert scale[0, 0, 0, 5] == 1

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sketched_keys_that_are_not_finite_or_huge(dtype: torch.dtype) -> None:
        heads, dim = 1, 64
        x, mean = pages_of(heads, dim, dtype), torch.zeros(LAYERS, 1, heads, dim, device=DEVICE)
        x[0, 1, 7, 0, 3], x[0, 1, 8, 0, 3], x[0, 1, 9, 0, 3] = torch.nan, torch.inf, -torch.inf
        x[0, 1, 10] = torch.finfo(dtype).max / dim
        maps = random_rotation(dim, "sketch").to(DEVICE).bfloat16().expand(LAYERS, 1, heads, -1, -1).contiguous()
        states = torch.tensor([0], device=DEVICE)
        found, expected = (scale.int() for *_, scale in sketched_by_both(x, mean, maps, states))
        assert found[0, 1, 0, 7:10].tolist() == expected[0, 1, 0, 7:10].tolist() == [1, 1, 1]
        assert (found >= 1).all() and (found <= 247).all()
        found[0, 1, 0, 10] = expected[0, 1, 0, 10]  # whether sums overflow, their order says
        assert ((found - expected).abs() <= 1).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "dim", "rank", "chunk"), [(2, 64, 40, 8), (3, 96, 160, 1), (8, 128, 160, 8)])
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("codec", [DenseLatents(), Int8Latents(), Int4Latents()], ids=lambda codec: codec.name)
    def test_latents(
        heads: int, dim: int, rank: int, chunk: int, shared: bool, codec: LatentCodec, dtype: torch.dtype
    ) -> None:
        if not ON_GPU and heads * dim > 512:
            pytest.skip("slow in the interpreter")
        x, n = pages_of(heads, dim, dtype), heads * dim
        x[0, 1, 9] *= 20  # whose latents are clipped in whole numbers
        directions = torch.linalg.qr(torch.randn(LAYERS, 9, n, rank, device=DEVICE)).Q.transpose(2, 3)
        largest = codec.largest_codes(rank, DEVICE) if codec.largest else 127
        step = (6 + 6 * torch.rand(LAYERS, 9, rank, device=DEVICE)) / largest
        basis = (directions * step.unsqueeze(3)).unflatten(3, (heads, dim)).to(dtype).contiguous()
        mean = (3 * torch.randn(LAYERS, 9, heads, dim, device=DEVICE)).to(dtype)
        states = torch.tensor([4] if shared else [4, *[1, 8, 0, 4][: PAGES - 1]], device=DEVICE)
        products = (basis.float().flatten(3) @ mean.float().flatten(2).unsqueeze(3)).squeeze(3)
        extra = (products, step) if codec.largest else (None, None)
        both = projected_by_both(x, codec, basis, *extra, states, chunk)
        ours, theirs = (codec.decode(latents, rank).double() for latents in both)
        rows = basis[:, states].double().flatten(3).transpose(2, 3)
        if not codec.largest:
            exact = x.double().flatten(3) @ rows
            allowed = 2 * (theirs - exact).abs().max() + 1e-6
            assert (ours - exact).abs().max() <= allowed
            return
        exact = (x.double() - mean[:, states].double().unsqueeze(2)).flatten(3) @ rows
        exact /= step[:, states].double().square().unsqueeze(2)
        assert (exact[0, 1, 9].abs() > 2 * largest).any()
        # A mean far from zero, as here, costs digits: sums in float32 are off by up to 1e-6 of its products.
        differing(ours, theirs, exact, offset=0.5)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("tokens", "heads", "dim", "chunk", "sink"), [(640, 3, 64, 8, 1), (192, 2, 96, 1, 8),
                                                                          (256, 1, 128, 64, 1)])  # fmt: skip
    @pytest.mark.parametrize("count", [0, 3])
    def test_outliers(tokens: int, heads: int, dim: int, chunk: int, sink: int, count: int, dtype: torch.dtype) -> None:
        x = torch.randn(tokens, 2 * heads, dim, device=DEVICE).to(dtype)[:, heads:]
        got = outliers_triton.find_outliers(x, chunk, count, sink)
        wanted = outliers_reference.find_outliers(x, chunk, count, sink)
        assert got.shape == wanted.shape == (heads, count)
        assert got.dtype == torch.int64
        if chunk > 1:  # else every cosine is 1
            assert torch.equal(got.sort(1).values, wanted.sort(1).values)
        elif count:
            assert (got >= sink).all()
            assert (got.sort(1).values.diff(dim=1) > 0).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "dim", "chunk"), [(2, 128, 8), (3, 64, 1), (1, 96, 16)])
    @pytest.mark.parametrize("across_bus", [False, True])
    def test_rows_are_copied(heads: int, dim: int, chunk: int, across_bus: bool, dtype: torch.dtype) -> None:
        x, pages = pages_of(heads, dim, dtype), page_ids()
        got, wanted = (arena(heads, 64 // chunk, chunk, dim, dtype=dtype) for _ in range(2))
        write_triton.write_rows(x, got, pages, across_bus)
        write_reference.write_rows(x, wanted, pages, across_bus)
        assert torch.equal(got, wanted)

    @pytest.mark.parametrize("size", [64, 48, 24, 20])
    @pytest.mark.parametrize("first", [0, 8, 4])
    def test_rows_of_bytes_are_copied(size: int, first: int) -> None:
        x = torch.randint(256, (*pages_of(2, size, torch.float32).shape[:-1], 80), dtype=torch.uint8, device=DEVICE)
        x, pages = x[..., first : first + size], page_ids()
        got, wanted = (arena(2, 8, 8, size, dtype=torch.uint8) for _ in range(2))
        write_triton.write_rows(x, got, pages, True)
        write_reference.write_rows(x, wanted, pages, True)
        assert torch.equal(got, wanted)

    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    def test_captured_in_a_graph() -> None:
        x, rotation = pages_of(2, 128, torch.bfloat16), random_rotation(128, "values").to(DEVICE)
        codes, scale = arena(2, 8, 8, 64, dtype=torch.uint8), arena(2, 64, 1, dtype=torch.float16)
        pages = page_ids()
        coded = x, ROTATED_ROWS[4], rotation, (), codes, pages, scale, pages
        rows_triton.quantize_rows(*coded)
        wanted = codes.clone(), scale.clone()
        codes.fill_(77)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows_triton.quantize_rows(*coded)
        scale.fill_(77)
        graph.replay()
        assert torch.equal(codes, wanted[0])
        assert torch.equal(scale, wanted[1])

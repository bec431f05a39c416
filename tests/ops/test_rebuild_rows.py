"""Rows of compressed pages in Triton against the reference: on a GPU, or on the CPU through Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from devices import DEVICE, ON_GPU, TRITON_RUNS

from shadowkv.baselines.shard import MixedLatents
from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.codecs.latents import DenseLatents, Int4Latents, Int8Latents
from shadowkv.kvcache.codecs.rotated import ROTATED_ROWS
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows, LatentKeys
from shadowkv.ops.codec import LatentCodec
from shadowkv.ops.rebuild_rows import reference
from shadowkv.ops.rotations import random_rotation

pytest.importorskip("triton")


if TRITON_RUNS:
    from precision import assert_close_like_lowp

    from shadowkv.ops.rebuild_rows import triton

    DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
    PAGES, FIRST, NAMES = (40, 3, 90) if ON_GPU else (3, 1, 7)

    def arena(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, *shape], a granule apart, of NaN bytes."""
        size = torch.Size(shape).numel()
        row = -(-size * dtype.itemsize // 256) * 256 // dtype.itemsize
        flat = torch.full((NAMES * row * dtype.itemsize,), 255, dtype=torch.uint8, device=DEVICE).view(dtype)
        return flat.as_strided((NAMES, *shape), (row, *torch.empty(shape, device="meta").stride()))

    def skip_what_compiles_for_long(dim: int, dtype: torch.dtype) -> None:
        if ON_GPU and dtype == torch.float32 and dim > 64:
            pytest.skip("products in float32 compile for seconds; 64 dimensions show the same")

    def page_ids() -> torch.Tensor:
        return torch.randperm(NAMES, device=DEVICE)[:PAGES].repeat_interleave(3)[None, ::3]  # not dense

    def rebuilt(source: DenseRows | LatentKeys | CodedRows, heads: int, dim: int, dtype: torch.dtype, bus: bool):
        """The rows that the kernel writes to the start of a longer buffer. The rest must stay as it was."""
        rows = (PAGES - FIRST) * 64
        buffer = torch.full((heads, rows + 1, dim), float("nan"), dtype=dtype, device=DEVICE)
        triton.rebuild_rows(source, FIRST, buffer[:, :rows], bus)
        assert buffer[:, rows:].isnan().all()
        return buffer[:, :rows]

    def expected(source: DenseRows | LatentKeys | CodedRows, out: torch.Tensor, dtype: torch.dtype):
        wanted = torch.empty_like(out, dtype=dtype)
        reference.rebuild_rows(source, FIRST, wanted, False)
        return wanted

    def check(out: torch.Tensor, exact: torch.Tensor, low: torch.Tensor, atol: float = 1e-5) -> None:
        """Compares with the reference in float32. Rows in 16 bits must be about as near as the reference's, ``low``."""
        if out.dtype == torch.float32:
            torch.testing.assert_close(out, exact, atol=atol, rtol=atol)
        else:
            assert_close_like_lowp(out, exact.double(), low)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bus", [False, True])
    @pytest.mark.parametrize(("heads", "dim", "chunk"), [(2, 128, 8), (3, 64, 1), (1, 96, 64), (1, 256, 4)])
    def test_dense_rows_are_copied(heads: int, dim: int, chunk: int, bus: bool, dtype: torch.dtype) -> None:
        pages, rows = page_ids(), arena(heads, 64 // chunk, chunk, dim, dtype=dtype)
        rows[pages[0]] = torch.randn(PAGES, *rows.shape[1:], device=DEVICE).to(dtype)
        source = DenseRows(rows, pages)
        out = rebuilt(source, heads, dim, dtype, bus)
        assert torch.equal(out, expected(source, out, dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bus", [False, True])
    @pytest.mark.parametrize(
        ("heads", "dim", "bits", "chunk"),
        [(2, 128, 4, 8), (3, 64, 4, 1), (1, 96, 4, 16), (3, 64, 2, 8), (1, 128, 3, 4), (1, 64, 3, 64), (1, 16, 4, 8)],
    )
    def test_quantized_rows(heads: int, dim: int, bits: int, chunk: int, bus: bool, dtype: torch.dtype) -> None:
        skip_what_compiles_for_long(dim, dtype)
        pages, scale_pages, rotation = page_ids(), page_ids(), random_rotation(dim, "values").to(DEVICE)
        codes = arena(heads, 64 // chunk, chunk, dim * bits // 8, dtype=torch.uint8)
        scale = arena(heads, 64, 1, dtype=torch.float16)
        codec = ROTATED_ROWS[bits]
        made, steps = codec.encode(torch.randn(PAGES, heads, 64, dim, device=DEVICE), rotation)
        codes[pages[0]], scale[scale_pages[0]] = made.view(PAGES, *codes.shape[1:]), steps
        source = CodedRows(codes, scale, codec, dim, rotation, pages, scale_pages)
        out = rebuilt(source, heads, dim, dtype, bus)
        exact = expected(source, out, torch.float32)
        check(out, exact, exact.to(dtype))

    PLAIN = RopeConfig(64, theta=500000.0)
    PART = RopeConfig(96, rotary_dim=32, interleaved=True)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("name", "heads", "dim", "chunk", "rope"),
        [("lloyd-4bit", 2, 128, 8, None), ("lloyd-4bit", 1, 96, 16, PART), ("lloyd-3bit", 3, 64, 1, PLAIN),
         ("lloyd-3bit", 1, 128, 8, None), ("lloyd-8bit", 1, 64, 8, PLAIN), ("lloyd-2bit", 1, 96, 64, None),
         ("rotated-3bit", 2, 64, 8, replace(PLAIN, scaling="yarn", factor=4.0, original_max_position=2048)),
         ("fp8", 2, 128, 8, None), ("fp8", 1, 96, 1, PART), ("fp8", 1, 256, 64, None)],
        ids=str,
    )  # fmt: skip
    def test_coded_rows(
        name: str, heads: int, dim: int, chunk: int, rope: RopeConfig | None, dtype: torch.dtype
    ) -> None:
        skip_what_compiles_for_long(dim, dtype)
        codec, pages = ROW_CODECS[name], page_ids()
        rotation = random_rotation(dim, "keys").to(DEVICE) if codec.rotated else None
        rows, states = torch.randn(PAGES, heads, 64, dim, device=DEVICE), torch.tensor([4], device=DEVICE)
        rows[FIRST, 0, 9:18] *= torch.logspace(-4, 0, 9, device=DEVICE)[:, None]
        rows[FIRST, 0, 5] = torch.nan
        state = tuple(
            torch.full((9, heads, *shape), torch.nan, device=DEVICE) for shape in codec.state_shapes(dim).values()
        )
        for x in state:
            x[4] = (1 + torch.rand_like(x[4])) / 128
        coded, sizes = codec.encode(rows, rotation, tuple(x[4].unsqueeze(1) for x in state))
        codes = arena(heads, 64 // chunk, chunk, codec.row_bytes(dim), dtype=torch.uint8)
        scale = arena(heads, 64, codec.scales(dim), dtype=torch.float16) if codec.scales(dim) else sizes
        codes[pages[0]] = coded.view(PAGES, *codes.shape[1:])
        scale_pages = page_ids() if codec.scales(dim) else None
        if scale_pages is not None:
            scale[scale_pages[0]] = sizes
        source = CodedRows(codes, scale, codec, dim, rotation, pages, scale_pages, state, states)
        if rope is not None:
            mean = torch.full((9, heads, dim), torch.nan, device=DEVICE)
            mean[4] = torch.randn(heads, dim, device=DEVICE)
            rotary, first = RotaryTables(rope, PAGES * 64 + 128, DEVICE), torch.tensor([128], device=DEVICE)
            source = CentredKeys(**vars(source), mean=mean, first=first, rotary=rotary)
        out = rebuilt(source, heads, dim, dtype, False)
        exact = expected(source, out, torch.float32)
        nan = exact.isnan()
        assert nan.any(-1).nonzero().tolist() == [[0, 5]]
        assert torch.equal(out.isnan(), nan)
        exact = exact.masked_fill(nan, 0)
        check(out.masked_fill(nan, 0), exact, exact.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "codec", [DenseLatents(), Int8Latents(), Int4Latents(), MixedLatents()], ids=lambda x: x.name
    )
    @pytest.mark.parametrize(
        ("heads", "dim", "rank", "chunk", "rotary_dim", "interleaved"),
        [(2, 64, 40, 8, 64, False), (3, 96, 160, 1, 96, False), (2, 128, 33, 8, 64, True), (1, 16, 7, 64, 16, True)],
    )
    def test_keys_of_latents(
        heads: int, dim: int, rank: int, chunk: int, rotary_dim: int, interleaved: bool,
        codec: LatentCodec, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        skip_what_compiles_for_long(dim, dtype)
        config = RopeConfig(dim, rotary_dim=rotary_dim, interleaved=interleaved)
        pages, states = page_ids(), torch.tensor([4], device=DEVICE)
        rank, quantized = rank - rank % codec.rank_multiple, codec.largest is not None
        width, stored = codec.field(rank, dtype)
        latents = arena(64 // chunk, chunk, width, dtype=stored)
        largest = codec.largest_codes(rank, DEVICE) if quantized else 127
        codes = largest / 4 * torch.randn(PAGES, 64 // chunk, chunk, rank, device=DEVICE)
        pairs = torch.tensor([[8, 0], [6, 2], [4, 4]], dtype=torch.uint8, device=DEVICE)
        widths = pairs[torch.randint(3, (9, rank // 2), device=DEVICE)].flatten(1) if codec.bits else None
        latents[pages[0]] = (codec.encode(codes) if widths is None else codec.encode(codes, widths[4])).to(stored)
        # States are apart from each other.
        basis = torch.full((9, rank + 1, heads, dim), float("nan"), dtype=dtype, device=DEVICE)[:, :rank]
        basis[4] = torch.randn(rank, heads, dim, device=DEVICE) * 0.01
        mean = torch.full((9, heads, dim), float("nan"), dtype=dtype, device=DEVICE)
        mean[4] = torch.randn(heads, dim, device=DEVICE)
        rotary, first = RotaryTables(config, PAGES * 64 + 128, DEVICE), torch.tensor([128], device=DEVICE)
        source = LatentKeys(latents, codec, basis, mean if quantized else None, states, pages, first, rotary, widths)
        out = rebuilt(source, heads, dim, dtype, False)
        wide = latents if quantized else latents.float()
        fine = replace(source, latents=wide, basis=basis.float(), mean=mean.float() if quantized else None)
        check(out, expected(fine, out, torch.float32), expected(source, out, dtype), atol=2e-5)

    SEGMENTS = (2, 1, 3)
    """Pages of each of three segments in one table; one more page is not needed."""

    def table() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page ids [1, 7], and the segment of each, -1 for the last. The states of the segments, and the positions that
        the table's first page would have in each."""
        counts = torch.tensor(SEGMENTS, device=DEVICE)
        begun = counts.cumsum(0) - counts
        segment = torch.cat((torch.arange(3, device=DEVICE).repeat_interleave(counts), counts.new_tensor([-1])))
        first = torch.tensor([0, 256, 128], device=DEVICE)
        return torch.randperm(NAMES, device=DEVICE)[None, :7], segment, counts.new_tensor([4, 0, 7]), first - 64 * begun

    def check_segments(source: DenseRows | LatentKeys | CodedRows, segment: torch.Tensor, heads: int, dim: int) -> None:
        """All pages in one call, by both backends, against a call of the reference for each segment."""
        out, same = (torch.full((heads, 7 * 64, dim), float("nan"), device=DEVICE) for _ in range(2))
        triton.rebuild_rows(source, 0, out, False, segment)
        reference.rebuild_rows(source, 0, same, False, segment)
        assert out[:, 6 * 64 :].isnan().all(), "a page that is not needed is not written"
        start = 0
        for number, pages in enumerate(SEGMENTS):
            own = {"pages": source.pages[:, start : start + pages]}
            if getattr(source, "states", None) is not None:
                own["states"] = source.states[number, None]
            if isinstance(source, LatentKeys | CentredKeys):
                own["first"] = source.first[number, None] + 64 * start
            tokens, wanted = slice(64 * start, 64 * (start + pages)), out.new_empty(heads, 64 * pages, dim)
            reference.rebuild_rows(replace(source, **own), 0, wanted, False)
            for got in (out, same):
                torch.testing.assert_close(got[:, tokens], wanted, atol=2e-5, rtol=2e-5)
            start += pages

    def test_dense_rows_of_several_segments() -> None:
        (pages, segment, *_), rows = table(), arena(2, 8, 8, 64, dtype=torch.float32)
        rows[pages[0, :6]] = torch.randn(6, *rows.shape[1:], device=DEVICE)
        check_segments(DenseRows(rows, pages), segment, 2, 64)

    @pytest.mark.parametrize("name", ["lloyd-3bit", "fp8"])
    def test_coded_rows_of_several_segments(name: str) -> None:
        codec, (pages, segment, states, first) = ROW_CODECS[name], table()
        rotation = random_rotation(64, "keys").to(DEVICE) if codec.rotated else None
        state = tuple(torch.full((9, 2, *shape), torch.nan, device=DEVICE) for shape in codec.state_shapes(64).values())
        for x in state:
            x[states] = (1 + torch.rand_like(x[states])) / 128
        of_pages = tuple(x[states[segment[:6]]].unsqueeze(2) for x in state)
        coded, sizes = codec.encode(torch.randn(6, 2, 64, 64, device=DEVICE), rotation, of_pages)
        codes, scale = arena(2, 8, 8, codec.row_bytes(64), dtype=torch.uint8), sizes
        codes[pages[0, :6]] = coded.view(6, *codes.shape[1:])
        if codec.scales(64):
            scale = arena(2, 64, codec.scales(64), dtype=torch.float16)
            scale[pages[0, :6]] = sizes
        mean = torch.full((9, 2, 64), torch.nan, device=DEVICE)
        mean[states] = torch.randn(3, 2, 64, device=DEVICE)
        source = CodedRows(codes, scale, codec, 64, rotation, pages, None, state, states)
        check_segments(source, segment, 2, 64)
        rotary = RotaryTables(PLAIN, 512, DEVICE)
        check_segments(CentredKeys(**vars(source), mean=mean, first=first, rotary=rotary), segment, 2, 64)

    @pytest.mark.parametrize("codec", [DenseLatents(), Int4Latents(), MixedLatents()], ids=lambda x: x.name)
    def test_latents_of_several_segments(codec: LatentCodec) -> None:
        (pages, segment, states, first), rank = table(), 40
        width, stored = codec.field(rank, torch.float32)
        largest = codec.largest_codes(rank, DEVICE) if codec.largest is not None else 127
        codes = largest / 4 * torch.randn(6, 8, 8, rank, device=DEVICE)
        pairs = torch.tensor([[8, 0], [6, 2], [4, 4]], dtype=torch.uint8, device=DEVICE)
        widths = pairs[torch.randint(3, (9, rank // 2), device=DEVICE)].flatten(1) if codec.bits else None
        latents = arena(8, 8, width, dtype=stored)
        for page, number in enumerate(segment[:6].tolist()):
            own = () if widths is None else (widths[states[number]],)
            latents[pages[0, page]] = codec.encode(codes[page], *own).to(stored)
        basis, mean = (torch.full((9, *shape, 2, 64), torch.nan, device=DEVICE) for shape in ((rank,), ()))
        basis[states] = torch.randn(3, rank, 2, 64, device=DEVICE) * 0.01
        mean[states] = torch.randn(3, 2, 64, device=DEVICE)
        rotary = RotaryTables(PLAIN, 512, DEVICE)
        check_segments(LatentKeys(latents, codec, basis, mean, states, pages, first, rotary, widths), segment, 2, 64)

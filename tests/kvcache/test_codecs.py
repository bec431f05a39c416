"""Formats that are defined only here become policies by their names; and what formats promise."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from driver import DEVICE, ROPE, SHAPE, Stream, decode, decode_part, make_cache, plain_attention, prefill
from torch import Tensor

from shadowkv.kvcache.codecs import LATENT_CODECS, ROW_CODECS, register, with_names
from shadowkv.kvcache.codecs.latents import Int4Latents
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts import AXES, build_parts, resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import CodedRows, LatentKeys
from shadowkv.ops.codec import LatentCodec, RowCodec
from shadowkv.ops.registry import Ops


def test_reasons_of_backends_name_codecs() -> None:
    told = with_names("no kernel for keys in codec 12 with values in codec 0; codec 999 of keys is unknown")
    assert told == "no kernel for keys in codec fp8 with values in codec dense; codec 999 of keys is unknown"


class CentredBytes(RowCodec):
    """Every bit of a row without its head's mean, rotated, in units of the largest entry of each four."""

    id, name, scale_dtype, row_multiple, rotated = 1000, "centred-bytes", torch.float32, 4, True

    def row_bytes(self, dim: int) -> int:
        return 4 * dim

    def scales(self, dim: int) -> int:
        return dim // 4

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"mean": (dim,)}

    def fit(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows.mean(0, dtype=torch.float32),)

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        assert rotation is not None
        units = ((rows.float() - state[0]) @ rotation).unflatten(-1, (-1, 4))
        scale = units.abs().amax(-1)
        return (units / scale.unsqueeze(-1)).flatten(-2).contiguous().view(torch.uint8), scale

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        assert rotation is not None
        units = codes.contiguous().view(torch.float32).unflatten(-1, (-1, 4)) * scale.unsqueeze(-1)
        return units.flatten(-2) @ rotation.T + state[0]


class Int8Rows(RowCodec):
    """Rows in steps of a 127th of their largest entry: coding what was decoded changes nothing more."""

    id, name, scale_dtype = 1001, "int8-rows", torch.float32

    def row_bytes(self, dim: int) -> int:
        return dim

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        scale = rows.float().abs().amax(-1, keepdim=True) / 127
        return (rows / scale).round().to(torch.int8).view(torch.uint8), scale

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        return codes.view(torch.int8).float() * scale


class ByteLatents(LatentCodec):
    """Every bit of a latent in float32."""

    id, name = 1002, "low-rank-bytes"

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return 4 * rank, torch.uint8

    def encode(self, latents: Tensor) -> Tensor:
        return latents.float().contiguous().view(torch.uint8)

    def decode(self, stored: Tensor, rank: int) -> Tensor:
        return stored.contiguous().view(torch.float32)


CODECS = (CentredBytes(), Int8Rows(), ByteLatents())


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    for codec in CODECS:
        register(codec)
    yield
    for codec in CODECS:
        (ROW_CODECS if isinstance(codec, RowCodec) else LATENT_CODECS).pop(codec.name)


def two_turns(cache: KVCache, streams: list[Stream], lengths: list[int]) -> None:
    """Prompts, enough steps to compress pages on the way, a second prompt and more steps."""
    prefill(cache, list(zip(streams, lengths)))
    for _ in range(70):
        decode(cache, streams)
    for stream in streams:
        cache.extend(stream.sequence, stream.length + 90, stream.length + 101)  # and one more
    prefill(cache, [(stream, 90) for stream in streams], block=170)
    for _ in range(10):
        decode(cache, streams)


def compressed_row(cache: KVCache, stream: Stream) -> CompressedBatch:
    """All compressed pages of a sequence of one segment."""
    row = decode_part(cache, [stream]).compressed
    assert row is not None
    return row


def rotated_keys(stream: Stream, layer: int) -> Tensor:
    """[S, H, d] of all tokens, as the cache rotates them."""
    tables, positions = RotaryTables(ROPE, stream.length, DEVICE), torch.arange(stream.length, device=DEVICE)
    return Ops(DEVICE).apply_rope(stream.k[layer, : stream.length], positions, tables)


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec(values="centred-bytes"),
        KVSpec(keys="centred-bytes"),
        KVSpec(keys="centred-bytes", index="chunk-mean", values="centred-bytes", budget=1.0, outliers=3),
        KVSpec(
            keys="low-rank-bytes",
            index="chunk-mean",
            values="centred-bytes",
            budget=1.0,
            settings={"rank": SHAPE.kv_dim},
        ),
        KVSpec(index="min-max", values="centred-bytes", place="host", budget=1.0, chunk=4, outliers=2),
        KVSpec(keys="low-rank-bytes", index="sketch", values="int8-rows", budget=1.0, settings={"rank": SHAPE.kv_dim}),
    ],
    ids=lambda spec: f"{spec.keys}, {spec.index}, {spec.values}, {spec.place}",
)
def test_formats_defined_here_equal_plain_attention_where_nothing_is_lost(spec: KVSpec) -> None:
    cache, lengths = make_cache(spec), [1, 417, 1000]
    attends = "attend_selected" if spec.selects else "attend_coded"
    assert cache.ops.backends[attends] == cache.ops.backends["rebuild_rows"] == "reference"
    streams = [Stream(seed, cache.allocate(n, n + 200)) for seed, n in enumerate(lengths)]
    if spec.values == "int8-rows":
        for stream in streams:
            stream.v = Int8Rows().decode(*Int8Rows().encode(stream.v, None), None, SHAPE.head_dim)
    two_turns(cache, streams, lengths)
    assert (cache.groups[0].pool.tables.compressed > 0).any(), "nothing was compressed: the test would show nothing"
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("keys", ["centred-bytes", "low-rank-bytes"])
def test_tokens_that_learn_for_themselves_are_decoded_by_what_they_learned(keys: str) -> None:
    rank = SHAPE.kv_dim if keys.startswith("low-rank") else None
    cache = make_cache(
        KVSpec(keys=keys, index="chunk-mean", values="centred-bytes", budget=1.0, settings={"rank": rank})
    )
    stream = Stream(3, cache.allocate(400, 2100))
    stream.v[:, 400:] += 3
    prefill(cache, [(stream, 400)])
    cache.extend(stream.sequence, 2000, 2100)
    prefill(cache, [(stream, 1600)])
    for _ in range(80):
        decode(cache, [stream])
    learned = [cache.groups[0].store.state["value_mean"][0, segment.state].mean() for segment in stream.sequence.path]
    assert learned[1] - learned[0] > 2
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("axis", ["keys", "values"])
def test_what_a_codec_learns_is_of_its_sequence_and_head(axis: str) -> None:
    cache, lengths = make_cache(replace(KVSpec(budget=64, index="chunk-mean"), **{axis: "centred-bytes"})), [700, 900]
    streams = [Stream(seed, cache.allocate(n, n + 200)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)))
    learned = cache.groups[0].store.state[f"{axis[:-1]}_mean"]
    for layer in range(SHAPE.num_layers):
        for stream in streams:
            rows = rotated_keys(stream, layer) if axis == "keys" else stream.v[layer, : stream.length]
            state = compressed_row(cache, stream).states
            torch.testing.assert_close(learned[layer, state[0]], rows.mean(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["int8-rows", "rotated-4bit"])
def test_compressed_rows_are_what_their_codec_decodes(name: str) -> None:
    cache = make_cache(KVSpec(keys=name, values=name, budget=64, index="chunk-mean"))
    stream = Stream(0, cache.allocate(700, 900))
    two_turns(cache, [stream], [700])
    row, codec = compressed_row(cache, stream), ROW_CODECS[name]
    tokens = int(row.num_pages) * PAGE
    every = torch.arange(int(row.num_chunks), device=DEVICE).expand(1, SHAPE.num_kv_heads, -1)
    for layer in range(SHAPE.num_layers):
        for axis, rows in (("keys", rotated_keys(stream, layer)), ("values", stream.v[layer])):
            source = getattr(cache.parts, axis).source(cache.groups[0].store, layer, row)
            rotation = cache.groups[0].store.rotation(axis) if codec.rotated else None
            expected = codec.decode(*codec.encode(rows[:tokens], rotation), rotation, SHAPE.head_dim)
            off = gather_selected(source, every)[0].transpose(0, 1) - expected
            # Another order of sums moves a scale by its last bit at most, or an entry at a bin's end to the next bin.
            elsewhere = off.norm(dim=-1) > 2**-9 * expected.norm(dim=-1)
            if rotation is None:
                assert not elsewhere.any()
                continue
            rotated = rows[:tokens][elsewhere].double() @ rotation.double()
            step = codec.step * rotated.norm(dim=-1, keepdim=True) / SHAPE.head_dim**0.5
            assert ((rotated / step - (rotated / step).round()).abs().amin(-1) < 1e-3).all()
            assert (off[elsewhere].norm(dim=-1, keepdim=True) < 1.5 * step).all()
            assert elsewhere.float().mean() < 5e-3


def test_a_name_or_an_id_that_is_taken_is_refused() -> None:
    for name, id in (("rotated-4bit", 1234), ("low-rank", 1234), ("new", 2), ("new", 1000)):
        codec = Int8Rows()
        codec.name, codec.id = name, id
        with pytest.raises(ValueError, match="is taken by" if id >= 1000 else "ids below 1000 are for shadowkv's own"):
            register(codec)
    assert "new" not in AXES["values"]


def test_a_backend_that_does_not_know_a_format_is_refused_by_name() -> None:
    case = make_cache(
        KVSpec(keys="low-rank-bytes", index="chunk-mean", values="int8-rows", settings={"rank": 8})
    ).ops.case
    backend, reason = {
        "cpu": ("cpu", "codec 1002 of keys is unknown; codec 1001 of values is unknown"),
        "cuda": ("cuda", "no kernel for keys in codec 1002 with values in codec 1001"),
    }[DEVICE]
    with pytest.raises(ValueError, match=reason):
        Ops(DEVICE, case, {"attend_selected": backend})


def test_triton_kernels_refuse_a_format_that_they_do_not_know() -> None:
    pytest.importorskip("triton")
    from shadowkv.ops.project_latents.triton import project_latents
    from shadowkv.ops.quantize_rows.triton import quantize_rows
    from shadowkv.ops.rebuild_rows.triton import rebuild_rows

    x, codes = torch.zeros(1, 1, 64, 2, 16), torch.zeros(1, 1, 2, 8, 8, 16, dtype=torch.uint8)
    pages = torch.zeros(1, dtype=torch.int64)
    scale, basis, out = torch.zeros(1, 1, 2, 64, 1), torch.zeros(1, 1, 4, 2, 16), torch.zeros(2, 64, 16)
    with pytest.raises(ValueError, match=r"'int8-rows' \(1001\)"):
        quantize_rows(x, Int8Rows(), None, (), codes, pages, scale, pages)
    with pytest.raises(ValueError, match=r"'int8-rows' \(1001\)"):
        rebuild_rows(CodedRows(codes[0], scale[0], Int8Rows(), 16, None, pages[None]), 0, out, False)
    latents, rotary = torch.zeros(1, 1, 8, 8, 16, dtype=torch.uint8), RotaryTables(ROPE, 64)
    with pytest.raises(ValueError, match=r"'low-rank-bytes' \(1002\)"):
        project_latents(x, ByteLatents(), basis, None, None, pages, latents, pages)
    with pytest.raises(ValueError, match=r"'low-rank-bytes' \(1002\)"):
        keys = LatentKeys(latents[0], ByteLatents(), basis[0], None, pages, pages[None], pages, rotary)
        rebuild_rows(keys, 0, out, False)


def test_weak_latents_lie_two_to_a_byte_behind_the_strong_ones() -> None:
    codec, latents = Int4Latents(2), torch.tensor([[-200.0, 99.6, -9.0, -7.0, -0.4, 3.6, 7.4, 100.0]])
    stored = codec.encode(latents)
    assert stored.tolist() == [[1, 228, 1 | 1 << 4, 8 | 12 << 4, 15 | 15 << 4]]
    assert codec.decode(stored, 8).tolist() == [[-127, 100, -7, -7, 0, 4, 7, 7]]
    every = torch.arange(-7, 8).repeat_interleave(15), torch.arange(-7, 8).repeat(15)
    both = torch.stack(every, dim=-1).float()
    assert torch.equal(Int4Latents(0).decode(Int4Latents(0).encode(both), 2).float(), both)
    bytes_of_all = torch.arange(-127, 128).float()[:, None]
    assert torch.equal(Int4Latents().decode(Int4Latents().encode(bytes_of_all), 1).float(), bytes_of_all)


def test_weak_latents_take_half_a_byte_each() -> None:
    model = ModelShape(2, 2, 2, 64)
    fields = [
        build_parts(resolve(preset(f"turbo:keys=low-rank-int{bits},rank={rank}"), model), model, torch.bfloat16).keys
        for bits, rank in ((8, 40), (4, 40), (4, 16))
    ]
    assert [part.bytes_per_token() for part in fields] == [40, 32 + 4, 16]


def test_the_strongest_of_every_group_of_heads_have_a_byte() -> None:
    codec = LATENT_CODECS["low-rank-int4"].of_groups([64, 40, 8])
    assert codec.largest_codes(112, torch.device("cpu")).tolist() == [127] * 72 + [7] * 40
    assert codec.field(112, torch.bfloat16) == (72 + 20, torch.uint8)
    with pytest.raises(ValueError, match="needs a rank that is a multiple of 2, not 15"):
        resolve(preset("turbo:keys=low-rank-int4,rank=15"), SHAPE)

"""Policies that keep rows in the formats of codecs: what is attended is what was decoded, and what pages take."""

from __future__ import annotations

from dataclasses import replace

import driver
import pytest
import torch
from coded_rows import gaussian_rows, losses
from driver import DEVICE, SHAPE, Stream, compressed_batch, decode, make_cache, plain_attention, prefill
from torch import Tensor

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.memory.compressed import CompressedStore
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.parts.rows import CodedKeys
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import CACHE_DTYPES, preset
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected.reference import attend_selected, gather_selected
from shadowkv.ops.attend_selected.sources import CodedRows
from shadowkv.ops.case import Case
from shadowkv.ops.codec import LANES, CodecId, RowCodec
from shadowkv.ops.extension import cpu_missing
from shadowkv.ops.registry import Ops

CODECS = dict(ROW_CODECS)
NEW = [name for name in CODECS if not name.startswith("rotated")]
MIXED = ["turboquant_k8v4", "turboquant_k3v4_nc"]
LLAMA_70B = ModelShape(num_layers=80, num_query_heads=64, num_kv_heads=8, head_dim=128)


def spec_of(name: str, other: str, place: str = "device") -> KVSpec:
    """Keys and values in the format ``name``, where it is one of theirs, or else in the ``other``; or vLLM's policy of
    that name."""
    if name in MIXED:
        return preset(CACHE_DTYPES[name])
    keys, values = (name if axis in CODECS[name].axes else other for axis in ("keys", "values"))
    return KVSpec(keys=keys, values=values, place=place)


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SHAPE", replace(SHAPE, head_dim=64))
    monkeypatch.setattr(driver, "ROPE", RopeConfig(64))


def coded(axis: str, codec: RowCodec, rows: Tensor, pages: Tensor) -> CodedRows:
    """Rows [N, H, 64, d], one page after another, as ``axis`` keeps them."""
    dim = rows.shape[-1]
    rotation = codec.rotation_matrix(dim, axis) if codec.rotated else None
    state = tuple(torch.stack([x]) for x in codec.fit(rows.transpose(1, 2).flatten(0, 1)))
    of_pages = tuple(x.unsqueeze(2) for x in state)  # [1, H, 1, ...]
    codes, scale = codec.for_axis(axis).encode(rows, rotation, of_pages)
    states = torch.zeros(len(pages), dtype=torch.int64)
    return CodedRows(codes.unflatten(2, (8, 8)), scale, codec, dim, rotation, pages, None, state, states)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec.tile == 1])
def test_attention_on_codes_is_that_on_decoded_rows(name: str, dim: int) -> None:
    """Rotated queries, and outputs rotated back, too, where rows are coded after a rotation."""
    torch.manual_seed(0)
    codec, pages = CODECS[name], torch.tensor([[0, 1, 2], [3, 1, 0]])
    k, v, q = torch.randn(4, 2, 64, dim), torch.randn(4, 2, 64, dim), torch.randn(2, 6, dim)
    selected = torch.tensor([0, 3, 7, 8, 20, -1]).expand(2, 2, -1).clone()
    selected[1, 1, 2:] = -1
    keys, values = coded("keys", codec, k, pages), coded("values", codec, v, pages)
    out, lse = attend_selected(q, keys, values, selected)

    def attended(still_rotated: bool) -> tuple[Tensor, Tensor]:
        sources = [replace(x, rotation=None if still_rotated else x.rotation) for x in (keys, values)]
        (rows, weighed), asked = (gather_selected(x, selected) for x in sources), q
        if still_rotated and keys.rotation is not None:
            asked = q @ keys.rotation
        scores = asked.unflatten(1, (2, 3)) @ rows.transpose(-1, -2) / dim**0.5
        scores = scores.masked_fill((selected < 0).repeat_interleave(8, -1).unsqueeze(2), -torch.inf)
        found = (scores.softmax(-1) @ weighed).flatten(1, 2)
        if still_rotated and values.rotation is not None:
            found = found @ values.rotation.T
        return found, scores.logsumexp(-1).flatten(1, 2)

    for still_rotated in (False, True):
        wanted, of_scores = attended(still_rotated)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, of_scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "device") for name in NEW + MIXED),
        *((name, "host") for name in ("lloyd-3bit", "tq3_0", "fp8", "vq-4x256")),
    ],
)
def test_a_step_attends_to_what_was_coded(name: str, place: str) -> None:
    cache = make_cache(spec_of(name, "lloyd-4bit", place))
    stream = Stream(0, cache.allocate(300, 400))
    prefill(cache, [(stream, 300)])
    while stream.length % 64 != 36:  # a page was compressed on the way, and none will be in the next step
        decode(cache, [stream])
    batch, n = compressed_batch(cache, [stream]), stream.length
    decode(cache, [stream])
    compressed = int(batch.num_chunks[0]) * 8
    assert compressed == 320
    every = torch.arange(compressed // 8, device=DEVICE).expand(1, 2, -1)
    tables, positions = RotaryTables(driver.ROPE, n + 1, DEVICE), torch.arange(n + 1, device=DEVICE)
    for layer in range(SHAPE.num_layers):
        q, k = (cache.ops.apply_rope(x[layer, : n + 1], positions, tables) for x in (stream.q, stream.k))
        v = stream.v[layer, : n + 1].clone()
        for axis, rows in (("keys", k), ("values", v)):
            decoded = gather_selected(getattr(cache.parts, axis).source(cache.groups[0].store, layer, batch), every)[0]
            error = (decoded.transpose(0, 1) - rows[:compressed]).norm() / rows[:compressed].norm()
            assert 0 < error**2 < 0.25, "these are other rows"
            rows[8:compressed] = decoded[:, 8:].transpose(0, 1)  # the sink stays exact
        scores = torch.einsum("hgd,nhd->hgn", q[n].unflatten(0, (2, 3)), k) / 64**0.5
        wanted = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten(0, 1)
        torch.testing.assert_close(stream.outputs[-1][0, layer], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv", ["turboquant-4", "tq3_0", "fp8", "full:values=vq-4x256"])
def test_a_sequence_goes_on_in_another_cache_as_in_its_own(kv: str) -> None:
    cache, other = make_cache(preset(kv)), make_cache(preset(kv))
    stream = Stream(0, cache.allocate(300, 600))
    prefill(cache, [(stream, 300)])
    twin = stream.again()
    twin.sequence, twin.length = other.snapshots.load(cache.snapshots.export(stream.sequence), 600), 300
    for _ in range(70):
        decode(cache, [stream])
        decode(other, [twin])
    assert torch.equal(stream.output()[300:], twin.output())


def test_no_copy_of_a_prompt_is_made_where_nothing_is_learned_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, centred = [], CodedKeys._centred

    def watched(
        part: CodedKeys, store: CompressedStore, layers: slice, states: Tensor, rope_keys: Tensor, first: Tensor
    ) -> Tensor:
        seen.append(rope_keys.shape[2])
        return centred(part, store, layers, states, rope_keys, first)

    monkeypatch.setattr(CodedKeys, "_centred", watched)
    for name, longest in (("lloyd-4bit", 64), ("fp8", 300)):
        seen.clear()
        cache = make_cache(KVSpec(keys=name, settings={"centred": True}))
        prefill(cache, [(Stream(0, cache.allocate(300, 400)), 300)])
        assert max(seen) == longest


def test_more_bits_are_closer_to_plain_attention() -> None:
    error = {}
    for name in ("lloyd-8bit", "fp8", "lloyd-4bit", "lloyd-3bit", "lloyd-2bit"):
        cache = make_cache(KVSpec(keys=name, values=name))
        stream = Stream(0, cache.allocate(500, 520))
        stream.q = stream.q / 4  # softer, as attention to many tokens is
        prefill(cache, [(stream, 500)])
        for _ in range(5):
            decode(cache, [stream])
        wanted = plain_attention(stream)[500:]
        error[name] = ((stream.output()[500:] - wanted).norm() / wanted.norm()).item()
    assert list(error.values()) == sorted(error.values()), error
    assert error["lloyd-8bit"] < 0.02 and error["lloyd-4bit"] < 0.2


@pytest.mark.parametrize(
    ("name", "distortion"),
    [
        ("rotated-4bit", 0.0111),
        ("rotated-3bit", 0.0363),
        ("rotated-2bit", 0.117),
        ("fp8", 0.0007),
        ("vq-4x256", 0.0970),
    ],
)
def test_what_other_formats_lose(name: str, distortion: float) -> None:
    codec, rows = CODECS[name], gaussian_rows(3000, 128)
    found, _ = losses(codec, rows, codec.fit(rows[:, None]))
    assert found == pytest.approx(distortion, rel=0.02)


def page_bytes(spec: KVSpec, shape: ModelShape) -> dict[str, int]:
    spec = resolve(spec, shape)
    parts = build_parts(spec, shape, torch.bfloat16)
    return {field.name: field.nbytes for part in parts for field in part.page_fields()}


@pytest.mark.parametrize(
    ("name", "of_128", "of_64", "scale"),
    [
        ("lloyd-8bit", 128, 64, 2), ("lloyd-4bit", 64, 32, 2), ("lloyd-3bit", 48, 24, 2), ("lloyd-2bit", 32, 16, 2),
        ("polar-int4", 64, 32, 4), ("tq3_0", 56, 28, 0), ("tq35", 64, 36, 0), ("tq25", 44, 26, 0), ("fp8", 128, 64, 0),
    ],
)  # fmt: skip
def test_bytes_of_a_page(name: str, of_128: int, of_64: int, scale: int) -> None:
    for dim, row in ((128, of_128), (64, of_64)):
        shape = ModelShape(2, 16, 8, dim)
        scales = {f"{axis}_scale": 64 * 8 * scale for axis in ("key", "value") if scale}
        wanted = {"keys": 64 * 8 * row, "values": 64 * 8 * row, **scales}
        assert page_bytes(KVSpec(keys=name, values=name), shape) == wanted


def test_bytes_that_the_formats_promise() -> None:
    shape = ModelShape(32, 32, 8, 128)
    assert page_bytes(preset("full:values=vq-4x256"), shape)["values"] == 64 * 256
    values = build_parts(resolve(preset("full:values=vq-4x256"), shape), shape, torch.bfloat16).values
    assert {field.name: field.nbytes for field in values.state_fields()} == {
        "value_vq_largest": 8 * 128 * 4, "value_vq_codebook": 256 * 4 * 4,
    }  # fmt: skip
    per_token = sum(page_bytes(preset("tq3_0"), LLAMA_70B).values()) / 64
    assert 8192 * 80 * per_token == 560 * 2**20
    qwen = ModelShape(num_layers=40, num_query_heads=40, num_kv_heads=8, head_dim=128)
    assert sum(page_bytes(preset("polar-int4"), qwen).values()) / 64 == 1088


def test_the_scale_of_a_head_is_learned_from_its_prompt() -> None:
    cache = make_cache(preset("fp8"))
    stream = Stream(0, cache.allocate(300, 400))
    stream.v[:, :, 1] *= 100
    stream.v[:, 310] = 1e6
    prefill(cache, [(stream, 300)])
    largest = stream.v[:, :300].abs().amax((1, 3))
    state = stream.sequence.path[0].state
    torch.testing.assert_close(cache.groups[0].store.state["value_fp8_scale"][:, state, :, 0], largest / 448)
    while stream.length < 400:
        decode(cache, [stream])
    assert stream.output().isfinite().all()


def test_head_dims_that_do_not_suit_are_refused_by_axis() -> None:
    for spec, reason in (
        (preset("tq3_0"), "keys='tq3_0' needs a head dim that is a multiple of 32, not 80"),
        (KVSpec(values="lloyd-3bit"), "values='lloyd-3bit' needs a head dim that is a multiple of 64, not 80"),
        (KVSpec(values="vq-4x256"), "values='vq-4x256' needs a head dim that is a power of two from 4 on, not 80"),
        (KVSpec(keys="vq-4x256"), "keys='vq-4x256' has no meaning: the format is only for values"),
        (KVSpec(keys="tq25"), "keys='tq25' needs a head dim that is one of 64, 128, 256, not 80"),
    ):
        with pytest.raises(ValueError, match=reason):
            resolve(spec, ModelShape(2, 8, 2, 80))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NEW + MIXED)
def test_backends_that_do_not_know_a_format_leave_it_to_the_reference(name: str, device: str) -> None:
    shape, spec = ModelShape(2, 32, 8, 128), spec_of(name, "tq3_0")
    parts = build_parts(resolve(spec, shape), shape, torch.bfloat16)
    ops = frozenset(("attend_coded", "attend_selected", "quantize_rows", "rebuild_rows"))
    case = Case(
        ops, torch.bfloat16, 128, 32, 8, 128, key_codec=parts.keys.codec_id, value_codec=parts.values.codec_id,
        capability=(9, 0) if device == "cuda" else None, block_memory=232448,
    )  # fmt: skip
    chosen = Ops(device, case)
    known, codecs = set(), {parts.keys.codec_id, parts.values.codec_id}
    if device == "cpu" and codecs <= {*LANES} and not cpu_missing():
        known = {"attend_coded", "attend_selected"}
    elif device == "cuda" and codecs <= {*LANES, CodecId.FP8}:
        known = {"attend_coded", "quantize_rows", "rebuild_rows"}
    elif device == "cuda" and not codecs & {CodecId.TQ35, CodecId.TQ25}:
        known = {"attend_coded"}
    assert {op for op in ops if chosen.backends[op] != "reference"} == known

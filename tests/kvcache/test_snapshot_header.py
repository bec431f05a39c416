"""Headers of snapshots: what is written is read again, and nothing else is."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from driver import ROPE, SHAPE, Stream, cache_of, decode, make_cache, prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.kvcache.memory.arenas import Blocks, Field, OutOfBlocks
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.snapshots.dataclass_json import from_json, to_json
from shadowkv.kvcache.snapshots.header import Link, Snapshot, SnapshotHeader
from shadowkv.ops.apply_rope.tables import RopeConfig

SPECS = {
    "full": preset("full"),
    "turbo": preset("turbo", rank=16, budget=32, values="rotated-4bit"),
    "shadowkv": preset("shadowkv", rank=16, budget=32, outliers=3),
}

CACHES = [make_cache(spec) for spec in SPECS.values()]


def headers() -> list[SnapshotHeader]:
    """Headers of dense and compressed sequences with one and with several segments, from their start and from later."""
    found = []
    for cache in CACHES:
        for turns, steps in (((100,), 0), ((70, 900), 100), ((900, 700, 900), 3)):
            stream = Stream(0, cache.allocate(turns[0], 3500))
            for turn in turns:
                prefill(cache, [(stream, turn)])
                decode(cache, [stream])
            for _ in range(steps):
                decode(cache, [stream])
            points = {cache.fork_point(stream.sequence, n) for n in (0, 64, stream.length // 2, stream.length)}
            found += [
                cache.snapshots.describe(stream.sequence, start, stop)
                for start in sorted(points)
                for stop in (*sorted(points), None)
                if stop is None or start < stop
            ]
            cache.release(stream.sequence)
    return found


HEADERS = headers()
LONG = max(HEADERS, key=lambda header: (len(header.segments), len(header.fields)))


def test_there_are_headers_of_every_kind() -> None:
    assert {bool(one.start) for one in HEADERS} == {bool(one.segments) for one in HEADERS} == {False, True}
    assert any(one.observed for one in HEADERS) and len(LONG.segments) > 1 and LONG.tail_tokens
    assert any(one.segments and one.segments[0].continued and one.segments[0].num_pages for one in HEADERS)
    assert any(one.segments and not one.segments[-1].num_pages for one in HEADERS)


@pytest.mark.parametrize("header", HEADERS)
def test_what_is_written_is_read(header: SnapshotHeader) -> None:
    assert SnapshotHeader.from_plain(asdict(header)) == header
    assert from_json(SnapshotHeader, to_json(header).encode()) == header
    assert header.layer_bytes % 256 == 0 and all(field.offset % 16 == 0 for field in header.fields)
    assert header.nbytes == header.layer_bytes * SHAPE.num_layers


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value is in parsed JSON, including objects and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in leaves(one, (*path, key)))]


NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**80), 2**80),
    st.sampled_from([64, 128, 256, 2**31, 2**40, 2**62, 10**4000]),
)
ANYTHING = st.one_of(NUMBERS, st.none(), st.booleans(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


@settings(deadline=None, max_examples=400)
@given(header=st.sampled_from(HEADERS), data=st.data())
def test_whatever_is_changed_is_refused_or_can_be_restored(header: SnapshotHeader, data: st.DataObject) -> None:
    plain = json.loads(json.dumps(asdict(header)))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(leaves(plain)))
        if not path:
            continue
        place = plain
        for key in path[:-1]:
            place = place[key]
        what = data.draw(st.sampled_from(["set", "near", "drop", "twice"]))
        if what == "set":
            place[path[-1]] = data.draw(ANYTHING)
        elif what == "near" and type(place[path[-1]]) is int:
            place[path[-1]] += data.draw(st.sampled_from([-64, -16, -1, 1, 16, 64]))
        elif what == "drop":
            del place[path[-1]]
        elif isinstance(place, list):
            place.append(place[path[-1]])
        else:
            place["more"] = 1
    try:
        found = SnapshotHeader.from_plain(plain)
    except ValueError:
        return
    for cache in CACHES:
        try:
            sequence = cache.snapshots.restore([Link(found, found.length)], found.length, found.length).sequence
        except (ValueError, OutOfBlocks):
            pass
        else:
            nan = torch.full((found.num_layers, found.layer_bytes), 255, dtype=torch.uint8)
            cache.release(cache.snapshots.load(Snapshot(found, nan), found.length))
            cache.release(sequence)
        assert cache.free == cache.total


@settings(deadline=None, max_examples=100)
@given(text=st.one_of(st.binary(max_size=50), st.text(max_size=50)), cut=st.integers(0, 400))
def test_no_text_is_anything_but_refused(text: bytes | str, cut: int) -> None:
    for one in (text, to_json(LONG)[:cut]):
        with pytest.raises(ValueError):
            from_json(SnapshotHeader, one)


def test_texts_that_would_cost_are_refused() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, "1" * 5000, " " * 2**21):
        with pytest.raises(ValueError):
            from_json(SnapshotHeader, text)
    with pytest.raises(ValueError, match="a key occurs twice"):
        from_json(SnapshotHeader, to_json(LONG)[:-1] + ',"start":0}')


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"form": "g" * 64}, "is not 64 hexadecimal digits"),
        ({"start": 2**40}, "start 1099511627776 is not from 0 to"),
        ({"length": -1}, "length -1 is not from 0 to"),
        ({"length": 2**40}, "length 1099511627776 is not from 0 to"),
        ({"start": 32}, "start 32 is not a multiple of 64"),
        ({"tail_tokens": 1}, "tail_tokens 1 is not the number of tokens from"),
        ({"observed": True}, "only a dense sequence has an observed state"),
        ({"num_layers": 0}, "number of layers 0 is not from 1 to 4096"),
        ({"layer_bytes": 2**50}, "bytes of a layer 1125899906842624 is not from"),
        ({"fields": ()}, "there are no fields segments.0.pages., segments.0.static"),
    ],
)
def test_numbers_that_contradict_one_another_are_named(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"no header of a snapshot: .*{reason}"):
        replace(LONG, **changed)


@pytest.mark.parametrize(
    ("number", "changed", "reason"),
    [
        (0, {"continued": True}, "segment 0 from 0 on does not begin before 0"),
        (0, {"num_pages": 0}, "pages of a segment 0 is not from 1 to"),
        (0, {"num_pages": 10**9}, "pages of a segment 1000000000 is not from 1 to"),
        (0, {"end": 0}, "end of a segment 0 is not from 1 to"),
        (0, {"valid_until": 2**63}, "valid_until of a segment 9223372036854775808 is not from"),
        (0, {"fitted": 65}, "are no whole pages"),
        (0, {"fitted": 2**20}, "fitted pages of a segment 1048576 is not from 64 to"),
        (0, {"static_tokens": -1}, "static tokens -1 is not from 0 to"),
        (1, {"first": 64}, "first token of a segment 64 is not from"),
        (1, {"continued": True}, "segment 1 from .* on does not begin before 0"),
    ],
)
def test_segments_that_do_not_follow_are_named(number: int, changed: dict[str, Any], reason: str) -> None:
    header = max((one for one in HEADERS if not one.start), key=lambda one: len(one.segments))
    segments = list(header.segments)
    segments[number] = replace(segments[number], **changed)
    with pytest.raises(ValueError, match=reason):
        replace(header, segments=tuple(segments))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"name": LONG.fields[1].name}, "field .* occurs twice or does not belong to this snapshot"),
        ({"name": "segments.7.pages.latents"}, "occurs twice or does not belong to this snapshot"),
        ({"name": "segments.0.pages."}, "occurs twice or does not belong to this snapshot"),
        ({"dtype": "float31"}, "dtype 'float31' of .* is not one of float32,"),
        ({"shape": ()}, "axes of .* 0 is not from 1 to 8"),
        ({"shape": (2**31,) * 8}, "does not begin with"),
        ({"shape": (0, 1)}, "size of an axis of .* 0 is not from 1 to"),
        ({"offset": 16}, "offset of .* 16 is not from 0 to 0"),
    ],
    ids=str,
)
def test_fields_that_cannot_be_are_named(changed: dict[str, Any], reason: str) -> None:
    first, *others = LONG.fields
    with pytest.raises(ValueError, match=reason):
        replace(LONG, fields=(replace(first, **changed), *others))


@pytest.mark.parametrize("header", [one for one in HEADERS if one.length > one.start])
def test_cuts(header: SnapshotHeader) -> None:
    for stop in range(header.start - 2, header.length + 3):
        there = header.start < stop <= header.length
        if not there or (stop < header.exact and stop % 64):
            with pytest.raises(ValueError, match=f"cannot be cut at {stop}"):
                header.cut(stop)
            continue
        cut = header.cut(stop)
        compressed = cut.segments[-1].compressed(header.start) if cut.segments else header.start
        assert compressed + cut.tail_tokens == stop
        assert cut.observed == (header.observed and stop == header.length)
        for one, whole in zip(cut.segments, header.segments):
            assert (one.first, one.valid_until - one.end) == (whole.first, whole.valid_until - whole.end)


FORMS = {
    "turbo": "20c321054b9ccf35944af4b5a36a6ddcd52d17144e465e1ed4ff773fddecc3b6",
    "turbo:keys=low-rank-int8": "de6c5f5c6ecb57c3e8c8b8bd761e9746c68c67eca9c0ee2792e421c6fc7e0bed",
}
"""Forms of policies of rank 16, as long as their snapshots are read."""


def test_caches_say_what_they_store_alike() -> None:
    one = make_cache(SPECS["turbo"])
    other = cache_of(
        Layout(SPECS["turbo"], SHAPE, torch.float32, 500), RopeConfig(head_dim=16, theta=500.0), slots=2,
        memory=Blocks(device=9, host=9),
    )  # fmt: skip
    spec = SPECS["turbo"].changed(budget=0.5, sampled=0.25, local=100)
    layout = Layout(spec, SHAPE, torch.float32, 500)
    again = cache_of(layout, ROPE, slots=2, memory=Blocks(device=9, host=9))
    assert again.snapshots.stored_alike(one.snapshots, 3000)
    assert not other.snapshots.stored_alike(one.snapshots, 3000)


@pytest.mark.parametrize("kv", FORMS)
def test_the_form_is_that_of_files_from_before(kv: str) -> None:
    assert make_cache(preset(kv, rank=16)).snapshots.form == FORMS[kv]


def test_a_field_of_another_dtype_is_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = Sketch.page_fields

    def former_fields(part: Sketch) -> tuple[Field, ...]:
        signs, rest, scale = fields(part)
        return signs, rest, replace(scale, dtype=torch.float16)

    monkeypatch.setattr(Sketch, "page_fields", former_fields)
    kv = "turbo:keys=low-rank-int8"
    assert make_cache(preset(kv, rank=16)).snapshots.form != FORMS[kv]


def test_bytes_that_are_not_the_headers_are_refused() -> None:
    right = torch.zeros(LONG.num_layers, LONG.layer_bytes, dtype=torch.uint8)
    assert Snapshot(LONG, right).arrays().keys() == {field.name for field in LONG.fields}
    for wrong in (right[:, :-1], right[:1], right.char(), right.flatten()):
        with pytest.raises(ValueError, match="a snapshot's bytes are uint8"):
            Snapshot(LONG, wrong)

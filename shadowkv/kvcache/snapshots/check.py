"""What is wrong with a snapshot's header, which may have been read from a file that is corrupt or hostile."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shadowkv.kvcache.policy.growth import MOST_SEGMENTS, UNLIMITED
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots.contents import SnapshotContents
from shadowkv.kvcache.snapshots.fields import ALIGNED, DTYPES, LAYER_ALIGNED, aligned

MOST = {"tokens": 2**31, "layers": 2**12, "fields": 2**10, "axes": 8, "bytes of a layer": 2**40}
"""Limits for everything that a header counts: numbers above are rejected as nonsense."""


def reasons(header: SnapshotContents) -> Iterator[str]:
    """Why its numbers are invalid; each reason presumes that there is none before it."""
    if not re.fullmatch("[0-9a-f]{64}", header.form):
        yield f"form {header.form[:100]!r} is not 64 hexadecimal digits"
    yield from _out_of(("length", header.length, 0, MOST["tokens"]), ("start", header.start, 0, header.length))
    if header.start % PAGE:
        yield f"start {header.start} is not a multiple of {PAGE}"
    yield from _of_segments(header)
    exact = header.segments[-1].sealed(header.start) if header.segments else header.start
    if header.tail_tokens != header.length - exact:
        yield f"{header.tail_tokens} tokens of the tail are not those from {exact} to {header.length}"
    if header.observed and header.segments:
        yield "a state is observed where segments have theirs"
    yield from _of_fields(header)


def _out_of(*ranges: tuple[str, int, int, int]) -> Iterator[str]:
    for name, value, least, most in ranges:
        if not least <= value <= most:
            yield f"{name} {value} is not from {least} to {most}"


def _of_segments(header: SnapshotContents) -> Iterator[str]:
    yield from _out_of(("number of segments", len(header.segments), 0, MOST_SEGMENTS))
    at = header.start
    for number, one in enumerate(header.segments):
        last = number == len(header.segments) - 1
        if one.continued and (number or one.first >= header.start):
            yield f"segment {number} from {one.first} on does not begin before {header.start}"
        yield from _out_of(
            ("first token of a segment", one.first, 0 if one.continued else at, at),
            ("end of a segment", one.end, one.first + 1, MOST["tokens"]),
            ("reach of a segment", one.reach, one.end, UNLIMITED),
            ("static tokens", one.static_tokens, 0, MOST["tokens"]),
            ("pages of a segment", one.num_pages, 0 if one.continued and last else 1, (header.length - at) // PAGE),
        )
        at = one.sealed(header.start)
        yield from _out_of(("fitted pages of a segment", one.fitted, one.first + PAGE, at))
        if one.first % PAGE or one.fitted % PAGE:
            yield f"tokens {one.first} to {one.fitted} of a segment are no whole pages"


def _of_fields(header: SnapshotContents) -> Iterator[str]:
    yield from _out_of(
        ("number of layers", header.num_layers, 1, MOST["layers"]),
        ("number of fields", len(header.fields), 0, MOST["fields"]),
    )
    shapes, missing, names, offset = _shapes(header), set(_shapes(header)), set[str](), 0
    for one in header.fields:
        name = one.name[:100]
        family = one.name if one.name in shapes else f"{one.name.rpartition('.')[0]}."
        if one.name in names or one.name.endswith(".") or family not in shapes:
            yield f"field {name!r} is there twice or none of this snapshot's"
        if one.dtype not in DTYPES:
            yield f"dtype {one.dtype[:100]!r} of {name} is not one of {', '.join(DTYPES)}"
        yield from _out_of(
            (f"axes of {name}", len(one.shape), 1, MOST["axes"]),
            *((f"size of an axis of {name}", size, 1, MOST["tokens"]) for size in one.shape),
            (f"offset of {name}", one.offset, offset, offset),
        )
        if one.shape[: len(shapes[family])] != shapes[family]:
            yield f"shape {one.shape} of {name} does not begin with {shapes[family]}"
        names.add(one.name)
        missing.discard(family)
        offset = aligned(offset + one.nbytes, ALIGNED)
        yield from _out_of((f"end of {name}", offset, 0, MOST["bytes of a layer"]))
    missing = {family for family in missing if ".state." not in family}  # a policy may fit none
    if missing:
        yield f"there are no fields {', '.join(sorted(missing))}"
    size = aligned(offset, LAYER_ALIGNED)
    yield from _out_of(("bytes of a layer", header.layer_bytes, size, size))
    yield from _of_exact_fields(header)


def _of_exact_fields(header: SnapshotContents) -> Iterator[str]:
    yield from _out_of(("skipped layers at either end", header.skip_layers, 0, header.num_layers // 2))
    count = header.length - header.start
    there = 1 if header.skip_layers and count else 0
    yield from _out_of(("number of fields of skipped layers", len(header.exact_fields), there, there))
    for one in header.exact_fields:
        if (one.name, one.offset, one.shape[:2], len(one.shape)) != ("tokens", 0, (2, count), 4):
            yield f"{one.name[:100]!r} {one.shape} is not what skipped layers have of {count} tokens"
        if one.dtype not in DTYPES:
            yield f"dtype {one.dtype[:100]!r} of {one.name} is not one of {', '.join(DTYPES)}"
        yield from _out_of(*((f"size of an axis of {one.name}", size, 1, MOST["tokens"]) for size in one.shape))
        yield from _out_of((f"end of {one.name}", one.nbytes, 0, MOST["bytes of a layer"]))


def _shapes(header: SnapshotContents) -> dict[str, tuple[int, ...]]:
    """Names of fields, or what they begin with, and the first axes of those fields' shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, one in enumerate(header.segments):
        if one.num_pages:
            shapes[f"segments.{number}.pages."] = (one.num_pages,)
        if not one.continued:
            shapes[f"segments.{number}.state."] = ()
        if not one.continued and one.static_tokens:
            shapes[f"segments.{number}.static"] = (2, one.static_tokens)
    if header.tail_tokens:
        shapes["tail"] = (2, header.tail_tokens)
    if header.observed:
        shapes["observed."] = ()
    return shapes

"""``Snapshot``: the bytes of a cached sequence after a fork point. ``SnapshotHeader``: what the bytes are.

The bytes are stored layer after layer, so that a layer travels in one piece. Snapshots form chains. The first snapshot
begins at token 0. Each later snapshot begins where the used part of the snapshot before it ends. A segment's state is
stored once, in the first snapshot with pages of the segment; later snapshots store only further pages. A header may
come from a corrupt or hostile file, so its numbers are checked (``contradictions``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shadowkv.kvcache.parts.base import INDEX_KEYS
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS, UNLIMITED, cut_short
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots import dataclass_json

ALIGNED = 16
"""A field's offset in a layer is a multiple of this many bytes."""

LAYER_ALIGNED = 256
"""A layer's size is a multiple of this many bytes."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip
"""Dtypes of fields, by name."""

TAIL_INDEX_KEYS = f"tail.{INDEX_KEYS}"
"""Name of the field with the index keys of exact tokens."""

MOST = {"tokens": 2**31, "layers": 2**12, "fields": 2**10, "axes": 8, "bytes of a layer": 2**40}
"""Limits of the numbers in a header. Larger numbers are rejected."""


@dataclass(frozen=True)
class SnapshotField:
    """One array of a layer: ``shape`` of ``dtype`` from byte ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def of(self, layer: Tensor) -> Tensor:
        """Returns a view of the array, [*shape], in the bytes of a layer, uint8 [layer_bytes]. The layer must begin at
        a multiple of 16 bytes."""
        return layer[self.offset : self.offset + self.nbytes].view(DTYPES[self.dtype]).view(self.shape)


def aligned(size: int, to: int) -> int:
    """Rounds ``size`` up to a multiple of ``to``."""
    return -(-size // to) * to


def laid_out(arrays: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[tuple[SnapshotField, ...], int]:
    """Lays out arrays one after the other, each given by name, shape and dtype. Returns their fields, and the bytes of
    a layer with these fields."""
    fields, offset = [], 0
    for name, shape, dtype in arrays:
        fields.append(SnapshotField(name, shape, str(dtype).removeprefix("torch."), offset))
        offset = aligned(offset + fields[-1].nbytes, ALIGNED)
    return tuple(fields), aligned(offset, LAYER_ALIGNED)


@dataclass(frozen=True)
class SnapshotSegment:
    """A segment of a sequence, or the segment's newer part.

    Attributes:
        first, end, valid_until, fitted, static_tokens: as in ``Segment``.
        num_pages: number of compressed pages in this snapshot.
        continued: whether the segment begins in an earlier snapshot of the chain. That snapshot has the segment's
            state, its static tokens, and its pages before this snapshot's start.
    """

    first: int
    end: int
    valid_until: int
    fitted: int
    static_tokens: int
    num_pages: int
    continued: bool

    def begin(self, start: int) -> int:
        """Position of the segment's first token in a snapshot that begins at ``start``."""
        return start if self.continued else self.first

    def compressed(self, start: int) -> int:
        """Position after the segment's last compressed token, in a snapshot that begins at ``start``."""
        return self.begin(start) + PAGE * self.num_pages

    def cut(self, start: int, stop: int) -> SnapshotSegment:
        """The segment for a sequence that continues differently after position ``stop`` (``Segment.prefix``)."""
        count = min(self.num_pages, (stop - self.begin(start)) // PAGE)
        end, valid_until, fitted = cut_short(self.end, self.valid_until, self.fitted, stop)
        return replace(self, end=end, valid_until=valid_until, fitted=fitted, num_pages=count)


class Cut(NamedTuple):
    """The used part of a snapshot: segments, each with its first pages, and the first tokens of the tail."""

    segments: tuple[SnapshotSegment, ...]
    tail_tokens: int
    observed: bool


@dataclass(frozen=True)
class SnapshotHeader:
    """What a snapshot contains. The constructor raises ValueError if the numbers contradict one another.

    Attributes:
        form: digest of all that caches must have in common to read the snapshot (``form_of``).
        start: number of the sequence's tokens before the snapshot, a multiple of 64.
        length: number of the sequence's tokens up to the snapshot's end.
        segments: the segments with compressed pages after ``start``. If no segment has such pages, the last segment.
            Empty if the sequence is dense.
        tail_tokens: number of exact tokens: those after ``start`` and after all compressed tokens, up to ``length``.
        observed: whether the snapshot has what parts have learned from the last queries of a sequence that is still
            dense.
        fields: the fields of a layer, in the order of their bytes, such as ``segments.0.pages.latents`` [num_pages,
            ...], ``segments.0.state.basis`` [...], ``segments.0.static`` [2, static_tokens, H, d], ``tail`` [2,
            tail_tokens, H, d], ``tail.index_keys`` [1, tail_tokens, 1, d] in layers with an indexer, and
            ``observed.basis`` [...]. H is the number of kv heads, d the dimensions of a head. An axis of 2 has
            RoPE-rotated keys, then values.
        num_layers: number of all layers of the model.
        layer_bytes: bytes of a layer with these fields.
        layers: the layers with these fields; empty if all layers have them.
        recurrent: whether these layers have a recurrent state instead of keys and values. ``fields`` are then
            ``recurrent.…`` [...], the state after ``length`` tokens. If this state was not kept, there are no fields,
            and no sequence can continue at the snapshot's end.
        window: number of tokens that a query in these layers attends to; 0 for all. The tail begins with the first
            token after ``start`` that is in the last window.
        other_groups: headers of the other groups of layers. They describe the same tokens and have the same ``form``.
    """

    form: str
    start: int
    length: int
    segments: tuple[SnapshotSegment, ...]
    tail_tokens: int
    observed: bool
    fields: tuple[SnapshotField, ...]
    num_layers: int
    layer_bytes: int
    layers: tuple[int, ...] = ()
    window: int = 0
    recurrent: bool = False
    other_groups: tuple[SnapshotHeader, ...] = ()

    def __post_init__(self) -> None:
        for reason in contradictions(self):
            raise ValueError(f"this is no header of a snapshot: {reason}")

    @property
    def of_groups(self) -> tuple[SnapshotHeader, ...]:
        """The headers of all groups of layers."""
        return (self, *self.other_groups)

    @property
    def nbytes(self) -> int:
        """Bytes over all layers."""
        return self.span(self.num_layers - 1).stop

    @property
    def pieces(self) -> tuple[int, int]:
        """Returns the number of pieces of equal size, and the bytes of a piece. Each layer is a piece. If layers differ
        in size, all of them are one piece."""
        return (1, self.nbytes) if self.other_groups else (self.num_layers, self.layer_bytes)

    @cached_property
    def _of_layers(self) -> list[tuple[SnapshotHeader, int]]:
        """Returns, for each layer of the model, the header that describes it, and the offset of its bytes."""
        by_layer = {layer: group for group in self.of_groups for layer in group.layers or range(self.num_layers)}
        in_order = [by_layer[layer] for layer in range(self.num_layers)]
        return list(zip(in_order, accumulate((group.layer_bytes for group in in_order), initial=0)))

    def fields_of(self, layer: int) -> tuple[SnapshotField, ...]:
        """Fields of a layer of any group."""
        return self._of_layers[layer][0].fields

    def bytes_of(self, layer: int) -> int:
        """Bytes of a layer of any group, a multiple of 256."""
        return self._of_layers[layer][0].layer_bytes

    def span(self, layer: int) -> slice:
        """The range of a layer's bytes in the snapshot."""
        group, start = self._of_layers[layer]
        return slice(start, start + group.layer_bytes)

    @property
    def exact(self) -> int:
        """Position of the first token of the tail."""
        return self.length - self.tail_tokens

    def cut(self, stop: int) -> Cut:
        """Returns the part that is used by a sequence that continues differently after its first ``stop`` tokens. If
        ``stop`` is ``length``, all of the snapshot is used. Raises ValueError unless ``stop`` is in the snapshot, at a
        page boundary or among exact tokens."""
        if not self.start < stop <= self.length or (stop < self.exact and stop % PAGE):
            raise ValueError(f"a snapshot of tokens {self.start} to {self.length} cannot be cut at {stop}")
        if self.window and stop < self.length and self.start < self.exact:
            raise ValueError(f"a snapshot of a window before token {self.length} cannot be cut at {stop}")
        if stop == self.length:
            return Cut(self.segments, self.tail_tokens, self.observed)
        if stop > self.exact or not self.segments:
            return Cut(self.segments, stop - self.exact, False)
        used = (segment for segment in self.segments if segment.begin(self.start) < stop)
        return Cut(tuple(segment.cut(self.start, stop) for segment in used), 0, False)

    @staticmethod
    def from_plain(plain: object) -> SnapshotHeader:
        """Makes a header from its attributes as parsed JSON, which need not be valid. Raises ValueError, which says
        what is wrong."""
        header = dataclass_json.from_plain(SnapshotHeader, plain)
        if header.layers and not header.other_groups:
            raise ValueError(f"this is no header of a snapshot: layers {header.layers} are not all of the model's")
        return header


@dataclass(frozen=True)
class Snapshot:
    """A header and its bytes.

    Attributes:
        data: uint8 [*header.pieces], on any device.
    """

    header: SnapshotHeader
    data: Tensor

    def __post_init__(self) -> None:
        shape = self.header.pieces
        if self.data.dtype != torch.uint8 or self.data.shape != shape:
            raise ValueError(f"a snapshot's bytes are uint8 {shape}, not {self.data.dtype} {tuple(self.data.shape)}")

    def layer(self, number: int) -> Tensor:
        """A layer's bytes, uint8 [n]."""
        return self.data.flatten()[self.header.span(number)]

    def arrays(self) -> dict[str, Tensor]:
        """Returns all fields by name, [layers, *shape], with only the layers that have the field."""
        by_name: dict[str, list[Tensor]] = {}
        for number in range(self.header.num_layers):
            for field in self.header.fields_of(number):
                by_name.setdefault(field.name, []).append(field.of(self.layer(number)))
        return {name: torch.stack(layers) for name, layers in by_name.items()}


class Link(NamedTuple):
    """A snapshot of a chain. It is used up to the sequence's token ``stop``."""

    header: SnapshotHeader
    stop: int


def contradictions(header: SnapshotHeader) -> Iterator[str]:
    """Yields reasons why the numbers of a header are invalid. Each check assumes that the checks before it have found
    nothing."""
    if not re.fullmatch("[0-9a-f]{64}", header.form):
        yield f"form {header.form[:100]!r} is not 64 hexadecimal digits"
    yield from _out_of(("length", header.length, 0, MOST["tokens"]), ("start", header.start, 0, header.length))
    if header.start % PAGE:
        yield f"start {header.start} is not a multiple of {PAGE}"
    yield from _of_segments(header)
    exact = header.segments[-1].compressed(header.start) if header.segments else header.start
    yield from _out_of(("window", header.window, 0, MOST["tokens"]))
    if header.window and (header.segments or header.observed):
        yield "it has compressed pages or an observed state, which layers with a window cannot have"
    if header.recurrent and (header.segments or header.observed or header.window):
        yield "it has segments, an observed state or a window, which layers with a recurrent state cannot have"
    exact = max(exact, header.length - header.window) if header.window else exact
    exact = header.length if header.recurrent else exact
    if header.tail_tokens != header.length - exact:
        yield f"tail_tokens {header.tail_tokens} is not the number of tokens from {exact} to {header.length}"
    if header.observed and header.segments:
        yield "observed is true, but only a dense sequence has an observed state, and there are segments"
    yield from _of_fields(header)
    yield from _of_groups(header)


def _out_of(*ranges: tuple[str, int, int, int]) -> Iterator[str]:
    for name, value, least, most in ranges:
        if not least <= value <= most:
            yield f"{name} {value} is not from {least} to {most}"


def _of_segments(header: SnapshotHeader) -> Iterator[str]:
    yield from _out_of(("number of segments", len(header.segments), 0, MAX_SEGMENTS))
    at = header.start
    for number, segment in enumerate(header.segments):
        last = number == len(header.segments) - 1
        if segment.continued and (number or segment.first >= header.start):
            yield f"segment {number} from {segment.first} on does not begin before {header.start}"
        yield from _out_of(
            ("first token of a segment", segment.first, 0 if segment.continued else at, at),
            ("end of a segment", segment.end, segment.first + 1, MOST["tokens"]),
            ("valid_until of a segment", segment.valid_until, segment.end, UNLIMITED),
            ("static tokens", segment.static_tokens, 0, MOST["tokens"]),
            (
                "pages of a segment",
                segment.num_pages,
                0 if segment.continued and last else 1,
                (header.length - at) // PAGE,
            ),
        )
        at = segment.compressed(header.start)
        yield from _out_of(("fitted pages of a segment", segment.fitted, segment.first + PAGE, at))
        if segment.first % PAGE or segment.fitted % PAGE:
            yield f"tokens {segment.first} to {segment.fitted} of a segment are no whole pages"


def _of_fields(header: SnapshotHeader) -> Iterator[str]:
    yield from _out_of(
        ("number of layers", header.num_layers, 1, MOST["layers"]),
        ("number of fields", len(header.fields), 0, MOST["fields"]),
    )
    shapes, missing, names, offset = _shapes(header), set(_shapes(header)), set[str](), 0
    for field in header.fields:
        name = field.name[:100]
        family = field.name if field.name in shapes else f"{field.name.rpartition('.')[0]}."
        if field.name in names or field.name.endswith(".") or family not in shapes:
            yield f"field {name!r} occurs twice or does not belong to this snapshot"
        if field.dtype not in DTYPES:
            yield f"dtype {field.dtype[:100]!r} of {name} is not one of {', '.join(DTYPES)}"
        yield from _out_of(
            (f"axes of {name}", len(field.shape), 1, MOST["axes"]),
            *((f"size of an axis of {name}", size, 1, MOST["tokens"]) for size in field.shape),
            (f"offset of {name}", field.offset, offset, offset),
        )
        if field.shape[: len(shapes[family])] != shapes[family]:
            yield f"shape {field.shape} of {name} does not begin with {shapes[family]}"
        names.add(field.name)
        missing.discard(family)
        offset = aligned(offset + field.nbytes, ALIGNED)
        yield from _out_of((f"end of {name}", offset, 0, MOST["bytes of a layer"]))
    missing = {family for family in missing if ".state." not in family}  # a policy may have no fitted state
    if missing:
        yield f"there are no fields {', '.join(sorted(missing))}"
    size = aligned(offset, LAYER_ALIGNED)
    yield from _out_of(("bytes of a layer", header.layer_bytes, size, size))


def _of_groups(header: SnapshotHeader) -> Iterator[str]:
    for group in header.other_groups:
        if group.other_groups:
            yield "a group of layers has groups of its own"
        if (group.form, group.start, group.length) != (header.form, header.start, header.length):
            yield "its groups of layers are not of the same tokens in the same form"
        if group.num_layers != header.num_layers:
            yield f"its groups are of models of {header.num_layers} and {group.num_layers} layers"
    layers = sorted(layer for group in header.of_groups for layer in group.layers)
    if header.other_groups and (
        layers != list(range(header.num_layers)) or not all(x.layers for x in header.of_groups)
    ):
        yield f"its groups must contain each of the {header.num_layers} layers exactly once"


def _shapes(header: SnapshotHeader) -> dict[str, tuple[int, ...]]:
    """Maps names of fields, or prefixes of names, to the first axes of these fields' shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, segment in enumerate(header.segments):
        if segment.num_pages:
            shapes[f"segments.{number}.pages."] = (segment.num_pages,)
        if not segment.continued:
            shapes[f"segments.{number}.state."] = ()
        if not segment.continued and segment.static_tokens:
            shapes[f"segments.{number}.static"] = (2, segment.static_tokens)
    if header.tail_tokens:
        shapes["tail"] = (2, header.tail_tokens)
        if any(field.name == TAIL_INDEX_KEYS for field in header.fields):
            shapes[TAIL_INDEX_KEYS] = (1, header.tail_tokens)
    if header.observed:
        shapes["observed."] = ()
    if header.recurrent and header.fields:
        shapes["recurrent."] = ()
    return shapes

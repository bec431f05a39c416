"""The header of a snapshot's file, a safetensors header. ``files.py`` writes and reads headers. ``directory.py`` keeps
the headers of all files.

``__metadata__`` determines the whole header. The tensors are ``layer.000`` … of ``layer_bytes`` uint8 each, in order
and without gaps, then ``token_ids`` as uint32. Spaces pad the header to a multiple of 4,096 bytes. To check a header,
it is written again from its metadata: any different byte is an error. ``header_checksum`` covers all bytes of the
header, with zeros in its own place.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from shadowkv.prefix_cache.page_hashes import canonical
from shadowkv.prefix_cache.protocol import is_snapshot_name

FORMAT = "shadowkv-snapshot"
VERSION = "1"

MAX_HEADER_BYTES = 16 * 2**20
MAX_LAYERS = 4096
MAX_NUMBER = 10**15
"""Limit for numbers of bytes, tokens and seconds."""

SUFFIX = ".safetensors"
ALIGNMENT = 4096
NO_CHECKSUM = "0" * 32
"""Placeholder for a checksum that is not known yet."""

_TEXTS = ("checksum", "token_checksum", "name", "origin", "parent", "uid", "parent_uid")
_NUMBERS = ("start", "length", "layers", "layer_bytes", "created")
"""``_TEXTS`` and ``_NUMBERS`` are the fields of ``FileHeader`` that are texts and numbers, in the order in which
``__metadata__`` has them."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")
_UID = re.compile(r"[0-9a-f]{32}")


class BadSnapshot(Exception):
    """A file that is corrupt, of another version or renamed. It is never served.

    Attributes:
        path: path of the file.
        problem: what is wrong with the file.
        action: what was done with the file.
    """

    def __init__(self, path: Path, problem: str, action: str = "not served") -> None:
        super().__init__(path, problem, action)
        self.path, self.problem, self.action = path, problem, action

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.action}"


@dataclass(frozen=True)
class FileHeader:
    """A file's description of its snapshot. Raises ValueError for impossible values.

    Attributes:
        name: file name without its suffix.
        origin: hash of the key and the salt. The chain of page hashes starts with it (``page_hashes.py``).
        parent: name of the snapshot that this one continues; "" if this one starts with a prompt's first token.
        uid: identifies the snapshot's exact bytes.
        parent_uid: uid of the parent that this snapshot was computed on; "" without a parent.
        start: position of the snapshot's first token.
        length: number of tokens from the prompt's first token to the snapshot's last.
        layers: number of pieces of data, one per layer of the model; 1 if layers differ in size.
        layer_bytes: bytes of each piece.
        contents: the attributes of the cache's ``SnapshotHeader``. They are not checked here. In ``__metadata__`` this
            field is called ``header``.
        key: digest of everything that the bytes depend on (``CacheKey``).
        facts: what the digest was made of, in readable form.
        created: time of creation, in seconds since 1970.
        checksum: xxh3-128 of the data of all layers. It is known once the data is written.
        token_checksum: xxh3-128 of the token ids.
    """

    name: str
    origin: str
    parent: str
    uid: str
    parent_uid: str
    start: int
    length: int
    layers: int
    layer_bytes: int
    contents: Mapping[str, Any]
    key: str
    facts: Mapping[str, Any]
    created: int
    checksum: str = NO_CHECKSUM
    token_checksum: str = NO_CHECKSUM

    def __post_init__(self) -> None:
        for name in ("name", "origin", "parent", "key"):
            text = getattr(self, name)
            if not is_snapshot_name(text) and (text or name != "parent"):
                raise ValueError(f"{name} {text!r} is not 40 hex digits")
        for name in ("uid", "parent_uid", "checksum", "token_checksum"):
            text = getattr(self, name)
            if not _UID.fullmatch(text) and (text or name != "parent_uid"):
                raise ValueError(f"{name} {text!r} is not 32 hex digits")
        if bool(self.parent) != bool(self.parent_uid):
            raise ValueError("parent and parent_uid go together")
        if self.parent == self.name:
            raise ValueError("it continues itself")
        if not (1 <= self.layers <= MAX_LAYERS and 1 <= self.layer_bytes <= MAX_NUMBER):
            raise ValueError(f"{self.layers} layers of {self.layer_bytes} bytes are impossible")
        if not 0 <= self.start < self.length <= MAX_NUMBER or bool(self.start) > bool(self.parent):
            raise ValueError(f"tokens {self.start} to {self.length} are impossible with the parent {self.parent!r}")
        if not 0 <= self.created <= MAX_NUMBER:
            raise ValueError(f"created {self.created} is no time")

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.layers * self.layer_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state after the last token, of all layers; 0 if ``contents`` describes none. With
        several ranks, only rank 0's bytes count, because ``contents`` describes only rank 0's part."""
        try:
            groups = [group for group in self.contents["other_groups"] if group["recurrent"]]
            nbytes = sum(int(group["layer_bytes"]) * len(group["layers"]) for group in groups)
        except (KeyError, OverflowError, TypeError, ValueError):
            return 0
        return nbytes if 0 <= nbytes <= self.nbytes else 0

    @property
    def tokens(self) -> int:
        """Number of the snapshot's own tokens, without its parent's."""
        return self.length - self.start

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(_encode_without_checksum(self)) + self.nbytes + 4 * self.tokens

    @property
    def file_name(self) -> str:
        """File name without the directory."""
        return file_name(self.name)


def file_name(name: str) -> str:
    """The file name of the snapshot ``name``."""
    return f"{name}{SUFFIX}"


def snapshot_name(file: str) -> str | None:
    """The name of the snapshot with this file name; None if no snapshot's file is called so."""
    name = file.removesuffix(SUFFIX)
    return name if name != file and is_snapshot_name(name) else None


def encode(header: FileHeader) -> bytes:
    """The bytes of the header. Their number does not depend on the checksums."""
    blank = _encode_without_checksum(header)
    # The header's own checksum comes first, so only its placeholder is replaced.
    return blank.replace(NO_CHECKSUM.encode(), xxhash.xxh3_128_hexdigest(blank).encode(), 1)


def _encode_without_checksum(header: FileHeader) -> bytes:
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "header_checksum": NO_CHECKSUM,
        **{name: getattr(header, name) for name in _TEXTS},
        **{name: str(getattr(header, name)) for name in _NUMBERS},
        "key": header.key,
        "facts": canonical(header.facts),
        "header": canonical(header.contents),
    }
    content: dict[str, Any] = {"__metadata__": metadata}
    width = header.layer_bytes
    for layer in range(header.layers):
        begin = layer * width
        content[f"layer.{layer:03d}"] = {"dtype": "U8", "shape": [width], "data_offsets": [begin, begin + width]}
    offsets = [header.nbytes, header.nbytes + 4 * header.tokens]
    content["token_ids"] = {"dtype": "U32", "shape": [header.tokens], "data_offsets": offsets}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    return struct.pack("<Q", len(text)) + text


def header_bytes(path: Path, prefix: bytes, size: int) -> int:
    """Returns the number of bytes of the whole header, including ``prefix``, the file's first 8 bytes. ``size`` is the
    number of bytes of the file. Raises BadSnapshot if the file or the header cannot have this size."""
    if len(prefix) < 8:
        raise BadSnapshot(path, f"cut off after {len(prefix)} bytes")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise BadSnapshot(path, f"a header of {length} bytes, more than {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise BadSnapshot(path, f"cut off in the header, {size} bytes of {8 + length}")
    return int(8 + length)


def decode(path: Path, name: str, raw: bytes, size: int) -> FileHeader:
    """The header in ``raw``, the first bytes of a file of ``size`` bytes. Raises BadSnapshot if it is not a valid
    header of the snapshot ``name``."""
    try:
        content = json.loads(raw[8:])
        metadata = content["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError("it is no snapshot")
        if metadata["version"] != VERSION:
            raise BadSnapshot(path, f"version {str(metadata['version'])[:20]!r}, this is {VERSION}")
        fields: dict[str, Any] = {name: metadata[name] for name in _TEXTS}
        fields |= {name: _number(metadata[name]) for name in _NUMBERS}
        header = FileHeader(
            **fields,
            key=metadata["key"],
            facts=_object(metadata["facts"]),
            contents=_object(metadata["header"]),
        )
        same = encode(header) == raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadSnapshot(path, f"not a snapshot's header ({type(error).__name__}: {str(error)[:100]})") from error
    if not same:
        raise BadSnapshot(path, "the header does not match its metadata or checksum")
    if header.name != name:
        raise BadSnapshot(path, f"it is the file of {header.name}")
    expected = len(raw) + header.nbytes + 4 * header.tokens
    if size != expected:
        raise BadSnapshot(path, f"{size} bytes instead of {expected}")
    return header


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is no number")
    return int(text)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value

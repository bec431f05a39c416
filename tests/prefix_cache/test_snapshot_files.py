"""The file format: exactly the written bytes are read, and all others are refused."""

import errno
import json
import os
import random
import struct
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import xxhash
from safetensors.numpy import load_file
from stored_snapshots import LAYER_BYTES, LAYERS, PATIENCE, data_of, header_of, prompt

from shadowkv.prefix_cache.disk.files import SnapshotFile, write_snapshot
from shadowkv.prefix_cache.disk.filesystem import FileSystem, Workers
from shadowkv.prefix_cache.disk.header import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    BadSnapshot,
    FileHeader,
    decode,
    encode,
    header_bytes,
)

IDS = prompt(3)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, FileHeader]:
    """A file and its header."""
    header = header_of(IDS)
    stored = write_snapshot(tmp_path, header, IDS, [data_of(header)])
    assert stored is not None
    return tmp_path / header.file_name, stored


def read_all(path: Path) -> bytes:
    """Reads a file like the disk tier, with all checks."""
    with SnapshotFile(path.parent, path.name.removesuffix(".safetensors")) as file:
        file.expect(IDS)
        data = bytearray(file.header.nbytes)
        file.read_into([data])
        file.verify()
        return bytes(data)


def refused(path: Path, problem: str | None = None) -> None:
    """Checks that a file is bad."""
    with pytest.raises(BadSnapshot, match=problem):
        read_all(path)


def parts(path: Path) -> tuple[bytes, bytes]:
    """The JSON of a file's header, and the bytes that follow it."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return raw[8:end], raw[end:]


def with_metadata(path: Path, **changed: str) -> None:
    """Changes metadata in a file's header, and the header's checksum to match."""
    text, data = parts(path)
    content = json.loads(text)
    content["__metadata__"] |= {"header_checksum": "0" * 32} | changed

    def header() -> bytes:
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        return struct.pack("<Q", len(text)) + text

    content["__metadata__"]["header_checksum"] = xxhash.xxh3_128_hexdigest(header())
    path.write_bytes(header() + data)


def test_the_bytes_of_a_header_never_change():
    header = FileHeader(
        name="1" * 40,
        origin="2" * 40,
        parent="3" * 40,
        uid="4" * 32,
        parent_uid="5" * 32,
        start=64,
        length=130,
        layers=2,
        layer_bytes=10,
        contents={"b": [1, 2.5, None], "a": "é"},
        key="6" * 40,
        facts={"model": "m"},
        created=1_700_000_000,
        checksum="7" * 32,
        token_checksum="8" * 32,
    )
    raw = encode(header)
    assert len(raw) == 4096
    assert xxhash.xxh3_128_hexdigest(raw) == "7aac5dd5302e5930fa2e22b8cb2ba5ef"
    assert decode(Path("file"), "1" * 40, raw, 4096 + 20 + 4 * 66) == header


def test_what_was_written_is_read(written):
    path, header = written
    assert read_all(path) == data_of(header)
    with SnapshotFile(path.parent, header.name) as file:
        assert file.header == header
    assert header.file_bytes == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_other_programs_can_read_it(written):
    path, header = written
    tensors = load_file(path)
    assert sorted(tensors) == [*(f"layer.{layer:03d}" for layer in range(LAYERS)), "token_ids"]
    assert b"".join(tensors[f"layer.{layer:03d}"].tobytes() for layer in range(LAYERS)) == data_of(header)
    assert np.array_equal(tensors["token_ids"], IDS)
    with safetensors.safe_open(path, "numpy") as file:
        assert json.loads(file.metadata()["header"]) == header.contents
        assert file.metadata()["checksum"] == xxhash.xxh3_128_hexdigest(data_of(header))


def test_nothing_says_the_salt(tmp_path):
    header = header_of(IDS, salt="of-one-tenant")
    write_snapshot(tmp_path, header, IDS, [data_of(header)])
    assert b"of-one-tenant" not in (tmp_path / header.file_name).read_bytes()


@pytest.mark.parametrize("cut", [1, 7, 999, 3000])
def test_data_may_come_in_any_pieces(tmp_path, cut):
    header = header_of(IDS)
    data = data_of(header)
    slabs = (np.frombuffer(data[begin : begin + cut], np.uint8) for begin in range(0, len(data), cut))
    write_snapshot(tmp_path, header, IDS, slabs)
    assert read_all(tmp_path / header.file_name) == data


def test_several_threads_read_a_large_file_into_several_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr("shadowkv.prefix_cache.disk.files.READ_BLOCK", 10_000)
    header = header_of(IDS, layer_bytes=333_333)
    data, buffers = data_of(header), [np.zeros(size, np.uint8) for size in (1, 399_998, 600_000)]
    write_snapshot(tmp_path, header, IDS, [data])
    readers = Workers(4, "read")
    with SnapshotFile(tmp_path, header.name) as file:
        file.read_into(buffers, readers)
        assert b"".join(part.tobytes() for part in buffers) == data
        raw = bytearray((tmp_path / header.file_name).read_bytes())
        raw[500_000] ^= 1
        (tmp_path / header.file_name).write_bytes(raw)
        with pytest.raises(BadSnapshot, match="data does not match"):
            file.read_into(buffers, readers)
        os.truncate(tmp_path / header.file_name, 700_000)
        with pytest.raises(BadSnapshot, match="cut off"):
            file.read_into(buffers, readers)
        assert readers.close(PATIENCE)


@pytest.mark.parametrize("sizes", [[2999], [3001], [], [1000, 1000]])
def test_buffers_of_another_size_are_refused(written, sizes):
    path, header = written
    with SnapshotFile(path.parent, header.name) as file, pytest.raises(ValueError, match="3000"):
        file.read_into([bytearray(size) for size in sizes])


@pytest.mark.parametrize(
    ("ids", "slabs"), [(IDS[1:], [bytes(3000)]), (IDS, [bytes(2999)]), (IDS, [bytes(3000), bytes(1)]), (IDS, [])]
)
def test_what_is_not_as_the_head_says_is_not_written(tmp_path, ids, slabs):
    with pytest.raises(ValueError):
        write_snapshot(tmp_path, header_of(IDS), ids, slabs)
    assert os.listdir(tmp_path) == []


def test_who_comes_second_keeps_out_unless_the_first_is_of_no_use(written):
    path, first = written
    second = replace(header_of(IDS), name=first.name)
    assert write_snapshot(path.parent, second, IDS, [data_of(second)]) is None
    assert read_all(path) == data_of(first)
    assert write_snapshot(path.parent, second, IDS, [data_of(second)], replace_existing=lambda: True) is not None
    assert read_all(path) == data_of(second)
    assert os.listdir(path.parent) == [path.name]


def test_every_single_byte_of_the_header_counts(written):
    path, _ = written
    raw, chance = path.read_bytes(), random.Random(0)
    for place in range(len(raw) - len(parts(path)[1])):
        bad = bytearray(raw)
        bad[place] ^= chance.randrange(1, 256)
        with pytest.raises(BadSnapshot):
            decode_all(path, bytes(bad))
        if place % 50 == 0:  # the file itself
            path.write_bytes(bad)
            refused(path)


def decode_all(path: Path, raw: bytes) -> None:
    """Reads the header of a file with these bytes, as ``SnapshotFile`` does."""
    decode(path, path.stem, raw[: header_bytes(path, raw[:8], len(raw))], len(raw))


def test_every_bit_of_the_data_counts(written):
    path, _ = written
    raw, chance = path.read_bytes(), random.Random(1)
    begin = len(raw) - len(parts(path)[1])
    places = [begin, len(raw) - 1, *(chance.randrange(begin, len(raw)) for _ in range(200))]
    for place in places:
        bad = bytearray(raw)
        bad[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        refused(path)


def test_a_file_that_was_cut_anywhere_is_bad(written):
    path, header = written
    raw = path.read_bytes()
    begin = len(raw) - header.nbytes - 4 * header.tokens
    for size in [0, 1, 7, 8, 9, 100, begin - 1, begin, begin + 1, begin + LAYER_BYTES, len(raw) - 801, len(raw) - 1]:
        path.write_bytes(raw[:size])
        refused(path, r"cut off|bytes instead of")
    path.write_bytes(raw + b"\0")
    refused(path, "bytes instead of")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"version": "2"}, "version '2', this is 1"),
        ({"version": ""}, "version ''"),
        ({"format": "pt"}, "no snapshot"),
        ({"name": "0" * 40}, "it is the file of 0000"),
        ({"name": "../../etc/passwd"}, "is not 40 hex digits"),
        ({"parent": "/" * 40, "parent_uid": "0" * 32}, "is not 40 hex digits"),
        ({"parent": "0" * 40}, "go together"),
        ({"uid": "../" * 8}, "not 32 hex digits"),
        ({"layers": "999999999"}, "are impossible"),
        ({"layers": "0"}, "are impossible"),
        ({"layers": "-1"}, "no number"),
        ({"layers": "2"}, "not match its metadata"),
        ({"layers": "3 "}, "no number"),
        ({"layers": "٣"}, "no number"),
        ({"layer_bytes": "1" * 30}, "no number"),
        ({"layer_bytes": "9999999999999999"}, "are impossible"),
        ({"length": "100", "start": "100"}, "are impossible"),
        ({"start": "1"}, "are impossible"),
        ({"facts": "[]"}, "not a JSON object"),
        ({"header": "["}, "not a snapshot's header"),
        ({"header": "[" * 100_000}, "not a snapshot's header"),
        ({"header": '{"a": 1}'}, "not match its metadata"),
        ({"header": '{"a":NaN}'}, "not a snapshot's header"),
        ({"more": "?"}, "not match its metadata"),
    ],
)
def test_hostile_metadata_are_bad_even_with_a_right_checksum(written, changed, problem):
    path, _ = written
    with_metadata(path, **changed)
    refused(path, problem)


@pytest.mark.parametrize("offsets", [[0, 1001], [0, 999], [0, 2**63], [-1, 999], [1000, 2000]])
def test_tensors_that_overlap_or_leave_gaps_are_bad(written, offsets):
    path, _ = written
    header, data = parts(path)
    content = json.loads(header)
    content["layer.000"]["data_offsets"] = offsets
    text = json.dumps(content, separators=(",", ":")).encode().ljust(len(header))
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    refused(path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_giant_headers_are_not_read(written, length):
    path, _ = written
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refused(path, f"a header of {length} bytes")


@pytest.mark.parametrize(
    "raw", [b"", b"null", b"[]", b"{}", b'{"__metadata__":[]}', b"\xff\xfe", b'{"__metadata__":{}}']
)
def test_what_is_no_header_is_bad(written, raw):
    path, _ = written
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    refused(path)


def test_what_is_no_file_is_not_read(tmp_path):
    name = header_of(IDS).name
    (tmp_path / f"{name}.safetensors").mkdir()
    with pytest.raises(BadSnapshot, match="not a regular file"):
        SnapshotFile(tmp_path, name)
    (tmp_path / f"{name}.safetensors").rmdir()
    os.mkfifo(tmp_path / f"{name}.safetensors")
    with pytest.raises(BadSnapshot, match="not a regular file"):
        SnapshotFile(tmp_path, name)
    (tmp_path / f"{name}.safetensors").unlink()
    (tmp_path / f"{name}.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        SnapshotFile(tmp_path, name)


def test_other_tokens_are_not_served(written):
    path, header = written
    with SnapshotFile(path.parent, header.name) as file:
        other = IDS.copy()
        other[-1] += 1
        with pytest.raises(BadSnapshot, match="it holds other tokens"):
            file.expect(other)
        with pytest.raises(ValueError, match="199 token ids"):
            file.expect(IDS[:-1])


def test_ids_are_true_by_a_checksum_of_their_own(written):
    path, header = written
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with SnapshotFile(path.parent, header.name) as file, pytest.raises(BadSnapshot, match="its token ids do not match"):
        file.token_ids()


def test_buffers_are_left_alone_when_a_read_has_failed(written, monkeypatch):
    path, header = written
    monkeypatch.setattr("shadowkv.prefix_cache.disk.files.READ_BLOCK", 1000)
    failed, ended = threading.Event(), threading.Event()

    class Disk(FileSystem):
        def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
            if offset == 4096:
                failed.set()
                raise OSError(errno.EIO, "broken")
            if offset == 5096:
                assert failed.wait(PATIENCE)
                time.sleep(0.1)
                ended.set()
            return super().read(descriptor, buffer, offset)

    readers = Workers(2, "read")
    with SnapshotFile(path.parent, header.name, Disk()) as file, pytest.raises(OSError, match="broken"):
        file.read_into([bytearray(3000)], readers)
    assert ended.is_set()
    assert readers.close(PATIENCE)


def test_readers_that_have_ended_keep_nobody(written):
    path, header = written
    readers = Workers(2, "read")
    assert readers.close(PATIENCE)
    with SnapshotFile(path.parent, header.name) as file, pytest.raises(CancelledError):
        file.read_into([bytearray(3000)], readers)


@pytest.mark.parametrize("layer_bytes", [float("inf"), 10**400, LAYERS * LAYER_BYTES, -1, "many", None])
def test_a_state_that_a_file_cannot_have_is_not_listed(layer_bytes: object) -> None:
    """The cache's header is not checked when a file is listed."""
    group = {"recurrent": True, "layers": [0, 1], "layer_bytes": 256}
    assert header_of(prompt(0), contents={"other_groups": [group]}).state_bytes == 512
    assert header_of(prompt(0), contents={"other_groups": [{**group, "layer_bytes": layer_bytes}]}).state_bytes == 0

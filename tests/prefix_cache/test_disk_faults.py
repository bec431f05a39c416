"""Disks that are full, read-only, broken or slow: the tier serves other snapshots, logs one line, and leaves no
files."""

import errno
import logging
import os
import time

import pytest
from faulty_disks import HELD_SECONDS, BrokenDisk, FullDisk, HeldDisk, ReadOnlyDisk
from stored_snapshots import KEY, LIMIT, PATIENCE, data_of, found, header_of, names_of, opened, prompt, put, read

from shadowkv.prefix_cache.disk.header import BadSnapshot
from shadowkv.prefix_cache.disk.tier import DiskTier

IDS = prompt(7, 128)
SIZE = header_of(IDS).file_bytes


def offer(tier, ids, **others):
    """Whether a snapshot is stored."""
    header = header_of(ids, **others)
    return tier.put(header, ids, [data_of(header)]).result(PATIENCE)


def damage(path, how):
    """Damages a file."""
    raw = bytearray(path.read_bytes())
    if how == "flipped":
        raw[-1000] ^= 4
    elif how == "flipped token":
        raw[-1] ^= 4
    elif how == "flipped header":
        raw[100] ^= 4
    elif how == "version":
        raw = raw.replace(b'"version":"1"', b'"version":"0"')
    elif how == "cut":
        raw = raw[:-700]
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["flipped", "flipped token", "flipped header", "version", "cut", "empty"])
@pytest.mark.parametrize("before", [True, False])
def test_a_damaged_file_is_never_served(tmp_path, caplog, how, before):
    with opened(tmp_path) as tier:
        header, other = put(tier, IDS), put(tier, prompt(1))
    path = tmp_path / header.file_name
    if before:
        damage(path, how) if how != "empty" else path.write_bytes(b"")
    with opened(tmp_path) as tier:
        if entry := tier.lookup(header.name):
            if not before:
                damage(path, how) if how != "empty" else path.write_bytes(b"")
            with pytest.raises(BadSnapshot):
                read(tier, entry, IDS)
        assert found(tier, names_of(IDS)) == []
        assert tier.stats().corrupt == 1 and not path.exists()
        assert len(caplog.records) == 1 and str(path) in caplog.text and "removed" in caplog.text
        assert read(tier, found(tier, names_of(prompt(1)))[0], prompt(1)) == data_of(other)
        put(tier, IDS)


@pytest.mark.parametrize("late", [False, True])
def test_on_a_full_disk_others_make_room(tmp_path, caplog, late):
    with opened(tmp_path, files=FullDisk(tmp_path, 3 * SIZE, late)) as tier:
        headers = [put(tier, prompt(seed, 128)) for seed in range(5)]
        assert tier.stats().evictions == 2 and tier.stats().write_errors == 0
        assert [tier.lookup(header.name) is None for header in headers] == [True, True, False, False, False]
    assert len(os.listdir(tmp_path)) == 3 and not caplog.records


@pytest.mark.parametrize("late", [False, True])
def test_a_disk_that_stays_full_is_left_alone_for_a_while(tmp_path, caplog, monkeypatch, late):
    with opened(tmp_path) as tier:
        header = put(tier, IDS)
    with opened(tmp_path, files=FullDisk(tmp_path, SIZE, late), pause_seconds=300.0, key=KEY) as tier:
        ids = prompt(1, 128)
        assert not offer(tier, ids, layer_bytes=2 * SIZE)
        assert not offer(tier, prompt(2, 128)) and not offer(tier, prompt(3, 128))
        stats = tier.stats()
        assert (stats.write_errors, stats.refused, stats.evictions) == (1, 2, 1)
        assert len(caplog.records) == 1 and "No space left on device; nothing is stored there for 300 s" in caplog.text
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 300)
        assert offer(tier, prompt(2, 128))
        assert tier.lookup(header.name) is None
    assert len(os.listdir(tmp_path)) == 1


def test_data_that_can_be_had_once_get_no_second_try(tmp_path):
    with opened(tmp_path, files=FullDisk(tmp_path, SIZE, late=True)) as tier:
        put(tier, IDS)
        header = header_of(prompt(1, 128))
        assert not tier.put(header, prompt(1, 128), iter([data_of(header)])).result(PATIENCE)
        assert tier.stats().write_errors == 1 and tier.stats().evictions == 0


def test_a_limit_of_file_size_is_a_write_error(tmp_path, caplog):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as tier:
        put(tier, IDS)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE + 100, hard))
        try:
            assert not offer(tier, prompt(1, 128), layer_bytes=2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert tier.stats().write_errors == 1 and "File too large" in caplog.text
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_is_read_only_is_read(tmp_path, caplog, number):
    with opened(tmp_path) as tier:
        header = put(tier, IDS)
        bad = put(tier, prompt(1, 128))
    damage(tmp_path / bad.file_name, "flipped")
    with opened(tmp_path, files=ReadOnlyDisk(number), limit=SIZE) as tier:
        assert read(tier, found(tier, names_of(IDS))[0], IDS) == data_of(header)
        with pytest.raises(BadSnapshot, match="not served, and cannot be removed"):
            read(tier, tier.lookup(bad.name), prompt(1, 128))
        assert not offer(tier, prompt(2, 128)) and not offer(tier, prompt(3, 128))
        assert tier.stats().write_errors == 1 and tier.stats().refused == 1
        time.sleep(0.2)  # for the next looks at the directory
        assert tier.lookup(bad.name) is None and tier.stats().corrupt == 1
        assert [os.strerror(number) in record.getMessage() for record in caplog.records] == [True, True]


def test_pauses_grow_while_it_fails(tmp_path, caplog):
    with opened(tmp_path, files=ReadOnlyDisk(), pause_seconds=0.05) as tier:
        for seed, pause in enumerate((0.05, 0.1, 0.2)):
            assert not offer(tier, prompt(seed, 128))
            assert f"for {pause} s" in caplog.records[-1].getMessage()
            time.sleep(pause + 0.02)
        assert tier.stats().write_errors == 3


def test_data_that_cannot_be_read_are_a_miss_and_stay(tmp_path, caplog):
    with opened(tmp_path) as tier:
        header = put(tier, IDS)
    with opened(tmp_path, files=BrokenDisk()) as tier:
        with pytest.raises(OSError, match="Input/output"):
            read(tier, tier.lookup(header.name), IDS)
        assert tier.stats().read_errors == 1 and tier.stats().misses == 1 and tier.stats().corrupt == 0
        assert len(caplog.records) == 1 and "Input/output error" in caplog.text
    assert (tmp_path / header.file_name).exists()


@pytest.mark.parametrize("held", [("names", "open", "read", "write"), ("read",), ("write",)])
def test_a_disk_that_stands_still_makes_nobody_wait(tmp_path, caplog, held):
    """It stands still, and its callers go on; all that they asked for comes to pass when it moves again."""
    with opened(tmp_path) as tier:
        headers = [put(tier, prompt(seed, 128)) for seed in range(4)]
    disk, new, buffers = HeldDisk(), prompt(9, 128), [bytearray(3000) for _ in range(4)]
    with opened(tmp_path, files=disk) as tier:
        disk.held = held
        begin, header = time.monotonic(), header_of(new)
        written = tier.put(header, new, [data_of(header)])
        reads = []
        for number, buffer in enumerate(buffers):
            (entry,) = found(tier, names_of(prompt(number, 128)))
            reads.append(tier.read(entry, [buffer], prompt(number, 128)))
        assert disk.reached.wait(PATIENCE)
        for step in range(200):
            assert found(tier, names_of(prompt(step % 4, 128))) and tier.stats().files in (4, 5)
        assert time.monotonic() - begin < HELD_SECONDS / 2
        disk.go_on.set()
        assert written.result(PATIENCE)
        assert [future.result(PATIENCE) > 0 for future in reads] == [True] * 4
        assert [bytes(buffer) for buffer in buffers] == [data_of(header) for header in headers]
    assert not caplog.records


def test_searches_go_on_while_a_disk_hangs(tmp_path):
    with opened(tmp_path) as tier:
        put(tier, IDS)
    disk = HeldDisk("names", "open")
    tier = DiskTier(tmp_path, LIMIT, KEY, files=disk)
    begin = time.monotonic()
    for _ in range(1000):
        assert found(tier, names_of(IDS)) == []
    assert time.monotonic() - begin < HELD_SECONDS / 2
    disk.go_on.set()
    assert tier.wait_scanned(PATIENCE) and found(tier, names_of(IDS))
    assert tier.close()


def test_a_directory_that_goes_away_is_said_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with opened(tmp_path / "cache") as tier:
        put(tier, IDS)
        (tmp_path / "cache").rename(tmp_path / "away")
        deadline = time.monotonic() + PATIENCE
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path / 'cache'} cannot be listed: No such file or directory"
        ]
        (tmp_path / "away").rename(tmp_path / "cache")
        assert read(tier, found(tier, names_of(IDS))[0], IDS)

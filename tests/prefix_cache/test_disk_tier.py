"""The disk tier: it finds stored snapshots again, after a restart and from another server, and keeps to its limit."""

import os
import stat
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from faulty_disks import HELD_SECONDS, HeldDisk
from stored_snapshots import KEY, LIMIT, PATIENCE, data_of, found, header_of, names_of, opened, prompt, put, read

from shadowkv.prefix_cache.disk.files import SnapshotGone, write_snapshot
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.header import file_name
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.page_hashes import new_uid

IDS = prompt(7, 400)
SIZE = header_of(IDS[:128]).file_bytes


def wait_for(condition, seconds=PATIENCE):
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_chain_is_found_read_and_found_again_after_a_restart(tmp_path):
    events = []
    with opened(tmp_path / "a" / "cache", on_event=lambda kind, entry: events.append((kind, entry.name))) as tier:
        first = put(tier, IDS[:128])
        second = put(tier, IDS[:250], first)
        assert events == [("stored", first.name), ("stored", second.name)]
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700
    with opened(tmp_path / "a" / "cache") as tier:
        chain = found(tier, names_of(IDS[:250]))
        assert [entry.uid for entry in chain] == [first.uid, second.uid]
        assert [entry.uid for entry in found(tier, names_of(IDS))] == [first.uid]
        assert [read(tier, entry, IDS) for entry in chain] == [data_of(first), data_of(second)]
        assert np.array_equal(tier.token_ids(chain[1]).result(PATIENCE), IDS[128:250])
        assert found(tier, names_of(prompt(8))) == []
        stats = tier.stats()
        assert (stats.restores, stats.misses, stats.files, stats.restored_bytes) == (2, 0, 2, 6000)
        assert stats.used_bytes == sum(path.stat().st_size for path in (tmp_path / "a" / "cache").iterdir())
        assert stats.restore_seconds > 0


def test_nothing_is_found_across_salts_and_keys(tmp_path):
    other = replace(KEY, quantization=None)
    with opened(tmp_path) as tier:
        mine, plain = put(tier, IDS[:128], salt="mine"), put(tier, IDS[:128])
        for salt in ("", "other"):
            assert found(tier, names_of(IDS, salt=salt)) == []
        assert [entry.name for entry in found(tier, names_of(IDS, salt="mine"))] == [mine.name]
        assert [entry.name for entry in found(tier, names_of(IDS))] == [plain.name]
    with opened(tmp_path, key=other) as tier:
        assert tier.stats().files == 2
        assert found(tier, names_of(IDS)) == found(tier, names_of(IDS, key=other)) == []
        assert tier.lookup(plain.name) is None
        with pytest.raises(ValueError, match="this tier's is"):
            tier.put(plain, IDS[:128], [data_of(plain)])


def test_a_continuation_fits_only_the_very_bytes_that_it_was_computed_on(tmp_path):
    with opened(tmp_path) as tier:
        first = put(tier, IDS[:128])
        second = put(tier, IDS[:250], first)
        stranger = replace(first, uid=new_uid())
        put(tier, IDS[:200], stranger, stored=False)
        assert tier.stats().refused == 1
    # As after the first was lost and computed anew: its continuation is of no use, until it is computed anew, too.
    (tmp_path / first.file_name).unlink()
    with opened(tmp_path) as tier:
        assert found(tier, names_of(IDS[:250])) == []
        again = put(tier, IDS[:128])
        assert [entry.name for entry in found(tier, names_of(IDS[:250]))] == [first.name]
        second_again = put(tier, IDS[:250], again)
        assert second_again.name == second.name
        chain = found(tier, names_of(IDS[:250]))
        assert read(tier, chain[1], IDS) == data_of(second_again)


def test_what_is_there_already_stays(tmp_path):
    with opened(tmp_path) as tier, opened(tmp_path) as other:
        first = put(tier, IDS[:128])
        put(other, IDS[:128], stored=False)
        assert read(other, found(other, names_of(IDS))[0], IDS) == data_of(first)


def test_two_servers_find_each_others_files(tmp_path):
    with opened(tmp_path) as one, opened(tmp_path) as other:
        first = put(one, IDS[:128])
        wait_for(lambda: other.lookup(first.name))
        second = put(other, IDS[:250], first)
        wait_for(lambda: one.lookup(second.name))
        assert read(one, found(one, names_of(IDS[:250]))[1], IDS) == data_of(second)
        entry = other.lookup(first.name)
        (tmp_path / first.file_name).unlink()
        with pytest.raises(SnapshotGone):
            read(other, entry, IDS)
        assert other.stats().misses == 1
        wait_for(lambda: one.lookup(first.name) is None)
        assert found(one, names_of(IDS[:250])) == []


def test_a_file_that_was_replaced_since_it_was_found_is_a_miss(tmp_path):
    with opened(tmp_path) as tier:
        first = put(tier, IDS[:128])
        entry = tier.lookup(first.name)
        again = replace(header_of(IDS[:128]), name=first.name)
        write_snapshot(tmp_path, again, IDS[:128], [data_of(again)], replace_existing=lambda: True)
        with pytest.raises(SnapshotGone, match="not what it was"):
            read(tier, entry, IDS)
        assert read(tier, tier.lookup(first.name), IDS) == data_of(again)
        assert tier.stats().corrupt == 0


def test_a_good_file_that_has_taken_the_place_of_a_bad_one_stays(tmp_path):
    class Disk(FileSystem):
        def read(self, descriptor, buffer, offset):
            count = super().read(descriptor, buffer, offset)
            if offset == 4096 and not again:
                again.append(replace(header_of(IDS[:128]), name=first.name))
                write_snapshot(tmp_path, again[0], IDS[:128], [data_of(again[0])], replace_existing=lambda: True)
                buffer[0] ^= 1
            return count

    again = []
    with opened(tmp_path, files=Disk()) as tier:
        first = put(tier, IDS[:128])
        with pytest.raises(SnapshotGone, match="was replaced"):
            read(tier, tier.lookup(first.name), IDS)
        assert read(tier, tier.lookup(first.name), IDS) == data_of(again[0])
        assert tier.stats().corrupt == 0


def test_what_is_stored_during_a_look_at_the_directory_is_not_taken_for_lost(tmp_path):
    class Disk(FileSystem):
        def names(self, directory):
            names = super().names(directory)
            if armed and armed.pop():
                put(tier, IDS[:128])
                stored.set()
            return names

    armed, stored, events = [], threading.Event(), []
    with opened(tmp_path, files=Disk(), on_event=lambda kind, entry: events.append(kind)) as tier:
        armed.append(True)
        assert stored.wait(PATIENCE)
        time.sleep(0.2)
        assert events == ["stored"]


def test_changes_in_one_tick_of_the_clock_are_seen(tmp_path):
    with opened(tmp_path) as tier:
        time.sleep(0.1)
        before = tmp_path.stat().st_mtime_ns
        header = header_of(IDS[:128])
        write_snapshot(tmp_path, header, IDS[:128], [data_of(header)])
        os.utime(tmp_path, ns=(before, before))
        wait_for(lambda: tier.lookup(header.name))


def test_the_least_recently_used_goes_first_and_what_it_continues_last(tmp_path):
    with opened(tmp_path, limit=4 * SIZE) as tier:
        prompts = [prompt(seed, 128) for seed in range(4)]
        headers = [put(tier, ids) for ids in prompts]
        for age, header in enumerate(headers):
            os.utime(tmp_path / header.file_name, (1000 + age, 1000 + age))
    with opened(tmp_path, limit=4 * SIZE) as tier:
        # The oldest is read, the second oldest used by another server, which this one sees only on the disk.
        read(tier, tier.lookup(headers[0].name), prompts[0])
        os.utime(tmp_path / headers[1].file_name)
        newer = put(tier, prompt(10, 128))
        left = {header.name for header in (newer, *headers) if tier.lookup(header.name) is not None}
        assert left == {newer.name, headers[0].name, headers[1].name, headers[3].name}
        assert tier.stats().evictions == 1 and tier.stats().files == 4
    with opened(tmp_path, limit=4 * SIZE) as tier:
        # A continuation keeps what it continues, and is not written at its cost.
        child = put(tier, np.append(prompts[0], IDS[:72]), headers[0])
        os.utime(tmp_path / headers[0].file_name, (1, 1))
        for seed in (11, 12):
            put(tier, prompt(seed, 128))
        assert found(tier, names_of(np.append(prompts[0], IDS[:72])))[-1].name == child.name
        assert tier.stats().used_bytes <= 4 * SIZE
    assert len(os.listdir(tmp_path)) == 4


def test_what_nothing_leads_to_goes_before_all_others(tmp_path):
    with opened(tmp_path, limit=3 * SIZE) as tier:
        old = put(tier, prompt(0, 128))
        first = put(tier, IDS[:128])
        orphan = put(tier, IDS[:192], first)
        (tmp_path / first.file_name).unlink()
        wait_for(lambda: tier.lookup(first.name) is None)
        put(tier, prompt(1, 128))
        put(tier, prompt(2, 128))
        assert tier.lookup(orphan.name) is None and tier.lookup(old.name) is not None


def test_a_continuation_is_not_written_at_the_cost_of_what_it_continues(tmp_path):
    with opened(tmp_path, limit=2 * SIZE) as tier:
        first, other = put(tier, IDS[:128]), put(tier, prompt(0, 128))
        second = put(tier, IDS[:256], first)
        assert tier.lookup(other.name) is None
        assert [entry.name for entry in found(tier, names_of(IDS[:256]))] == [first.name, second.name]
        put(tier, IDS[:384], second, stored=False)
        assert tier.stats().files == 2 and tier.stats().refused == 1


def test_what_is_larger_than_the_limit_is_refused(tmp_path):
    with opened(tmp_path, limit=SIZE - 1) as tier:
        put(tier, IDS[:128], stored=False)
        assert tier.stats().refused == 1 and os.listdir(tmp_path) == []


def test_puts_never_wait_and_are_refused_when_too_many_do(tmp_path):
    disk = HeldDisk("write")
    tier = DiskTier(tmp_path, LIMIT, KEY, files=disk, queue_bytes=7000)
    prompts = [prompt(seed, 128) for seed in range(4)]
    headers = [header_of(ids) for ids in prompts]
    begin = time.monotonic()
    futures = [tier.put(headers[0], prompts[0], [data_of(headers[0])])]
    twice = tier.put(headers[0], prompts[0], [data_of(headers[0])])
    futures += [tier.put(header, ids, [data_of(header)]) for header, ids in zip(headers[1:], prompts[1:])]
    assert time.monotonic() - begin < HELD_SECONDS / 2
    assert [future.done() for future in futures] == [False, False, True, True]
    assert twice.result(0) is False and tier.stats().refused == 3
    disk.go_on.set()
    assert [future.result(PATIENCE) for future in futures] == [True, True, False, False]
    late = tier.put(headers[2], prompts[2], [data_of(headers[2])])
    assert late.result(PATIENCE)
    assert tier.close()


def test_data_may_be_made_while_they_are_written(tmp_path):
    with opened(tmp_path) as tier:
        header, slab = header_of(IDS[:128]), bytearray(100)
        data = data_of(header)

        def slabs():
            for begin in range(0, len(data), 100):
                slab[:] = data[begin : begin + 100]
                yield slab

        assert tier.put(header, IDS[:128], slabs()).result(PATIENCE)
        assert read(tier, tier.lookup(header.name), IDS) == data


def test_data_that_fail_are_not_stored(tmp_path, caplog):
    def slabs():
        yield bytes(1000)
        raise RuntimeError("the device is gone")

    with opened(tmp_path) as tier:
        assert not tier.put(header_of(IDS[:128]), IDS[:128], slabs()).result(PATIENCE)
        assert not tier.put(header_of(IDS[:129]), IDS[:129], [bytes(1)]).result(PATIENCE)
        assert tier.stats().write_errors == 2 and os.listdir(tmp_path) == []
        assert "the device is gone" in caplog.text and "1 bytes of data instead of 3000" in caplog.text
        put(tier, IDS[:128])


def test_leftovers_of_killed_writers_go_when_they_are_old(tmp_path):
    for name, age in ((".tmp-1-old", 3700), (".tmp-1-new", 3500), ("readme", 9999)):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with opened(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [".tmp-1-new", "readme"]


def test_closing_writes_what_waits(tmp_path):
    tier = DiskTier(tmp_path, LIMIT, KEY)
    headers = [(header_of(prompt(seed)), prompt(seed)) for seed in range(20)]
    futures = [tier.put(header, ids, [data_of(header)]) for header, ids in headers]
    assert tier.close(PATIENCE)
    assert all(future.result(0) for future in futures)
    assert tier.put(*headers[0], [data_of(headers[0][0])]).cancelled()
    assert tier.read(tier.lookup(headers[0][0].name), [bytearray(3000)], headers[0][1]).cancelled()


def test_closing_takes_no_longer_than_it_may(tmp_path):
    disk = HeldDisk("write")
    tier = DiskTier(tmp_path, LIMIT, KEY, files=disk)
    headers = [(header_of(prompt(seed)), prompt(seed)) for seed in range(2)]
    futures = [tier.put(header, ids, [data_of(header)] * 1) for header, ids in headers]
    assert disk.reached.wait(PATIENCE)
    begin = time.monotonic()
    assert not tier.close(0.2)
    assert time.monotonic() - begin < HELD_SECONDS / 2
    assert futures[1].cancelled()
    disk.go_on.set()
    futures[0].result(PATIENCE)
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("cache-")])
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


def test_other_users_are_kept_out(tmp_path, caplog):
    tmp_path.chmod(0o755)
    with opened(tmp_path):
        assert "is open to other users (mode 755, not 700)" in caplog.text


def test_what_cannot_be_a_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(OSError):
            DiskTier(path, LIMIT, KEY)


def test_names_alone_say_nothing(tmp_path):
    with opened(tmp_path) as tier:
        first = put(tier, IDS[:128])
    other = header_of(IDS[:192])
    (tmp_path / first.file_name).rename(tmp_path / file_name(other.name))
    with opened(tmp_path) as tier:
        assert found(tier, names_of(IDS)) == []
        assert tier.stats().corrupt == 1
    assert os.listdir(tmp_path) == []

"""Names under which prompts are saved: their snapshots stay, and faults of their files are found."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from dataclasses import replace

import pytest
from faulty_disks import FullDisk, ReadOnlyDisk, failure
from stored_snapshots import KEY, LIMIT, PATIENCE, header_of, keep, opened, prompt, put
from test_cache_command import damage, run

from shadowkv.prefix_cache.disk.files import SnapshotGone
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.header import file_name
from shadowkv.prefix_cache.disk.names import Names, Save
from shadowkv.prefix_cache.protocol import UnknownName, UnusableName

IDS = prompt(7, 400)
SIZE = header_of(IDS[:128]).file_bytes


def test_what_a_name_keeps_is_found_again_after_a_restart(tmp_path):
    with opened(tmp_path) as tier:
        first = put(tier, IDS[:128])
        second = put(tier, IDS[:256], first)
        keep(tier, "a.b-C_1", second, 192)
        assert tier.stats().pinned_bytes == first.file_bytes + second.file_bytes
    file = tmp_path / "names" / "a.b-C_1.json"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
    assert set(json.loads(file.read_text())) == {"format", "key", "tokens", "snapshots", "saved"}
    with opened(tmp_path) as tier:
        save, chain = tier.kept("a.b-C_1").result(PATIENCE)
        assert (save.tokens, save.snapshots) == (192, (first.name, second.name))
        assert [entry.uid for entry in chain] == [first.uid, second.uid]
        with pytest.raises(UnknownName, match="nothing is saved as 'other'"):
            tier.kept("other").result(PATIENCE)
        keep(tier, "a.b-C_1", first)
        assert tier.kept("a.b-C_1").result(PATIENCE)[0].snapshots == (first.name,)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a\\b", "x" * 65, "ä", "a\n", "a\0", " a", "%2e%2e"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    names = Names(tmp_path, FileSystem())
    if name == "..":
        assert names.path(name) == tmp_path / "names" / "...json"
        return
    for use in (
        names.path,
        names.read,
        names.remove,
        lambda bad: names.write(bad, Save.new(KEY.digest, 1, ("0" * 40,))),
    ):
        with pytest.raises(ValueError, match="is no valid name: use 1 to 64 of A-Z"):
            use(name)
    assert os.listdir(tmp_path) == []


def test_what_names_keep_is_not_evicted(tmp_path, caplog):
    with opened(tmp_path, 3 * SIZE) as tier:
        pinned = put(tier, IDS[:128])
        keep(tier, "mine", pinned)
        others = [put(tier, prompt(seed, 128)) for seed in range(4)]
        assert tier.lookup(pinned.name) and [bool(tier.lookup(one.name)) for one in others] == [
            False,
            False,
            True,
            True,
        ]
        keep(tier, "other", others[2])
        keep(tier, "third", others[3])
        # There is no room left: what is kept stays, and what is new is refused.
        put(tier, prompt(9, 128), stored=False)
        assert (tier.stats().refused, tier.stats().pinned_bytes, tier.stats().evictions) == (1, 3 * SIZE, 2)
        keep(tier, "mine", others[3])  # in place of what it kept
        put(tier, prompt(9, 128))
        assert tier.lookup(pinned.name) is None and tier.lookup(others[2].name) and tier.lookup(others[3].name)


def test_what_another_server_has_named_is_not_evicted(tmp_path):
    with opened(tmp_path, 3 * SIZE, watch_seconds=60) as mine:  # it sees the first of their files, and not the second
        first = put(mine, IDS[:128])
        with opened(tmp_path) as others:
            second = put(others, IDS[:192], others.chain(first.name)[0])
            keep(others, "theirs", second)
        for seed in range(4):
            put(mine, prompt(seed, 128))
        assert mine.lookup(first.name) is not None


def test_what_another_server_names_while_this_one_evicts_stays(tmp_path):
    class Watched(FileSystem):
        """Another server gives a file a name while this one, which has not seen it, removes the file before that."""

        evicted = ""

        def remove(self, path):
            if path.name == self.evicted:
                keep(others, "theirs", named)
            super().remove(path)

    disk = Watched()
    with opened(tmp_path, 3 * SIZE, files=disk, watch_seconds=60) as mine, opened(tmp_path) as others:
        oldest, named, newest = (put(mine, prompt(seed, 128)) for seed in range(3))
        while not others.lookup(named.name):
            time.sleep(0.01)
        disk.evicted = oldest.file_name
        large = put(mine, prompt(3, 128), layers=6)
        assert mine.lookup(large.name) and mine.lookup(oldest.name) is mine.lookup(newest.name) is None
        assert (tmp_path / named.file_name).exists()


def test_a_name_for_what_has_just_been_removed_is_refused(tmp_path):
    with opened(tmp_path) as tier:
        header = put(tier, IDS[:128])
        chain = tier.chain(header.name)
        (tmp_path / header.file_name).unlink()
        with pytest.raises(SnapshotGone, match="is not there any more"):
            tier.keep("x", 128, chain).result(PATIENCE)
        assert not (tmp_path / "names").exists() and tier.lookup(header.name) is None


def test_what_is_gone_or_of_another_key_is_not_served(tmp_path):
    with opened(tmp_path) as tier:
        first = put(tier, IDS[:128])
        second = put(tier, IDS[:256], first)
        keep(tier, "x", second)
    with (
        opened(tmp_path, key=replace(KEY, quantization=None)) as tier,
        pytest.raises(UnusableName, match="another model"),
    ):
        tier.kept("x").result(PATIENCE)
    (tmp_path / first.file_name).unlink()
    with opened(tmp_path) as tier, pytest.raises(UnknownName, match="are missing"):
        tier.kept("x").result(PATIENCE)


def changed(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[:-5],
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: "9" * 5000,
        lambda text: text + " " * 2**20,
        lambda text: text[:-1] + ',"tokens":128}',
        lambda text: "\xff\xfe",
        changed(format="other"),
        changed(key="../../etc/passwd"),
        changed(snapshots=[]),
        changed(snapshots=["../../../etc/passwd"]),
        changed(snapshots=["0" * 40] * 2),
        changed(snapshots="0" * 40),
        changed(tokens=True),
        changed(tokens=-1),
        changed(tokens=10**30),
        changed(tokens=129),
        changed(saved=0.5),
        changed(more=1),
    ],
)
def test_a_file_that_is_not_what_was_written_is_refused(tmp_path, harm):
    with opened(tmp_path) as tier:
        header = put(tier, IDS[:128])
        keep(tier, "x", header)
        path = tmp_path / "names" / "x.json"
        path.write_text(harm(path.read_text()), encoding="latin-1")
        with pytest.raises(UnusableName, match=r"names/x\.json is not what was written: .*; save it anew"):
            tier.kept("x").result(PATIENCE)
        keep(tier, "x", header)
        assert tier.kept("x").result(PATIENCE)[0].tokens == 128


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    (tmp_path / "names").mkdir()
    path, names = tmp_path / "names" / "x.json", Names(tmp_path, FileSystem())
    if kind == "link":
        (tmp_path / "secret").write_text("{}")
        path.symlink_to(tmp_path / "secret")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(UnusableName, match=r"it is a link|it is not a regular file"):
        names.read("x")
    assert names.refresh() == frozenset() and list(names.all()[1]) == ["x"]


def test_bad_files_are_told_of_once(tmp_path, caplog):
    names = Names(tmp_path, FileSystem())
    names.write("x", Save.new(KEY.digest, 1, ("0" * 40,)))
    (tmp_path / "names" / "bad.json").write_text("{}")
    (tmp_path / "names" / "no name.json").write_text("{}")
    (tmp_path / "names" / "note").write_text("{}")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert names.refresh() == {"0" * 40}
    assert len(caplog.records) == 1 and "bad.json is not what was written" in caplog.text
    old = time.time() - 60
    os.utime(tmp_path / "names", (old, old))
    assert names.refresh() == {"0" * 40}
    (tmp_path / "names" / "x.json").unlink()
    assert names.refresh() == frozenset()


def test_a_disk_that_takes_no_name(tmp_path):
    with opened(tmp_path) as tier:
        header = put(tier, IDS[:128])
        keep(tier, "x", header)
    before = (tmp_path / "names" / "x.json").read_text()
    for disk in (ReadOnlyDisk(), FullDisk(tmp_path, 100)):
        with opened(tmp_path, files=disk) as tier, pytest.raises(OSError):
            keep(tier, "x", header, 64)
    assert (tmp_path / "names" / "x.json").read_text() == before
    assert not list(tmp_path.glob(".tmp-*"))


def test_nothing_is_evicted_while_the_names_cannot_be_read(tmp_path):
    class Unreadable(FileSystem):
        def stat(self, path):
            if path.name == "names":
                raise failure(errno.EIO)
            return super().stat(path)

    with opened(tmp_path, SIZE, files=Unreadable()) as tier:
        header = put(tier, IDS[:128])
        put(tier, prompt(1, 128), stored=False)
        assert tier.lookup(header.name) and tier.stats().write_errors == 1


def test_commands_know_names(tmp_path, capsys):
    with opened(tmp_path, LIMIT) as tier:
        pinned, other = put(tier, IDS[:128]), put(tier, prompt(1, 128))
        keep(tier, "mine", pinned, 64)
    (tmp_path / "names" / "bad.json").write_text("{}")
    code, text, errors = run(capsys, "ls", "--dir", tmp_path)
    assert code == 0 and text.splitlines()[-1] == f"saved as mine: 64 tokens, up to {pinned.name}"
    assert "bad.json is not what was written" in errors
    rows = json.loads(run(capsys, "ls", "--dir", tmp_path, "--json")[1])
    assert {row["name"]: row["saved_as"] for row in rows} == {pinned.name: ["mine"], other.name: []}
    text = run(capsys, "prune", "--dir", tmp_path, "--max-gib", "0")[1]
    assert text.startswith("1 file removed") and text.endswith("; names keep 7.43 KiB\n")
    assert (tmp_path / pinned.file_name).exists() and not (tmp_path / other.file_name).exists()
    assert run(capsys, "forget", "--dir", tmp_path, "none") == (2, "", "error: nothing is saved as 'none'\n")
    assert "is no valid name" in run(capsys, "forget", "--dir", tmp_path, "../x")[2]
    assert run(capsys, "forget", "--dir", tmp_path, "bad", "mine")[0] == 0
    assert run(capsys, "prune", "--dir", tmp_path, "--max-gib", "0")[1].startswith("1 file removed")


def test_verify_tells_of_names(tmp_path, capsys):
    with opened(tmp_path) as tier:
        first = put(tier, IDS[:128])
        keep(tier, "whole", first)
        keep(tier, "mine", put(tier, IDS[:256], first))
    assert run(capsys, "verify", "--dir", tmp_path)[:2] == (0, "2 good snapshots, 0 bad\n")
    damage(next(path for path in tmp_path.glob(file_name("*")) if path.name != first.file_name))
    (tmp_path / "names" / "bad.json").write_text("{}")
    code, text, _ = run(capsys, "verify", "--dir", tmp_path)
    bad, lost, end = text.splitlines()[1:]
    assert code == 1 and "bad.json is not what was written" in bad and bad.endswith("; save it anew; left there")
    assert lost == "snapshots of the saved name 'mine' are missing, or are not those that were saved; left there"
    assert end == "1 good snapshot, 1 bad; 2 bad names"
    assert run(capsys, "verify", "--dir", tmp_path, first.name)[0] == 0
    text = run(capsys, "verify", "--dir", tmp_path, "--remove", "--json")[1]
    assert {one["name"]: one["action"] for one in json.loads(text)["bad_names"]} == {
        "bad": "removed",
        "mine": "left there",
    }
    # Its snapshot has gone by now, and may come again.
    code, text, _ = run(capsys, "verify", "--dir", tmp_path)
    assert (code, len(text.splitlines())) == (1, 2) and "'mine'" in text
    assert sorted(os.listdir(tmp_path / "names")) == ["mine.json", "whole.json"]


def test_prune_all_removes_names_too(tmp_path, capsys):
    with opened(tmp_path) as tier:
        keep(tier, "mine", put(tier, IDS[:128]))
    assert run(capsys, "prune", "--dir", tmp_path, "--all")[1].startswith("1 file removed")
    assert os.listdir(tmp_path / "names") == [] and not list(tmp_path.glob(file_name("*")))

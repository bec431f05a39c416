"""``python -m shadowkv.prefix_cache``: its output, the files that it removes, and those that it imports."""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace

import pytest
from stored_snapshots import data_of, found, header_of, names_of, opened, prompt, put, read

from shadowkv.prefix_cache.__main__ import main
from shadowkv.prefix_cache.disk.files import write_snapshot
from shadowkv.prefix_cache.page_hashes import new_uid

IDS = prompt(7, 400)


@pytest.fixture
def stored(tmp_path):
    """A directory with a chain of two snapshots, and another snapshot."""
    directory = tmp_path / "cache"
    with opened(directory) as tier:
        first = put(tier, IDS[:128])
        second = put(tier, IDS[:250], first)
        other = put(tier, prompt(8))
    return directory, first, second, other


def damage(path):
    """Flips a bit of the data."""
    raw = bytearray(path.read_bytes())
    raw[-1500] ^= 1
    path.write_bytes(raw)


def run(capsys, *arguments):
    """Exit code, output and errors of a command."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_it_runs_as_a_module(stored):
    command = [sys.executable, "-m", "shadowkv.prefix_cache"]
    result = subprocess.run([*command, "verify", "--dir", stored[0]], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "3 good snapshots, 0 bad\n", "")
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert all(name in result.stdout for name in ("ls", "verify", "prune", "export", "import"))


def test_ls_shows_what_is_there(stored, capsys):
    directory, first, second, other = stored
    os.utime(directory / second.file_name, (time.time() - 7300,) * 2)
    (directory / other.file_name).write_bytes(b"cut")
    code, text, errors = run(capsys, "ls", "--dir", directory)
    lines = text.splitlines()
    assert code == 0 and errors == "1 more files are bad: see verify\n"
    assert lines[0].split() == ["NAME", "TOKENS", "SIZE", "STATE", "USED", "CONTINUES", "RANKS", "MODEL"]
    assert lines[1].split() == [first.name, "0-128", "7.43", "KiB", "-", *lines[1].split()[5:7], "2", "blake2b:0a1b"]
    assert lines[2].split()[:2] == [second.name, "128-250"] and "2h ago" in lines[2] and first.name[:10] in lines[2]
    assert lines[3].startswith("2 snapshots, ")
    (directory / first.file_name).unlink()
    assert "(lost)" in run(capsys, "ls", "--dir", directory)[1]
    rows = json.loads(run(capsys, "ls", "--dir", directory, "--json")[1])
    assert [(row["name"], row["usable"], row["length"]) for row in rows] == [(second.name, False, 250)]


def test_verify_finds_what_is_bad_and_removes_it_if_asked(stored, capsys):
    directory, first, _, other = stored
    damage(directory / other.file_name)
    assert run(capsys, "verify", "--dir", directory, first.name[:12])[0] == 0
    code, text, _ = run(capsys, "verify", "--dir", directory)
    problem = f"{directory / other.file_name}: its data does not match the checksum; left there"
    assert (code, text) == (1, f"{problem}\n2 good snapshots, 1 bad\n")
    code, text, _ = run(capsys, "verify", "--dir", directory, "--remove", "--json")
    assert code == 1 and json.loads(text)["bad"][0]["action"] == "removed"
    assert run(capsys, "verify", "--dir", directory)[:2] == (0, "2 good snapshots, 0 bad\n")


def test_prune_removes_the_oldest_first(stored, capsys):
    directory, first, second, other = stored
    os.utime(directory / first.file_name, (1, 1))
    os.utime(directory / second.file_name, (time.time() - 90_000,) * 2)
    (directory / ".tmp-1-x").write_bytes(b"")
    assert run(capsys, "prune", "--dir", directory, "--older-than", "26h")[1].startswith("0 files removed")
    # What is continued is as new as what continues it, and the longer one goes first.
    limit = (first.file_bytes + other.file_bytes + 1) / 2**30
    assert run(capsys, "prune", "--dir", directory, "--max-gib", f"{limit:.12f}")[1].startswith("1 file removed")
    assert {first.file_name, other.file_name, ".tmp-1-x"} == set(os.listdir(directory))
    assert run(capsys, "prune", "--dir", directory, "--older-than", "1d")[1].startswith("1 file removed")
    assert {other.file_name, ".tmp-1-x"} == set(os.listdir(directory))
    damage(directory / other.file_name)
    (directory / first.file_name).write_bytes(b"")
    assert run(capsys, "prune", "--dir", directory, "--all")[1].startswith("2 files removed")
    assert os.listdir(directory) == [".tmp-1-x"]


def test_a_chain_goes_from_one_directory_to_another(stored, tmp_path, capsys):
    directory, first, second, _ = stored
    target, archive = tmp_path / "b" / "cache", tmp_path / "a.tar"
    code, text, _ = run(capsys, "export", "--dir", directory, second.name[:10], second.file_name, archive)
    assert (code, text) == (0, f"2 snapshots exported to {archive}\n")
    code, text, _ = run(capsys, "import", "--dir", target, archive)
    assert (code, text.splitlines()) == (0, [f"{header.file_name}: imported" for header in (first, second)])
    assert target.stat().st_mode & 0o777 == 0o700
    assert "there already" in run(capsys, "import", "--dir", target, archive)[1]
    with opened(target) as tier:
        chain = found(tier, names_of(IDS[:250]))
        assert [read(tier, entry, IDS) for entry in chain] == [data_of(first), data_of(second)]
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "b", "cache"]


def test_what_is_bad_is_not_exported(stored, tmp_path, capsys):
    directory, first, second, _ = stored
    damage(directory / first.file_name)
    code, _, errors = run(capsys, "export", "--dir", directory, second.name, tmp_path / "a.tar")
    assert code == 2 and errors.startswith("error: ") and "does not match the checksum" in errors
    (directory / first.file_name).unlink()
    code, _, errors = run(capsys, "export", "--dir", directory, second.name, tmp_path / "a.tar")
    assert code == 2 and "continues is missing" in errors
    assert os.listdir(tmp_path) == ["cache"]


def tar_of(path, *members):
    """A tar file of (name, bytes, changes of the member)."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data, changes in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for attribute, value in changes.items():
                setattr(member, attribute, value)
            archive.addfile(member, io.BytesIO(data))


def test_hostile_members_are_refused(stored, tmp_path, capsys):
    directory, first, second, other = stored
    good, bad = ((directory / header.file_name).read_bytes() for header in (first, other))
    bad = bad[:-1500] + bytes([bad[-1500] ^ 1]) + bad[-1499:]
    archive, target = tmp_path / "a.tar", tmp_path / "target"
    link = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
    tar_of(
        archive,
        (f"../{first.file_name}", good, {}),
        (f"/tmp/{first.file_name}", good, {}),
        (f"./{first.file_name}", good, {}),
        ("notes\x1b[31m.txt", b"x", {}),
        (second.file_name, b"", link),
        (second.file_name, b"", {**link, "type": tarfile.LNKTYPE}),
        (second.file_name, b"", {"type": tarfile.DIRTYPE}),
        (second.file_name, b"", {"type": tarfile.FIFOTYPE}),
        (second.file_name, b"", {"type": tarfile.GNUTYPE_SPARSE}),
        (second.file_name, good, {}),
        (other.file_name, bad, {}),
        (second.file_name, (directory / second.file_name).read_bytes(), {}),
        (first.file_name, good, {"mode": 0o6777}),
    )
    code, text, _ = run(capsys, "import", "--dir", target, archive)
    lines = text.splitlines()
    assert code == 1 and len(lines) == 13 and "\x1b" not in text
    assert all("the file name is neither" in line for line in lines[:4])
    assert all("not a regular file" in line for line in lines[4:9])
    assert "it is the file of" in lines[9] and "does not match the checksum" in lines[10]
    assert "the snapshot that it continues is missing" in lines[11] and lines[12].endswith("imported")
    assert os.listdir(target) == [first.file_name]
    assert (target / first.file_name).stat().st_mode & 0o7777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "cache", "target"]


@pytest.mark.parametrize("giant", ["member", "header"])
def test_sizes_are_not_believed(stored, tmp_path, capsys, giant):
    _, first, _, _ = stored
    member = tarfile.TarInfo(first.file_name)
    member.size = 2**40
    if giant == "header":
        member.type = tarfile.XHDTYPE
    archive, target = tmp_path / "a.tar", tmp_path / "target"
    archive.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    code, _, errors = run(capsys, "import", "--dir", target, archive)
    assert code == 2 and "was cut off" in errors
    assert ("but the file ends before" in errors) == (giant == "member")
    assert os.listdir(target) == []


def test_an_archive_that_was_cut_is_an_error(stored, tmp_path, capsys):
    directory, _, second, _ = stored
    archive, target = tmp_path / "a.tar", tmp_path / "target"
    assert run(capsys, "export", "--dir", directory, second.name, archive)[0] == 0
    raw = archive.read_bytes()
    for size in (0, 100, 600, 5000, 9000, 9300):
        archive.write_bytes(raw[:size])
        code, _, errors = run(capsys, "import", "--dir", target, archive)
        assert code == 2 and "was cut off" in errors and len(errors.splitlines()) == 1
        assert not [name for name in os.listdir(target) if name.startswith(".tmp")]


def test_what_is_there_and_of_no_use_is_replaced_by_an_import(stored, tmp_path, capsys):
    directory, first, second, _ = stored
    archive, target = tmp_path / "a.tar", tmp_path / "target"
    assert run(capsys, "export", "--dir", directory, second.name, archive)[0] == 0
    orphan = replace(second, uid=new_uid(), parent_uid=new_uid())
    target.mkdir()
    write_snapshot(target, orphan, IDS[128:250], [data_of(orphan)])
    (target / first.file_name).write_bytes(b"bad")
    assert run(capsys, "import", "--dir", target, archive)[0] == 0
    with opened(target) as tier:
        assert [entry.uid for entry in found(tier, names_of(IDS[:250]))] == [first.uid, second.uid]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["look", "--dir", "."],
        ["ls"],
        ["ls", "--dir", "nowhere"],
        ["ls", "--dir", "a.tar"],
        ["verify", "--dir", "cache", "ffffffffff-"],
        ["verify", "--dir", "cache", ""],
        ["prune", "--dir", "cache"],
        ["prune", "--dir", "cache", "--all", "--max-gib", "1"],
        ["prune", "--dir", "cache", "--max-gib", "-1"],
        ["prune", "--dir", "cache", "--max-gib", "nan"],
        ["prune", "--dir", "cache", "--older-than", "7"],
        ["export", "--dir", "cache", "a.tar"],
        ["export", "--dir", "cache", "NAME", "a.tar"],
        ["export", "--dir", "cache", "NAME", "nowhere/a.tar"],
        ["import", "--dir", "target", "nowhere.tar"],
        ["import", "--dir", "target", "a.tar"],
        ["import", "--dir", "a.tar", "a.tar"],
    ],
)
def test_wrong_use_is_a_line_and_changes_nothing(stored, tmp_path, capsys, monkeypatch, arguments):
    (tmp_path / "a.tar").write_bytes(b"no tar file")
    monkeypatch.chdir(tmp_path)
    arguments = [stored[1].name if argument == "NAME" else argument for argument in arguments]
    code, text, errors = run(capsys, *arguments)
    assert code == 2 and text == "" and errors.startswith("error: ") and len(errors.splitlines()) == 1
    assert len(os.listdir(tmp_path / "cache")) == 3 and (tmp_path / "a.tar").read_bytes() == b"no tar file"


def test_a_snapshot_of_other_ids_has_no_parent_to_go_with(stored):
    with pytest.raises(ValueError, match="go together"):
        header_of(IDS, parent_uid=new_uid())

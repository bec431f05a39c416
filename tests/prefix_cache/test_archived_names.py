"""Names in archives: they come after their snapshots, are checked against these, and replace no existing name."""

import os
import tarfile

import pytest
from stored_snapshots import KEY, PATIENCE, keep, opened, prompt, put
from test_cache_command import run, tar_of

from shadowkv.kvcache.snapshots.dataclass_json import MAX_BYTES, to_json
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.names import Names, Save

IDS = prompt(7, 400)


def saved(directory):
    """The saves of a directory by name."""
    return Names(directory, FileSystem()).all()[0]


def members(archive):
    """Names in a tar file, in order."""
    with tarfile.open(archive) as tar:
        return tar.getnames()


@pytest.fixture
def named(tmp_path):
    """A directory with names for a chain of two snapshots, for its first one, and for another snapshot."""
    directory = tmp_path / "cache"
    with opened(directory) as tier:
        first = put(tier, IDS[:128])
        second = put(tier, IDS[:250], first)
        other = put(tier, prompt(8))
        for name, header, tokens in (("long", second, 200), ("short", first, 128), ("other", other, 200)):
            keep(tier, name, header, tokens)
    return directory, first, second, other


def test_names_go_along_with_what_they_keep(named, tmp_path, capsys):
    directory, first, second, _ = named
    archive, target = tmp_path / "a.tar", tmp_path / "target"
    code, text, _ = run(capsys, "export", "--dir", directory, "long", archive)
    assert (code, text) == (0, f"2 snapshots exported to {archive}, saved as long\n")
    assert members(archive) == [first.file_name, second.file_name, "names/long.json"]
    code, text, _ = run(capsys, "import", "--dir", target, archive)
    assert code == 0 and text.splitlines()[-1] == "names/long.json: imported"
    with opened(target, first.file_bytes + second.file_bytes + 1) as tier:
        save, chain = tier.kept("long").result(PATIENCE)
        assert save == saved(directory)["long"] and [entry.uid for entry in chain] == [first.uid, second.uid]
        put(tier, prompt(8), stored=False)  # nothing makes room for it
    assert [path.stat().st_mode & 0o777 for path in (target / "names", target / "names/long.json")] == [0o700, 0o600]
    for number, (text, names) in enumerate(
        [(first.name, ["short"]), (second.name, ["long", "short"]), ("other", ["other"])]
    ):
        archive = tmp_path / f"{number}.tar"
        assert run(capsys, "export", "--dir", directory, text, archive)[0] == 0
        assert [name for name in members(archive) if "/" in name] == [f"names/{name}.json" for name in names]


def test_a_name_that_is_not_all_there_is_not_exported(named, tmp_path, capsys):
    directory, first, second, _ = named
    (directory / second.file_name).unlink()
    (directory / "names" / "bad.json").write_text("{}")
    for name, problem in (
        ("long", "are missing"),
        ("bad", "is not what was written"),
        ("none", "no snapshot's name"),
    ):
        code, _, errors = run(capsys, "export", "--dir", directory, name, tmp_path / "a.tar")
        assert code == 2 and problem in errors and name in errors
    assert run(capsys, "export", "--dir", directory, first.name, tmp_path / "a.tar")[0] == 0
    assert members(tmp_path / "a.tar") == [first.file_name, "names/short.json"]


def test_a_name_that_is_there_is_not_overwritten(named, tmp_path, capsys):
    directory, first, _, other = named
    archive, target = tmp_path / "a.tar", tmp_path / "target"
    assert run(capsys, "export", "--dir", directory, "short", "other", archive)[0] == 0
    with opened(target) as tier:
        keep(tier, "short", put(tier, IDS[:128], uid=first.uid))
        keep(tier, "other", tier.chain(first.name)[-1])
    before = (target / "names" / "short.json").read_text(), (target / "names" / "other.json").read_text()
    code, text, _ = run(capsys, "import", "--dir", target, archive)
    assert (code, text.splitlines()[2:]) == (
        1,
        [
            "names/short.json: there already",
            "names/other.json: refused: something else is saved as 'other' here; forget that first",
        ],
    )
    assert before == ((target / "names" / "short.json").read_text(), (target / "names" / "other.json").read_text())
    (target / "names" / "other.json").write_text("{}")
    assert "refused: " in run(capsys, "import", "--dir", target, archive)[1]
    assert (target / "names" / "other.json").read_text() == "{}"
    assert run(capsys, "forget", "--dir", target, "other")[0] == 0
    assert run(capsys, "import", "--dir", target, archive)[0] == 0
    assert saved(target)["other"].snapshots == (other.name,)


def test_hostile_names_are_refused(named, tmp_path, capsys):
    directory, first, second, other = named
    archive, target = tmp_path / "a.tar", tmp_path / "target"

    def text(tokens=128, snapshots=(first.name,), key=KEY.digest):
        return to_json(Save.new(key, tokens, snapshots)).encode()

    def file(header):
        return (header.file_name, (directory / header.file_name).read_bytes(), {})

    link = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
    cases = [
        *[
            (name, text(), {}, "the file name is neither")
            for name in ("names/../x.json", "names/x", "x.json", "/names/x.json", "names/a/b.json", "names/.json")
        ],
        (f"names/{'x' * 65}.json", text(), {}, "the file name is neither"),
        ("names/x.json", b"", link, "not a regular file"),
        ("names/x.json", b"", {**link, "type": tarfile.LNKTYPE}, "not a regular file"),
        ("names/x.json", b"", {"type": tarfile.FIFOTYPE}, "not a regular file"),
        ("names/x.json", text() + b" " * MAX_BYTES, {}, "are more than the limit of"),
        ("names/x.json", b"[" * 100_000, {}, "nested too deeply"),
        ("names/x.json", b'{"\\u001b[31m":1}', {}, "exactly format"),
        ("names/x.json", text()[:-1] + b',"more":1}', {}, "exactly format"),
        ("names/x.json", text(200, (first.name, second.name)), {}, "it keeps are missing"),  # it comes behind the name
        ("names/x.json", text(200, (second.name,)), {}, "it keeps are missing"),
        ("names/x.json", text(200, (first.name, other.name)), {}, "not those that it names"),
        ("names/x.json", text(129), {}, "not those that it names"),
        ("names/x.json", text(key="0" * 40), {}, "not those that it names"),
    ]
    tar_of(archive, file(first), file(other), *[case[:3] for case in cases], file(second))
    code, output, _ = run(capsys, "import", "--dir", target, archive)
    lines = output.splitlines()[2:-1]
    assert code == 1 and "\x1b" not in output and len(lines) == len(cases)
    for line, (*_, problem) in zip(lines, cases):
        assert ": refused: " in line and problem in line
    assert sorted(os.listdir(target)) == sorted(header.file_name for header in (first, second, other))
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "cache", "target"]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_name_appears_last(named, tmp_path, capsys, monkeypatch, done):
    archive, target = tmp_path / "a.tar", tmp_path / "target"
    assert run(capsys, "export", "--dir", named[0], "long", archive)[0] == 0
    publish, files = FileSystem.publish, []

    def killed(self, temporary, path, replace):
        if len(files) == done:
            raise KeyboardInterrupt
        files.append(path.name)
        return publish(self, temporary, path, replace)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "publish", killed)
        assert run(capsys, "import", "--dir", target, archive)[0] == 130
    assert sorted(path.name for path in target.rglob("*") if path.is_file()) == sorted(files)
    assert saved(target) == {}
    assert run(capsys, "import", "--dir", target, archive)[0] == 0
    assert list(saved(target)) == ["long"]

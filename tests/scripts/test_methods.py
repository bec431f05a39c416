"""The table of methods leads to what is there, and leaves out no op, no part and no codec."""

import pytest
from methods import METHODS, ROOT, Method, folder_of, languages_of, table

from shadowkv.ops.registry import FOLDERS, NAMES


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_path_exists(method: Method) -> None:
    folders = {"shadowkv": method.modules, "csrc": method.sources, "tests": method.tests}
    paths = [ROOT / folder / name for folder, names in folders.items() for name in names]
    paths += map(folder_of, method.ops)
    assert [path for path in paths if not path.exists()] == []
    assert method.tests


def test_all_ops_parts_and_codecs_are_named() -> None:
    assert {op for method in METHODS for op in method.ops} == set(NAMES)
    named = {module for method in METHODS for module in method.modules}
    for folder in ("kvcache/parts", "kvcache/codecs"):
        files = [file.name for file in (ROOT / "shadowkv" / folder).glob("*.py")]
        assert {f"{folder}/{name}" for name in files} - named <= {f"{folder}/__init__.py", f"{folder}/base.py"}


def test_ops_are_found_in_the_folders_that_they_share() -> None:
    assert {op: folder_of(op).name for op in NAMES} == {op: FOLDERS.get(op, op) for op in NAMES}


def test_backends_are_those_that_have_files() -> None:
    (row,) = (line for line in table() if line.startswith("| key sketch"))
    assert "`sketch_keys` (Triton), `sketch_queries` (C++, CUDA), `sign_scores` (C++, CUDA)" in row


@pytest.mark.parametrize(("method", "backends"), [("`tq3_0`", "Triton, CUDA"), ("Shard", "CUDA")])
def test_backends_that_do_not_take_a_format_are_left_out(method: str, backends: str) -> None:
    (row,) = (line for line in table() if line.startswith(f"| {method} |"))
    assert f"`attend_coded` ({backends})" in row


def test_only_backends_that_exist_are_left_out() -> None:
    for method in METHODS:
        for op, language in method.without:
            assert op in method.ops
            assert language in languages_of(op)

"""What is too long is found, in Python and in C++, and so is an exception that nothing needs."""

from pathlib import Path

import pytest
from line_limits import (
    EXCEPTIONS,
    FOLDERS,
    OF_A_FILE,
    OF_A_FOLDER,
    OF_A_FUNCTION,
    ROOT,
    cpp_functions,
    crowded,
    python_functions,
    too_long,
)

PYTHON = '''
def short(): return 1

class One:
    @property
    def method(self):
        """Two lines,
        and three."""
        def inner():
            return 1

if True:
    async def other(
        x,
    ):
        pass
'''
CPP = r"""
#define MACRO(x) { \
    {
namespace a { // {
/* { { */
constexpr int kTable[] = {1, 2};
template <class T>
struct Two : Three<T> {
  int x{0};
  Two(int y) : x(y) {
    for (int i = 0; i < 1'000; ++i) { x += '{' + "\"{"[0]; }
  }
};
extern "C" {
__global__ void __launch_bounds__(128)
    kernel(Two<int> two = {},
           int y = f({1, 2})) {
  asm volatile("{ .reg .b32 x; \n"
               "}");
}
}
#if A
#endif
const auto text = R"({ ( " )";
void last() {}
} // namespace a
"""


def file(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def body(lines: int) -> str:
    return "def f():\n" + "    pass\n" * (lines - 1)


def test_functions_of_python() -> None:
    assert [*python_functions(PYTHON)] == [("short", 1), ("One.method", 5), ("other", 4)]


def test_functions_of_cpp() -> None:
    assert [*cpp_functions(CPP)] == [("Two", 3), ("kernel", 6), ("last", 1)]


@pytest.mark.parametrize(
    ("text", "reason"), [("void f() {", "is not closed"), ("void f() {}}", "is closed that was not opened")]
)
def test_braces_that_do_not_match_are_found(tmp_path: Path, text: str, reason: str) -> None:
    file(tmp_path, "csrc/f.h", text)
    assert too_long(tmp_path, {}) == [f"csrc/f.h: a brace {reason}"]


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    file(tmp_path, "shadowkv/just.py", body(OF_A_FUNCTION) + "#\n" * (OF_A_FILE - OF_A_FUNCTION))
    assert too_long(tmp_path, {}) == []
    file(tmp_path, "shadowkv/long.py", "#\n" * (OF_A_FILE + 1))
    file(tmp_path, "scripts/function.py", body(OF_A_FUNCTION + 1))
    file(tmp_path, "csrc/a/kernel.cuh", "void g(int x) {\n" + "  ;\n" * (OF_A_FUNCTION - 1) + "}\n")
    file(tmp_path, "tests/function.py", body(OF_A_FUNCTION + 1))
    assert too_long(tmp_path, {"scripts/function.py: f": "it may"}) == [
        f"csrc/a/kernel.cuh: g has {OF_A_FUNCTION + 1} lines, more than {OF_A_FUNCTION}",
        f"shadowkv/long.py: {OF_A_FILE + 1} lines, more than {OF_A_FILE}",
    ]


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    for number in range(OF_A_FOLDER):
        file(tmp_path, f"shadowkv/room/part_{number}.py", "")
        file(tmp_path, f"tests/test_{number}.py", "")
    file(tmp_path, "shadowkv/room/within/one_more.py", "")
    file(tmp_path, "tests/test_one_more.py", "")
    assert crowded(tmp_path) == []
    file(tmp_path, "shadowkv/room/one_more.cpp", "")
    assert [line.partition(",")[0] for line in crowded(tmp_path)] == [f"shadowkv/room: {OF_A_FOLDER + 1} files"]


def test_an_exception_that_nothing_needs_is_found(tmp_path: Path) -> None:
    file(tmp_path, "scripts/function.py", body(OF_A_FUNCTION))
    unneeded = {"scripts/function.py: f": "it was longer", "scripts/gone.py: f": "it is gone"}
    assert too_long(tmp_path, unneeded) == [f"{name} needs no exception" for name in unneeded]


def test_all_folders_are_looked_at() -> None:
    assert all(list((ROOT / folder).rglob("*.py")) for folder in FOLDERS)
    kernels = [name for path in (ROOT / "csrc").rglob("*.cuh") for name, _ in cpp_functions(path.read_text())]
    assert {"attend_coded_kernel", "sketch_queries_kernel"} <= {*kernels}
    assert all(EXCEPTIONS.values())

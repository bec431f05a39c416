"""What ``scripts/line_limits.py`` finds too long."""

from __future__ import annotations

import line_limits
import pytest

LINES = line_limits.FUNCTION_LINES
BODY = "\n".join(f"    x += {number};  // }}" for number in range(LINES))
NATIVE = f"""
namespace a {{
const char* brace = "{{";
struct alignas(16) Shape {{
{BODY}
}};
template <int kN>
__global__ void __launch_bounds__(f(kN), 2) long_kernel(const Inputs in, int (&x)[2]) {{
  if (in.x) {{
{BODY}
  }}
}}
void short_one() {{ x = '}}'; }}
}}  // namespace a
"""


def test_long_files_and_functions_are_found() -> None:
    long = "class A:\n    async def long(self):\n" + "        self\n" * LINES
    assert [*line_limits.violations("a.py", long)] == ["a.py: long has 81 lines, more than 80"]
    (found,) = line_limits.violations("a.py", "x = 1\n" * (line_limits.FILE_LINES + 1))
    assert found == "a.py has 401 lines, more than 400"


def test_bodies_of_native_functions_are_counted() -> None:
    (found,) = line_limits.violations("a.cuh", NATIVE)
    assert found == f"a.cuh: long_kernel has {LINES + 4} lines, more than 80"
    assert "short_one" in dict(line_limits.native_functions(NATIVE))


def test_what_may_be_longer_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "def f():\n" + "    x\n" * LINES
    monkeypatch.setattr(line_limits, "LONGER", {"a.py:f": "a reason"})
    assert not [*line_limits.violations("a.py", long)] and not [*line_limits.unneeded({"a.py": long})]
    (found,) = line_limits.unneeded({"a.py": "def f():\n    x\n"})
    assert found.startswith("a.py:f has no more than 80 lines")

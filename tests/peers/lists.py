"""What is expected of a peer's tests: those that cannot apply to this server are skipped, those that differ are
expected to fail, strictly: one that passes fails the run, and so does a name in the list that no test has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parent


@dataclass
class Expected:
    """A list of tests by their names: a file, a test with all of its parameters, or one case of it.

    Attributes:
        cannot_apply, differs: reasons, by name.
    """

    cannot_apply: dict[str, str]
    differs: dict[str, str]

    @classmethod
    def read(cls, name: str) -> Expected:
        """That of ``NAME.yaml``: groups of names, each under its reason."""
        groups = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        lists = {
            kind: {name: reason for reason, names in (groups[kind] or {}).items() for name in names}
            for kind in ("cannot_apply", "differs")
        }
        return cls(**lists)

    def leaves_out(self, file: str) -> bool:
        """Whether a file, or a folder that it is in, cannot apply as a whole: then it need not even be importable."""
        return any(file == name or file.startswith(f"{name}/") for name in self.cannot_apply)

    def mark(self, items: list[pytest.Item], name_of: dict[pytest.Item, str]) -> None:
        """Marks tests as the lists say. Raises pytest.UsageError for names of these files that no test has."""
        used = set()
        for item in items:
            for name in _names(name_of[item]):
                if name in self.cannot_apply:
                    item.add_marker(pytest.mark.skip(reason=f"cannot apply: {self.cannot_apply[name]}"))
                elif name in self.differs:
                    item.add_marker(pytest.mark.xfail(reason=self.differs[name], strict=True))
                else:
                    continue
                used.add(name)
        files = {name.partition("::")[0] for name in name_of.values()}
        listed = {name for name in (*self.cannot_apply, *self.differs) if name.partition("::")[0] in files}
        if unknown := sorted(listed - used):
            raise pytest.UsageError(f"no test has these names of the lists: {', '.join(unknown)}")


def _names(case: str) -> tuple[str, ...]:
    """Names that mean a case: its own, its test's, its class's or file's."""
    test = case.partition("[")[0]
    parts = test.split("::")
    return (case, *("::".join(parts[: count + 1]) for count in reversed(range(len(parts)))))

"""The files of a batch run, checked before minutes go into loading a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BatchFiles:
    """Where the requests are and where the answers go."""

    input: Path
    output: Path

    @property
    def partial(self) -> Path:
        """Holds the answers until all are there."""
        return self.output.with_name(self.output.name + ".partial")

    def check(self) -> None:
        """Raises ValueError if the files cannot be used."""
        if not self.input.is_file():
            raise ValueError(f"--input {self.input} is not a file")
        if not os.access(self.input, os.R_OK):
            raise ValueError(f"--input {self.input} cannot be read")
        if not self.output.parent.is_dir():
            raise ValueError(f"--output {self.output}: the folder {self.output.parent} does not exist")
        if self.output.is_dir() or not os.access(self.output.parent, os.W_OK):
            raise ValueError(f"--output {self.output} cannot be written")
        if self.partial.exists():
            raise ValueError(f"{self.partial} holds the answers of an interrupted run; move it away")

"""docs/models.md names every family and GGUF architecture, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from shadowkv.models.gguf.config import ARCHITECTURES
from shadowkv.models.registry import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_names_all_families_and_architectures():
    table = PAGE.read_text(encoding="utf-8").split("## Weights")[0]
    rows = [row.split("|")[2:4] for row in table.splitlines() if row.startswith("| ") and "`" in row][1:]
    families, architectures = ({name for row in rows for name in re.findall("`(.+?)`", row[at])} for at in (0, 1))
    assert families == FAMILIES.keys()
    assert architectures == ARCHITECTURES.keys()

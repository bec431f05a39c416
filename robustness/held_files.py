"""What a directory of snapshots holds of prompts, with every byte read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shadowkv.kvcache.spec import PAGE
from shadowkv.prefix_cache.disk.files import TEMPORARY, SnapshotFile
from shadowkv.prefix_cache.disk.inventory import Inventory
from shadowkv.prefix_cache.page_names import PageNames


@dataclass(frozen=True)
class Held:
    """What is in a directory.

    Attributes:
        origin: what names of pages build on; empty without a file.
        pages: names of the pages that usable files hold.
        files: names of all files.
        bad: names of those that are not what was written.
        half_written: temporary files, and their bytes.
    """

    origin: str
    pages: frozenset[str]
    files: frozenset[str]
    bad: frozenset[str]
    half_written: tuple[int, int]

    @classmethod
    def of(cls, directory: Path) -> Held:
        """Reads every byte."""
        inventory = Inventory.of(directory)
        rows = inventory.rows()
        bad = inventory.verify([row["name"] for row in rows], lambda count: None).keys() | inventory.bad.keys()
        pages, origin = set[str](), ""
        for row in rows:
            chain = inventory.index.chain(row["name"])
            if not chain or bad & {entry.name for entry in chain}:
                continue
            tokens, origin = list[int](), row["origin"]
            for entry in chain:
                with SnapshotFile(directory, entry.name) as file:
                    tokens[entry.head.start :] = file.token_ids().tolist()
            pages |= set(PageNames(origin).extend_to(tokens))
        temporary = [path.stat().st_size for path in directory.glob(f"{TEMPORARY}*")]
        files = frozenset(row["name"] for row in rows) | frozenset(inventory.bad)
        return cls(origin, frozenset(pages), files, frozenset(bad), (len(temporary), sum(temporary)))

    def tokens(self, prompt: list[int]) -> int:
        """How many of a prompt's tokens files hold, except the last, which is always computed."""
        names = PageNames(self.origin).extend_to(prompt[:-1]) if self.origin else []
        return PAGE * next((number for number, name in enumerate(names) if name not in self.pages), len(names))

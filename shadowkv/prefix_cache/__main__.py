"""``shadowkv cache``: lists, verifies, prunes, exports and imports the snapshots of a directory.

The commands also handle the names under which prompts were saved; ``forget`` removes such names. Servers may use the
directory meanwhile: they find imported snapshots, and treat removed ones as misses.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shadowkv.command_line import Parser
from shadowkv.prefix_cache.disk.archive import export_snapshots, import_snapshots
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.header import BadSnapshot
from shadowkv.prefix_cache.disk.inventory import Inventory
from shadowkv.prefix_cache.disk.names import Names
from shadowkv.prefix_cache.protocol import SaveError
from shadowkv.wording import counted

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 1 if files are bad or were refused, 2 if the command could not be run."""
    args = _parse(argv)
    try:
        code: int = args.run(args)
    except (ValueError, OSError, BadSnapshot, SaveError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="shadowkv cache", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.add_argument("--dir", type=Path, metavar="DIR", help="directory of snapshots: a server's --kv-disk-dir")
        added.set_defaults(run=run, error=added.error)
        return added

    def json_flag(added: argparse.ArgumentParser) -> None:
        added.add_argument("--json", action="store_true", help="print JSON, with unrounded numbers")

    json_flag(command("ls", _list, "list snapshots, the most recently used first"))

    verify = command("verify", _verify, "read every byte and compare checksums; exit code 1 if any file is bad")
    verify.add_argument("names", nargs="*", metavar="NAME", help="name of a snapshot, or its beginning (default: all)")
    verify.add_argument("--remove", action="store_true", help="remove bad files")
    json_flag(verify)

    text = "remove snapshots that no name keeps, the least recently used first; --all removes everything"
    prune = command("prune", _prune, text)
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--max-gib", type=_size, metavar="GIB", help="keep at most this size")
    which.add_argument("--older-than", type=_age, metavar="AGE", help="remove those unused for this long: 90m, 12h, 7d")
    which.add_argument("--all", action="store_true", help="remove all snapshots, names and bad files")
    json_flag(prune)

    forget = command("forget", _forget, "forget names, so that the snapshots that they keep can be removed")
    forget.add_argument("names", nargs="+", metavar="NAME", help="name given to /cache/save")

    export = command("export", _export, "write snapshots, the snapshots that they continue, and names to a tar file")
    export.add_argument("names", nargs="+", metavar="NAME", help="saved name, or the beginning of a snapshot's name")
    export.add_argument("file", type=Path, metavar="FILE.tar", help="file to write, which must not exist yet")

    importer = command("import", _import, "add the snapshots and names of a tar file; exit code 1 if any was refused")
    importer.add_argument("file", type=Path, metavar="FILE.tar", help="tar file that export has written")
    args = parser.parse_args(argv)
    if args.dir is None:  # a server has no default directory, either
        args.error("--dir DIR is missing: name the directory that a server has as --kv-disk-dir")
    return args


def _size(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no size in GiB")
    return float(text)


def _age(text: str) -> float:
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)):
        raise argparse.ArgumentTypeError(f"{text!r} is no age such as 90m, 12h or 7d")
    return float(match[1]) * UNITS[match[2]]


def _progress(total: int) -> Any:
    """Returns a progress bar that counts bytes. It appears on stderr, and only if stderr is a terminal."""
    return tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False)


def _list(args: argparse.Namespace) -> int:
    inventory = Inventory(args.dir)
    rows = inventory.rows()
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        now = time.time()
        table = [["NAME", "TOKENS", "SIZE", "STATE", "USED", "CONTINUES", "RANKS", "MODEL"]]
        for row in rows:
            continues = row["parent"][:10] + ("" if row["usable"] else " (lost)")
            tokens = f"{row['start']}-{row['length']}"
            used = f"{_short_age(now - row['used'])} ago"
            ranks, model = (_printable(row["facts"].get(name, "")) for name in ("tensor_parallel_size", "model"))
            sizes = [_short_size(row["file_bytes"]), _short_size(row["state_bytes"]) if row["state_bytes"] else "-"]
            table.append([row["name"], tokens, *sizes, used, continues, ranks, model])
        widths = [max(map(len, column)) for column in zip(*table)]
        for line in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
        print(f"{counted(len(rows), 'snapshot')}, {_short_size(inventory.bytes)}")
        for name, save in sorted(inventory.saves.items()):
            lost = "" if inventory.is_there(save) else " (lost)"
            print(f"saved as {name}: {counted(save.tokens, 'token')}, up to {save.snapshots[-1]}{lost}")
    for error in inventory.bad_saves.values():
        print(error, file=sys.stderr)
    if inventory.bad:
        print(f"{len(inventory.bad)} more files are bad: see verify", file=sys.stderr)
    return 0


def _verify(args: argparse.Namespace) -> int:
    inventory = Inventory(args.dir)
    if args.remove and not args.names:
        # Bad names are removed before the snapshots are read. Reading takes long, and a server might meanwhile save a
        # good file under such a name.
        for name in inventory.bad_saves:
            inventory.names.remove(name)
    names = [inventory.named(name) for name in args.names] or [*inventory.known(), *inventory.bad]
    sizes = [header.nbytes for name in names if (header := inventory.get(name))]
    with _progress(sum(sizes)) as bar:
        bad = inventory.verify(names, bar.update)
    bad_names = {} if args.names else inventory.bad_names(bad)
    for name, error in bad.items():
        error.action = "left there"
        if args.remove:
            inventory.remove(name)
            error.action = "removed"
    # A name whose own file is good stays, even if a snapshot is missing: a server that computes the snapshot again
    # repairs the name.
    actions = {name: "removed" if args.remove and name in inventory.bad_saves else "left there" for name in bad_names}
    if args.json:
        problems = [{"name": name, "problem": error.problem, "action": error.action} for name, error in bad.items()]
        of_names = [{"name": name, "problem": bad_names[name], "action": actions[name]} for name in bad_names]
        print(json.dumps({"verified": len(set(names)), "bad": problems, "bad_names": of_names}, indent=2))
    else:
        for error in bad.values():
            print(error)
        for name, problem in bad_names.items():
            print(f"{problem}; {actions[name]}")
        named = f"; {counted(len(bad_names), 'bad name')}" if bad_names else ""
        print(f"{counted(len(set(names)) - len(bad), 'good snapshot')}, {len(bad)} bad{named}")
    return 1 if bad or bad_names else 0


def _prune(args: argparse.Namespace) -> int:
    inventory = Inventory(args.dir)
    limit = 0.0 if args.all else None if args.max_gib is None else args.max_gib * 2**30
    kept = set() if args.all else inventory.pins
    surplus = inventory.surplus(limit, args.older_than, kept)
    if args.all:
        for name in [*inventory.saves, *inventory.bad_saves]:
            inventory.names.remove(name)
    names = [header.name for header in surplus] + (sorted(inventory.bad) if args.all else [])
    for name in names:
        inventory.remove(name)
    leftovers, freed = inventory.remove_leftovers(), sum(header.file_bytes for header in surplus)
    if args.json:
        print(json.dumps({"removed": names, "bytes": freed, "leftovers": leftovers}, indent=2))
    else:
        pinned = f"; names keep {_short_size(inventory.size(kept))}" if kept else ""
        print(f"{counted(len(names), 'file')} removed, {_short_size(freed)}; {leftovers} half-written ones{pinned}")
    return 0


def _forget(args: argparse.Namespace) -> int:
    names = Names(args.dir, FileSystem())
    for name in args.names:
        names.remove(name)
        print(f"{name} is forgotten")
    return 0


def _export(args: argparse.Namespace) -> int:
    inventory = Inventory(args.dir)
    headers, saves = inventory.chosen(args.names)
    with _progress(sum(header.nbytes for header in headers)) as bar:
        export_snapshots(args.dir, headers, saves, args.file, bar.update)
    named = f", saved as {', '.join(saves)}" if saves else ""
    print(f"{counted(len(headers), 'snapshot')} exported to {args.file}{named}")
    return 0


def _import(args: argparse.Namespace) -> int:
    with _progress(args.file.stat().st_size) as bar:
        outcomes = import_snapshots(args.dir, args.file, bar.update)
    for name, outcome in outcomes:
        print(f"{_printable(name)}: {outcome}")
    return 1 if any(outcome.startswith("refused") for _, outcome in outcomes) else 0


def _short_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _short_age(seconds: float) -> str:
    unit = next((unit for unit in ("d", "h", "m") if seconds >= 2 * UNITS[unit]), "s")
    return f"{max(0, int(seconds / UNITS[unit]))}{unit}"


def _printable(value: object) -> str:
    """Returns at most 200 characters of a text from a file. "?" replaces characters that cannot be printed."""
    return "".join(character if character.isprintable() else "?" for character in str(value))[:200]


if __name__ == "__main__":
    sys.exit(main())

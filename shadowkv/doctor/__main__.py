"""``shadowkv doctor``: what this machine has, which backend each op runs in here, why no faster one, and what to do. No
model is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from shadowkv.command_line import Parser, one_line
from shadowkv.engine.config import EngineConfig, policy_name
from shadowkv.kvcache.presets import POLICY_HELP
from shadowkv.settings import add_flag


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was found; returns the exit code, 0 whatever that is."""
    args = _parse(argv)
    # Imported here: --help needs no PyTorch.
    from shadowkv.doctor.machine import Machine
    from shadowkv.doctor.ops import choices_for
    from shadowkv.doctor.report import as_json, as_text

    try:
        choices = choices_for(args.model, args.kv, args.device, args.attention_backend)
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    machine = Machine.here()
    print(json.dumps(as_json(machine, choices), indent=2) if args.json else as_text(machine, choices))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="shadowkv doctor", description=__doc__)
    add, default = parser.add_argument, EngineConfig()
    text = "whose shapes ops are chosen for, as serve takes it; no weights are read (default: %(default)s)"
    add("--model", default=default.model, help=text)
    add("--kv", type=policy_name, default=default.kv, metavar="POLICY", help=f"{POLICY_HELP} (default: %(default)s)")
    add("--device", default=default.device, help="cuda, cuda:N or cpu (default: %(default)s)")
    add_flag(parser, EngineConfig, "attention_backend")
    add("--json", action="store_true", help="the same as JSON, bytes unrounded")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

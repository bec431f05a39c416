"""``shadowkv doctor``: lists this machine's hardware and software, and the backend that each op uses. Where an op does
not use its fastest backend, it also lists the reason and what to do about it. No model is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from shadowkv.command_line import Parser, one_line
from shadowkv.engine.config import EngineConfig
from shadowkv.settings import add_flag


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Returns the exit code, which is 0 whatever the report says, and 2 for wrong flags."""
    args = _parse(argv)
    # Imported here, because these modules import PyTorch, which --help does not need.
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
    text = "model, named as for shadowkv serve; ops are chosen for its shapes, and its weights are not read"
    add_flag(parser, EngineConfig, "model", help=text)
    for name in ("kv", "device", "attention_backend"):
        add_flag(parser, EngineConfig, name)
    parser.add_argument("--json", action="store_true", help="print JSON, with unrounded numbers of bytes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

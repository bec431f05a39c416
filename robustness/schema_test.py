"""Tests a server against its own OpenAPI schema with Schemathesis: right and wrong data for every route.

Answers must have a status, a media type and a body that the schema names, no status 5xx, and no 200 for data that the
schema excludes. What the schema allows may be refused: it does not say which parameters go together, nor what is a
token of the model. The script starts its own server, with a tiny model. Schemathesis is not a dependency:

    pip install schemathesis
    python -m robustness.schema_test --seconds 300
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from robustness.tiny_model import SERVER, own_server

BODY_MIB = 1
"""Beyond this the answer is an immediate 413; the longest texts of the schema have 8 MiB."""

CONFIG = """
[checks]
negative_data_rejection.expected-statuses = ["400", "404", "413"]
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=300, help="about as long (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=200, help="cases of a route at first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv", default=SERVER["kv"], help="policy of the server (default: %(default)s)")
    return parser.parse_args(argv)


def main() -> int:
    """Command line; returns the exit status of Schemathesis, which is not 0 if it has found anything."""
    args = parse()
    command = Path(sys.executable).with_name("schemathesis")
    if not command.exists():
        raise SystemExit("Schemathesis is not installed here: pip install schemathesis")
    with own_server(args.kv, BODY_MIB) as url, TemporaryDirectory(prefix="schema-") as folder:
        config = Path(folder) / "schemathesis.toml"
        config.write_text(CONFIG, encoding="utf-8")
        flags = {
            "checks": "all",
            "exclude-checks": "positive_data_acceptance",
            "max-time": args.seconds,
            "max-examples": args.examples,
            "seed": args.seed,
            "generation-database": "none",
        }
        options = [f"--{name}={value}" for name, value in flags.items()]
        # Otherwise tests in the folder where it starts would be loaded.
        run = [command, f"--config-file={config}", "run", "--continue-on-failure", *options, f"{url}/openapi.json"]
        return subprocess.run(run, cwd=folder, env={**os.environ, "PYTHONWARNINGS": "ignore"}).returncode


if __name__ == "__main__":
    sys.exit(main())

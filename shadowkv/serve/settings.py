"""How the server treats its clients: who may ask, how much, and for how long; every field is a flag."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields

KEY_VARIABLE = "SHADOWKV_API_KEY"


@dataclass(frozen=True)
class ServerSettings:
    """Limits of the server; 0 seconds means no limit, and for ``keep_alive_interval`` none sent.

    Raises:
        ValueError: values that cannot be; the message lists every one.
    """

    api_key: str | None = None
    max_body_mib: float = 32.0
    request_timeout: float = 0.0
    shutdown_timeout: float = 10.0
    keep_alive_interval: float = 15.0

    def __post_init__(self) -> None:
        bad = [
            f"{name}={getattr(self, name)} must not be negative"
            for name in ("request_timeout", "shutdown_timeout", "keep_alive_interval")
            if not getattr(self, name) >= 0
        ]
        if not self.max_body_mib > 0:
            bad.append(f"max_body_mib={self.max_body_mib} must be positive")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            bad.append("api_key must be printable ASCII and not empty")
        if bad:
            raise ValueError("; ".join(bad))

    @property
    def max_body_bytes(self) -> int:
        """Length of the longest request body."""
        return int(self.max_body_mib * 2**20)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ServerSettings:
        """The settings that parsed flags ask for."""
        values = {field.name: getattr(args, field.name) for field in fields(cls)}
        # From the environment too: a command line is seen by every user of the machine.
        return cls(**{**values, "api_key": args.api_key or os.environ.get(KEY_VARIABLE) or None})

    @classmethod
    def add_arguments(cls, group: argparse._ArgumentGroup) -> None:
        """Adds every flag."""
        group.add_argument("--api-key", metavar="KEY", help=f"clients must send it (default: ${KEY_VARIABLE})")
        for flag, metavar, text in (
            ("--max-body-mib", "MIB", "longest request body"),
            ("--request-timeout", "SECONDS", "a request that takes longer is aborted, 0: none"),
            ("--shutdown-timeout", "SECONDS", "after a signal to stop, time for running requests to end"),
            ("--keep-alive-interval", "SECONDS", "a silent stream gets a comment this often, 0: never"),
        ):
            name = flag.removeprefix("--").replace("-", "_")
            group.add_argument(
                flag, type=float, metavar=metavar, default=getattr(cls, name), help=f"{text} (default: %(default)g)"
            )

"""Measures the time from a server's start to its first token, several times one after the other.

``python -m benchmarks.serving.start [--times N] [--out FOLDER] -- [flags of shadowkv serve]`` prints a line for each
start, precise to a fifth of a second. The servers' logs stay in the folder, and their lines show the steps of a start
with their times. The first start also compiles everything that was not compiled before.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import httpx

from shadowkv.bench.server_process import running

PROMPT = "The capital of France is"


def seconds_to_first_token(flags: list[str], port: int, log: Path) -> tuple[float, float, str]:
    """Starts a server. Returns the seconds until it answers, the seconds until its first token, and the token's text.
    Raises RuntimeError if the server does not start."""
    url = f"http://127.0.0.1:{port}/v1"
    began = time.monotonic()
    with running([sys.executable, "-m", "shadowkv.serve", "--port", str(port), *flags], url, log, {}):
        ready = time.monotonic() - began
        body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{url}/completions", json=body, timeout=600).raise_for_status().json()
        return ready, time.monotonic() - began, answer["choices"][0]["text"]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, metavar="N", help="starts (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8141, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/start"), metavar="FOLDER", help="for logs")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of shadowkv serve")
    args = parser.parse_args(argv)
    for number in range(args.times):
        try:
            log = args.out / f"start-{number}.log"
            ready, first, text = seconds_to_first_token(args.flags, args.port, log)
        except (RuntimeError, httpx.HTTPError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"start {number}: answers after {ready:.1f} s, first token after {first:.1f} s: {text!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

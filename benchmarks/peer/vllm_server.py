"""Runs vLLM's OpenAI server with Llama-3.1-8B's shapes, dummy weights, and the tokenizer of our own dummy weights.

The settings are those of ``bench_vllm``: prefix caching is off. Further flags are passed to vLLM. This module does not
need the package shadowkv. ``benchmarks.serving`` starts the server, waits until it answers, and stops it.

    PYTHONPATH=/tmp/site python3 -m benchmarks.peer.vllm_server --port 8100 --max-num-seqs 256
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer.peer_model import ENVIRONMENT, write_model, write_tokenizer

SERVED = "llama-3.1-8b"


def command(folder: Path, port: int, more: Sequence[str], tokenizer: Path | None = None) -> list[str]:
    """Returns the command that starts the server. If a flag is given twice, vLLM uses the later value."""
    chosen = {
        "--model": os.fspath(folder),
        "--tokenizer": os.fspath(tokenizer or folder),
        "--served-model-name": SERVED,
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        "--seed": "0",
        "--max-model-len": "131072",
        "--max-num-seqs": "256",
        "--gpu-memory-utilization": "0.9",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    flags = [part for pair in chosen.items() for part in pair]
    switches = ["--no-enable-prefix-caching", "--disable-cascade-attn", "--disable-uvicorn-access-log"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *switches, *more]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the model's folder, and replaces this process by the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100, help="(default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/peer_model"), help="for the model (default: %(default)s)"
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of another tokenizer of at most as many tokens")
    args, more = parser.parse_known_args(argv)
    write_model(args.folder)
    write_tokenizer(args.folder)
    tokenizer = args.tokenizer.resolve() if args.tokenizer else None
    started = command(args.folder.resolve(), args.port, more, tokenizer)
    os.chdir(args.folder)  # in a repository, Python could take folders for packages
    os.execve(started[0], started, os.environ | ENVIRONMENT)


if __name__ == "__main__":
    main()

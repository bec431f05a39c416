"""vLLM's figures for Llama-3.1-8B's shapes with dummy weights, in the columns of ``scripts/*_sweep.py``.

Prompt lengths go to ``prefill.csv``, cases of requests at once to ``mixed.csv``, batches that only decode (their keys
and values are made up) to ``decode.csv``. What needs the same engine shares one, in a process of its own. Rows that are
there are not measured again.

    python3 bench_vllm.py --contexts 61440,124928 --cases 256x1024+256 64x8192+128 48x61184+512 --out results
    python3 bench_vllm.py --quantization fp8 --contexts 61440,124928 --cases 256x1024+256 --out results
    python3 bench_vllm.py --kv fp8 --decode 30x61440 14x124928 --out results
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "../../scripts"))  # packed, it lies beside this file

from peer_drive import Driver
from peer_model import ENVIRONMENT, settings, write_model
from sweep_rows import MIXED, PREFILL, Rows

DECODE = ("engine", "kv", "quantization", "context", "batch"), ("step_ms", "decode_tokens_per_s")
KINDS = {"prefill": PREFILL, "mixed": MIXED, "decode": DECODE}
ROOM = 256
"""Tokens of a sequence beside the longest prompt, where that only decodes."""


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of ``256x1024+256`` or ``16x61440``."""
    return tuple(map(int, re.split("[x+]", text)))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=lambda text: [*map(int, text.split(","))], default=[], help="tokens")
    parser.add_argument("--cases", type=numbers, nargs="+", default=[], help="requests x prompt + answer tokens")
    parser.add_argument("--decode", type=numbers, nargs="+", default=[], help="sequences x tokens")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="of keys and values")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none", help="of the weights")
    parser.add_argument("--repeats", type=int, default=3, help="prompts after the first of a length")
    parser.add_argument("--max-num-batched-tokens", type=int, help="(default: vLLM's own)")
    parser.add_argument("--model", type=Path, default=Path("/tmp/peer_model"), help="folder to write a config to")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one engine (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--engine", choices=("serve", "decode"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Starts an engine's process for what is asked for; returns the exit status."""
    args = parse()
    if args.engine:
        child(args)
    args.out.mkdir(parents=True, exist_ok=True)
    write_model(args.model)
    well = True
    for name, asked in (("serve", args.contexts or args.cases), ("decode", args.decode)):
        if not asked:
            continue
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--engine", name]
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, start_new_session=True)
        try:
            well &= process.wait(args.timeout) == 0
        except subprocess.TimeoutExpired:
            print(f"error: {name} took longer than {args.timeout} s", file=sys.stderr)
            well = False
        finally:
            with suppress(ProcessLookupError):  # its group has the engine's own processes, which outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return 0 if well else 1


def child(args: argparse.Namespace) -> None:
    """Measures what one engine can, and ends the process."""
    status = 0
    try:
        import vllm
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        decode = args.decode if args.engine == "decode" else []
        longest = max([*args.contexts, *(one[1] + sum(one[2:]) for one in [*args.cases, *decode])]) + ROOM
        chosen = settings(args.model, args.kv, args.quantization, longest, [one[0] for one in decode])
        if args.max_num_batched_tokens:
            chosen["max_num_batched_tokens"] = args.max_num_batched_tokens
        engine = vllm.LLM(**chosen).llm_engine

        def sampling(tokens: int) -> Any:
            delta = RequestOutputKind.DELTA
            return SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=delta
            )

        row = {"engine": f"vllm {vllm.__version__}", "kv": args.kv, "prefill": "dense"}
        measure(args, Driver(engine, sampling), row | {"quantization": args.quantization} | about(engine.vllm_config))
    except Exception:  # of whatever kind: it is shown, and the process must end below
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # not before the engine's own processes end, which may be never


def about(config: Any) -> dict[str, Any]:
    """Last columns of a row."""
    import torch

    spec = {
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "torch": torch.__version__,
    }
    return {"command": shlex.join(sys.argv), "device": torch.cuda.get_device_name(), "spec": json.dumps(spec)}


def measure(args: argparse.Namespace, driver: Driver, row: dict[str, Any]) -> None:
    """Adds all rows of one engine."""

    def add(kind: str, key: dict[str, int], figures: Callable[[], dict[str, Any]]) -> None:
        rows = Rows(args.out / f"{kind}.csv", KINDS[kind])
        if not rows.has(row | key):
            rows.add(row | figures())

    if args.engine == "decode":
        for batch, context in args.decode:
            add("decode", {"context": context, "batch": batch}, lambda n=batch, c=context: driver.decode(n, c))
        return
    for context in args.contexts:
        add("prefill", {"context": context}, lambda c=context: driver.prefill(c, args.repeats))
    for case in args.cases:
        key = dict(zip(("requests", "input", "output"), case, strict=True))
        add("mixed", key, lambda one=case: driver.mixed(*one))


if __name__ == "__main__":
    sys.exit(main())

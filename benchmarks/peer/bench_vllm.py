"""Measures vLLM with a model's shapes and dummy weights. Results have the columns of the sweeps' files.

Figures of prompt lengths go to ``prefill.csv``, of cases of concurrent requests to ``mixed.csv``, of batches that only
decode (with made-up keys and values) to ``decode.csv``, and of reused prompts to ``reuse.csv``. Measurements with the
same engine settings share one engine, in a process of its own. Existing rows are not measured again.

    python3 -m benchmarks.peer.bench_vllm --contexts 61440,124928 --cases 256x1024+256 64x8192+128 --out results
    python3 -m benchmarks.peer.bench_vllm --quantization fp8 --contexts 61440,124928 --cases 256x1024+256 --out results
    python3 -m benchmarks.peer.bench_vllm --kv fp8 --decode 30x61440 14x124928 --out results
    python3 -m benchmarks.peer.bench_vllm --config config.json --quantization gptq --cases 1x1024+128 --out results
    python3 -m benchmarks.peer.bench_vllm --reuse --reuse-off --offload-gib 40 --trace-gib 24 --out results
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

from benchmarks.peer.peer_drive import Driver
from benchmarks.peer.peer_model import ENVIRONMENT, reuse_settings, settings, token_bytes, write_model
from benchmarks.peer.peer_reuse import DOCUMENTS, ON_DEVICE, Shape, one_by_one, restored, shared, trace
from benchmarks.sweeps.rows import MIXED, PREFILL, REUSE, Rows

DECODE = ("engine", "kv", "quantization", "context", "batch"), ("step_ms", "decode_tokens_per_s")
KINDS = {"prefill": PREFILL, "mixed": MIXED, "decode": DECODE, "reuse": REUSE}
SHAPE = Shape()
REUSE_CASES = {
    "reuse": {"shared": shared, "one-by-one": one_by_one},
    "reuse-off": {"shared": shared},
    "restored": {"restored": restored},
    "trace": {"trace": trace},
}
"""Cases of reuse, by the name of the engine that they share."""
MODULE = "benchmarks.peer.bench_vllm"
MOST = 32
"""Maximum number of sequences for ``auto``. A batch without a CUDA graph of its own size runs in the graph of the next
larger size."""
ROOM = 256
"""Tokens that a sequence has room for in addition to its longest prompt."""


def numbers(text: str) -> tuple[int, ...]:
    """Parses the numbers of ``256x1024+256`` or ``16x61440``."""
    return tuple(map(int, re.split("[x+]", text)))


def decoding(text: str) -> tuple[int, ...]:
    """Parses the numbers of ``16x61440``; ``auto`` becomes 0."""
    return numbers(text.replace("auto", "0"))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=lambda text: [*map(int, text.split(","))], default=[], help="tokens")
    parser.add_argument("--cases", type=numbers, nargs="+", default=[], help="requests x prompt + answer tokens")
    parser.add_argument("--decode", type=decoding, nargs="+", default=[], help="sequences, or auto, x tokens")
    parser.add_argument("--reuse", action="store_true", help="requests of one document, at once and one by one")
    parser.add_argument("--reuse-off", action="store_true", help="those at once, of which each computes all")
    parser.add_argument("--offload-gib", type=float, help="of host memory, which evicted documents come back from")
    parser.add_argument("--trace-gib", type=float, help="of host memory, beside which chats over documents are traced")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="of keys and values")
    parser.add_argument("--quantization", choices=("none", "fp8", "gptq"), default="none", help="of the weights")
    parser.add_argument("--config", type=Path, help="config.json with other shapes than Llama-3.1-8B's")
    parser.add_argument("--repeats", type=int, default=3, help="prompts after the first of a length")
    parser.add_argument("--max-num-batched-tokens", type=int, help="(default: vLLM's own)")
    parser.add_argument("--model", type=Path, default=Path("/tmp/peer_model"), help="folder to write a config to")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one engine (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--engine", choices=("serve", "decode", *REUSE_CASES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    needed = DOCUMENTS * SHAPE.document * token_bytes(args.kv) / 2**30
    if args.offload_gib is not None and args.offload_gib < needed:
        parser.error(f"--offload-gib is {needed:g} at the least, for {DOCUMENTS} documents")
    return args


def main() -> int:
    """Starts a process for each engine that the requested measurements need. Returns the exit status."""
    args = parse()
    if args.engine:
        child(args)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        write_model(args.model, args.config, args.quantization)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    well = True
    asked = {
        "serve": args.contexts or args.cases,
        "decode": args.decode,
        "reuse": args.reuse,
        "reuse-off": args.reuse_off,
        "restored": args.offload_gib,
        "trace": args.trace_gib,
    }
    for name in asked:
        if not asked[name]:
            continue
        command = [sys.executable, "-m", MODULE, *sys.argv[1:], "--engine", name]
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, start_new_session=True)
        try:
            well &= process.wait(args.timeout) == 0
        except subprocess.TimeoutExpired:
            print(f"error: {name} took longer than {args.timeout} s", file=sys.stderr)
            well = False
        finally:
            with suppress(ProcessLookupError):  # the group also has the engine's own processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return 0 if well else 1


def child(args: argparse.Namespace) -> None:
    """Makes all measurements of one engine, and ends the process."""
    status = 0
    try:
        import vllm
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        chosen = chosen_settings(args)
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
    except Exception:  # an error of any kind is shown, and the process must still end below
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # a normal exit would wait for the engine's own processes, which may never end


def chosen_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of ``LLM`` for one engine."""
    if args.engine in REUSE_CASES:
        longest = SHAPE.document + SHAPE.own + SHAPE.answer + ROOM
        offload, on_device = None, 0
        if args.engine == "restored":
            offload, on_device = args.offload_gib, ON_DEVICE * SHAPE.document
        elif args.engine == "trace":
            longest = SHAPE.document + SHAPE.trace.turns * (SHAPE.own + SHAPE.answer) + ROOM
            kept = SHAPE.trace.documents // 4 * SHAPE.document  # as many as our engine keeps; running ones are added
            offload, on_device = args.trace_gib, kept + SHAPE.trace.at_once * longest
        reuse = reuse_settings(args.kv, args.engine != "reuse-off", longest, offload, on_device)
        return settings(args.model, args.kv, args.quantization, longest, []) | reuse
    decode = args.decode if args.engine == "decode" else []
    longest = max([*args.contexts, *(one[1] + sum(one[2:]) for one in [*args.cases, *decode])]) + ROOM
    return settings(args.model, args.kv, args.quantization, longest, [one[0] or MOST for one in decode])


def about(config: Any) -> dict[str, Any]:
    """Returns the last columns of a row: the command, the GPU and vLLM's settings."""
    import torch

    spec = {
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "offload_gib": config.cache_config.kv_offloading_size,
        "torch": torch.__version__,
    }
    return {
        "command": shlex.join(["-m", MODULE, *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(),
        "spec": json.dumps(spec),
    }


def measure(args: argparse.Namespace, driver: Driver, row: dict[str, Any]) -> None:
    """Measures and adds all rows of one engine."""

    def add(kind: str, key: dict[str, Any], figures: Callable[[], dict[str, Any]]) -> None:
        rows = Rows(args.out / f"{kind}.csv", KINDS[kind])
        if not rows.has(row | key):
            rows.add(row | key | figures())

    if args.engine == "decode":
        for asked, context in args.decode:
            batch = asked or driver.fitting(context + ROOM)
            add("decode", {"context": context, "batch": batch}, lambda n=batch, c=context: driver.decode(n, c))
        return
    if args.engine in REUSE_CASES:
        reuse = "off" if args.engine == "reuse-off" else "on"
        for name, figures in REUSE_CASES[args.engine].items():
            key = {"case": name, "reuse": reuse, "tokens": SHAPE.document}
            add("reuse", key, lambda one=figures: one(driver, SHAPE))
        return
    for context in args.contexts:
        add("prefill", {"context": context}, lambda c=context: driver.prefill(c, args.repeats))
    for case in args.cases:
        key = dict(zip(("requests", "input", "output"), case, strict=True))
        add("mixed", key, lambda one=case: driver.mixed(*one))


if __name__ == "__main__":
    sys.exit(main())

"""A GGUF file on a CPU, with weights kept in the file's blocks, and dequantized at load: memory, prefill and decode.

Runs alternate, each in a separate process: ``python -m benchmarks.sweeps.cpu_gguf model.gguf --out model.json``. The
model may also be a catalogue name. One thread computes. Figures are from its CPU time in the fastest prefill and step,
because other processes may use the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

PROMPT, STEPS, PREFILLS = 512, 8, 2


def memory() -> dict[str, float]:
    """Returns the memory that this process uses, now and at its peak, in GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"resident_gib": int(lines["VmRSS"].split()[0]) / 2**20, "peak_gib": int(lines["VmHWM"].split()[0]) / 2**20}


def run(model: str, dtype: str, blocks: bool, batches: list[int]) -> dict[str, float]:
    """Returns the memory after loading (without a cache), the prompt tokens per second, and the tokens per second of
    decode steps of each batch size."""
    import torch

    from shadowkv.engine.config import EngineConfig
    from shadowkv.engine.engine import Engine
    from shadowkv.engine.sampling_params import SamplingParams
    from shadowkv.models import load_model, storage

    torch.set_num_threads(1)
    if not blocks:
        storage.keeps = lambda form, device: False  # dequantizes, as on a GPU
    start = time.process_time()
    loaded = load_model(model, dtype=dtype, max_model_len=1024)
    figures = {"load_s": time.process_time() - start, "weights_gib": loaded.model.num_bytes / 2**30, **memory()}
    config = EngineConfig(
        model=model, kv="full", max_num_seqs=max(batches), max_model_len=1024, enable_prefix_caching=False
    )
    engine, rng = Engine(config, loaded), random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, 40000) for _ in range(count)]

    seconds = []
    for number in range(PREFILLS):
        engine.add_request(f"prompt {number}", tokens(PROMPT), SamplingParams(max_tokens=1, temperature=0.0))
        start = time.process_time()
        while engine.has_work:
            engine.step()
        seconds.append(time.process_time() - start)
    figures["prefill_tokens_per_s"] = PROMPT / min(seconds)
    for batch in batches:
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
        for number in range(batch):
            engine.add_request(f"{batch} {number}", tokens(16), params)
        seconds = []
        while engine.has_work:
            start = time.process_time()
            if len(engine.step()) == batch:
                seconds.append(time.process_time() - start)
        figures[f"decode_{batch}_tokens_per_s"] = batch / min(seconds)
    return figures


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON of the best figures of all rounds")
    parser.add_argument("--one", choices=("blocks", "dequantized"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.model, args.dtype, args.one == "blocks", args.batches)))
        return 0
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for how in ("blocks", "dequantized"):
            command = [sys.executable, "-m", "benchmarks.sweeps.cpu_gguf", *sys.argv[1:], "--one", how]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            figures = json.loads(done.stdout.splitlines()[-1])
            print(how, {key: round(value, 3) for key, value in figures.items()}, flush=True)
            before = best.setdefault(how, figures)
            best[how] = {key: (max if key.endswith("per_s") else min)(before[key], figures[key]) for key in figures}
    if args.out:
        from shadowkv.eval.provenance import provenance

        about = {**provenance(), "rounds": args.rounds}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"about": about, "model": args.model, "best": best}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

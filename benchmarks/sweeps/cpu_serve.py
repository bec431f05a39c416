"""CPU throughput compared with ``transformers``, on 48 prompts of 64 to 960 tokens with 64 new tokens each.

Every run is a separate process, so that its peak memory is its own. Runs of our engine and of transformers alternate,
each in float32 and bfloat16: ``python -m benchmarks.sweeps.cpu_serve --rounds 2 --out
benchmarks/results/cpu/cpu_serve.json``. Prompts are random tokens from a fixed seed; end tokens are ignored, so that
every run generates the same number.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
SEQUENCES, SHORTEST, LONGEST, NEW_TOKENS = 48, 64, 960, 64


def prompts() -> list[list[int]]:
    """Returns prompts whose lengths are evenly spread, in random order."""
    rng = random.Random(0)
    lengths = [SHORTEST + round(i * (LONGEST - SHORTEST) / (SEQUENCES - 1)) for i in range(SEQUENCES)]
    rng.shuffle(lengths)
    return [[rng.randrange(100, 40000) for _ in range(length)] for length in lengths]


def run_ours(dtype: str, kv: str) -> dict[str, float]:
    """Times our engine. Its prefill and decode steps overlap, so decode is timed from when all sequences run."""
    from shadowkv import LLM, SamplingParams

    llm = LLM(MODEL, kv=kv, dtype=dtype, max_num_seqs=SEQUENCES, max_model_len=LONGEST + NEW_TOKENS)
    engine, params = llm.engine, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for number, tokens in enumerate(prompts()):
        engine.add_request(str(number), tokens, params)
    generated, decode_tokens, decode_seconds, first = 0, 0, 0.0, 0.0
    while engine.has_work:
        before, full = time.perf_counter(), engine.stats().running == SEQUENCES and not engine.stats().waiting
        outputs = engine.step()
        generated += len(outputs)
        if full and len(outputs) == SEQUENCES:
            decode_tokens += len(outputs)
            decode_seconds += time.perf_counter() - before
        if not engine.stats().waiting and not first:
            first = time.perf_counter() - start
    seconds = time.perf_counter() - start
    assert generated == SEQUENCES * NEW_TOKENS
    return summary(seconds, first, decode_tokens / decode_seconds if decode_seconds else float("nan"))


def run_theirs(dtype: str) -> dict[str, float]:
    """Times ``generate`` of transformers on the left-padded batch. The stopping criterion, which is called once per
    token, records the times of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from shadowkv.models.sources import fetch

    file = fetch(MODEL)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)).eval()
    texts = prompts()
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    ticks: list[float] = []

    def tick(*_: Any, **__: Any) -> torch.Tensor:
        ticks.append(time.perf_counter())
        return torch.zeros(SEQUENCES, dtype=torch.bool)

    start = time.perf_counter()
    with torch.inference_mode():
        model.generation_config.eos_token_id = None
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=mask, stopping_criteria=[tick], **options)
    seconds = time.perf_counter() - start
    assert out.shape[1] == longest + NEW_TOKENS
    decode = SEQUENCES * (len(ticks) - 1) / (ticks[-1] - ticks[0])
    return summary(seconds, ticks[0] - start, decode)


def summary(seconds: float, first: float, decode: float) -> dict[str, float]:
    """Returns the figures of one run. Memory is the peak of the process, including weights."""
    tokens = sum(map(len, prompts())) + SEQUENCES * NEW_TOKENS
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "prefill_seconds": first,
        "decode_tokens_per_s": decode,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: %(default)s)")
    parser.add_argument("--kv", default="shadowkv", help="our policy (default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, help="JSON of every run")
    parser.add_argument("--one", nargs=2, metavar=("WHO", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        who, dtype = args.one
        print(json.dumps(run_ours(dtype, args.kv) if who == "shadowkv" else run_theirs(dtype)))
        return 0
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for dtype in args.dtype:
            for who in ("shadowkv", "transformers"):
                command = [sys.executable, "-m", "benchmarks.sweeps.cpu_serve", "--kv", args.kv, "--one", who, dtype]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                figures = json.loads(done.stdout.splitlines()[-1])
                runs.setdefault(f"{who} {dtype}", []).append(figures)
                print(who, dtype, {key: round(value, 2) for key, value in figures.items()}, flush=True)
    report(runs)
    if args.out:
        import torch
        import transformers

        from shadowkv.eval.provenance import provenance

        about = {**provenance(), "transformers": transformers.__version__, "cpu": platform.processor()}
        about["threads"] = str(torch.get_num_threads())
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"about": about, "kv": args.kv, "runs": runs}, indent=1) + "\n")
    return 0


def report(runs: dict[str, list[dict[str, float]]]) -> None:
    """Prints medians, and the ratio of our speed to that of transformers, each with its faster dtype."""
    medians = {
        name: {key: statistics.median(run[key] for run in repeats) for key in repeats[0]}
        for name, repeats in runs.items()
    }
    print(f"{'':24}{'tok/s':>9}{'decode tok/s':>14}{'seconds':>9}{'peak GiB':>10}")
    for name, row in medians.items():
        numbers = f"{row['tokens_per_s']:9.0f}{row['decode_tokens_per_s']:14.0f}"
        print(f"{name:24}{numbers}{row['seconds']:9.1f}{row['peak_gib']:10.2f}")
    for key in ("tokens_per_s", "decode_tokens_per_s"):
        ours, theirs = (
            max(row[key] for name, row in medians.items() if name.startswith(who))
            for who in ("shadowkv", "transformers")
        )
        print(f"ours / theirs, {key}: {ours / theirs:.2f}")


if __name__ == "__main__":
    sys.exit(main())

"""What ``return_selections`` costs: CPU time of decode steps in which a request of the batch asks for it, and of others

    python -m benchmarks.sweeps.selections --tokens 1024 --neighbours 1

Steps of both kinds alternate in one engine, so that other load on the machine affects both equally.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from statistics import median

from shadowkv import SamplingParams
from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig
from shadowkv.engine.engine import Engine


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--kv", default="turbo")
    parser.add_argument("--tokens", type=int, default=1024, help="of every prompt (default: %(default)s)")
    parser.add_argument("--neighbours", type=int, default=1, help="of the request that asks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="default: %(default)s")
    args = parser.parse_args(argv)
    sizes = {"max_num_seqs": 1 + args.neighbours, "max_cached_seqs": 0}
    sizes["max_model_len"] = args.tokens + args.steps + 64
    engine = Engine(EngineConfig(model=args.model, kv=args.kv, kv_dense_below=0, device="cpu", **sizes))
    rng, vocab = random.Random(1), engine.model_config.vocab_size
    params = SamplingParams(max_tokens=args.steps + 64, temperature=0.0, ignore_eos=True, cache_prompt=False)
    for number in range(1 + args.neighbours):
        engine.add_request(str(number), rng.choices(range(100, vocab), k=args.tokens), params)
    while len(engine.scheduler.running) <= args.neighbours:
        engine.step()
    asking = engine.scheduler.running[0].request
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for step in range(args.steps):
        asks = bool(step % 2)
        asking.params = replace(params, return_selections=asks)
        began = time.process_time()
        engine.step()
        seconds[asks].append(time.process_time() - began)
    without, with_them = median(seconds[False]), median(seconds[True])
    print(
        f"{args.kv}, {args.neighbours} beside one that asks, {args.tokens} tokens each: {1e3 * without:.1f} ms of CPU a"
    )
    print(f"step, {1e3 * with_them:.1f} where it asks: its neighbours keep {without / with_them:.1%} of their speed")


if __name__ == "__main__":
    main()

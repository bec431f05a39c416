"""Measures which part of a compressed prompt the decode steps after it read.

A prompt that is restored from a file could leave on the disk what no step has selected yet. What this could save
depends on how much of it the first steps select. Results are rows of a CSV file, one for each prompt and number of
steps: the share of values (of tokens and kv heads) and of latents (of tokens, for all kv heads together) that a step
has selected so far, and the share of pages of 64 tokens that have any of these. The policy selects single tokens
(``chunk=1``). With ``--kv turbo:budget=0.0104`` a
step selects the share that it selects of 61,440 tokens or more. Prompts that the file already has are not
measured again. ``--summary`` prints means over prompts.

    python -m benchmarks.selection.touched --model smollm2-135m-64k --length 16384 --prompts 1 --out FILE
    python -m benchmarks.selection.touched --out FILE --summary
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.selection.prompts import add_prompt_arguments, prompts_of
from benchmarks.sweeps.engines import add_model_arguments, model_of
from benchmarks.sweeps.rows import read, write
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.provenance import commit
from shadowkv.eval.running.caches import open_cache_as, prefill_all
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel

STEPS = (1, 8, 32, 96)
SHARES = ("values", "value_pages", "latents", "latent_pages")


class Touched:
    """A ``selection_hook`` that records which tokens of a prompt are selected. There is one sequence.

    Attributes:
        of_layers: bool [kv heads, tokens] for each layer, True if a step has selected the token.
    """

    def __init__(self) -> None:
        self.of_layers: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        (chunks,) = selected.chunks.cpu()
        new = torch.zeros(len(chunks), int(batch.num_chunks[0]), dtype=torch.bool)
        for own, of_head in zip(new, chunks, strict=True):
            own[of_head[of_head >= 0].long()] = True
        touched = self.of_layers.setdefault(layer, torch.zeros_like(new))
        touched |= new[:, : touched.shape[1]]  # pages that were compressed since the first step are not the prompt's
        return selected

    def shares(self) -> dict[str, float]:
        """Returns ``SHARES``, means over layers."""
        values = torch.stack(list(self.of_layers.values()))
        latents = values.any(1)
        pages = [x.unflatten(-1, (-1, PAGE)).any(-1) for x in (values, latents)]
        return dict(zip(SHARES, (float(x.float().mean()) for x in (values, pages[0], latents, pages[1])), strict=True))


def follow(loaded: LoadedModel, spec: KVSpec, prompt: list[int], capacity: int) -> dict[int, dict[str, float]]:
    """Returns the shares after each of ``STEPS`` greedy steps of a policy that compresses the prompt."""
    cache = open_cache_as(KVCache, loaded, spec, capacity, 1)
    touched, runner, shares = Touched(), Runner(loaded.model, cache), {}
    (sequence,), logits = prefill_all(loaded.model, [cache], prompt, capacity)
    cache.selection_hook, token = touched, int(logits[0].argmax())
    with torch.inference_mode():
        for number in range(1, STEPS[-1] + 1):
            token = int(runner.decode([sequence], [token]).argmax())
            if number in STEPS:
                shares[number] = touched.shares()
    return shares


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_prompt_arguments(parser, length=16384, prompts=1)
    parser.add_argument("--kv", default="turbo", help="policy that selects single tokens (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        spec = preset(args.kv, dense_below=0)
    except ValueError as error:
        parser.error(f"--kv {args.kv}: {error}")
    if not spec.selects or spec.chunk != 1:
        found = f"selects chunks of {spec.chunk} tokens" if spec.selects else "selects no tokens"
        parser.error(f"--kv {args.kv} {found}; use a policy with an index and chunk=1, such as turbo")
    rows = read(args.out) if args.out.exists() else []
    if not args.summary:
        capacity = args.length + 2 * STEPS[-1]
        loaded = load_from_config(EngineConfig(**model_of(args), max_model_len=capacity))
        for kind in args.text:
            for prompt, _ in prompts_of(kind, loaded, args.prompts, args.length, STEPS[-1], args.seed):
                about = {"model": args.model, "kv": args.kv, "length": str(args.length)}
                about |= {"text": kind, "prompt": prompt.name}
                if any(about.items() <= row.items() for row in rows):
                    continue
                for steps, shares in follow(loaded, spec, prompt.tokens, capacity).items():
                    figures = {name: f"{share:.4f}" for name, share in shares.items()}
                    rows.append({**about, "steps": str(steps), **figures, "commit": commit()})
                write(args.out, list(rows[0]), rows)
                print(f"{prompt.name}: {rows[-1]}", flush=True)
    for kv, length in dict.fromkeys((row["kv"], row["length"]) for row in rows):
        for steps in map(str, STEPS):
            own = [row for row in rows if (row["kv"], row["length"], row["steps"]) == (kv, length, steps)]
            means = (f"{name} {100 * np.mean([float(row[name]) for row in own]):.1f} %" for name in SHARES)
            print(f"{kv}, {length} tokens, {len(own)} prompts, {steps} steps: {', '.join(means)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

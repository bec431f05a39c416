"""How many blocks of keys a sparse prefill attends to, by position, for RULER prompts, as a JSON file.

Shares refer to the blocks up to each tile, as in ``--replay`` of the sweeps; the file's ``replay`` is that flag's
value. ``--extrapolate`` adds longer prompts: a tile keeps about the same number of blocks wherever it is, so the mean
number for the longest measured prompts is used.

    python scripts/prefill_density.py --adapter smollm2-135m-64k --rope-theta 4e6 --length 16384 32768 61440 \\
        --extrapolate 124928 249856 --out results/prefill/density.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.loading import load_from_config
from shadowkv.engine.prefill import BLOCK_TOKENS
from shadowkv.eval import ruler
from shadowkv.eval.caches import open_cache, prefill
from shadowkv.eval.provenance import provenance
from shadowkv.kvcache import sparse_prefill
from shadowkv.kvcache.presets import preset
from shadowkv.load_settings import OVERRIDES_HELP, parse_overrides
from shadowkv.models.loader import LoadedModel
from shadowkv.ops.select_blocks.reference import BLOCK

TASKS = ("niah_multivalue", "vt", "qa_1", "fwe", "niah_multikey_3")

Kept = dict[int, float]
"""By a tile's position, counted from the prompt's start: blocks that it attended to, averaged over layers and heads."""


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig.model, help="(default: %(default)s)")
    parser.add_argument("--adapter", metavar="DIR", help="PEFT LoRA directory, merged at load")
    parser.add_argument("--rope-theta", type=float, help="overrides the model's own")
    parser.add_argument("--hf-overrides", type=parse_overrides, metavar="JSON", help=OVERRIDES_HELP)
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=ruler.TASKS, metavar="TASK", help="of RULER")
    parser.add_argument("--length", type=int, nargs="+", default=[61440], metavar="TOKENS", help="of prompts")
    parser.add_argument("--extrapolate", type=int, nargs="+", default=[], metavar="TOKENS", help="of longer ones")
    parser.add_argument("--samples", type=int, default=1, help="of each task and length (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, help="RULER's files (default: of the installed package)")
    parser.add_argument("--share", type=float, default=sparse_prefill.SHARE, help="SHARE (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    sparse_prefill.SHARE = args.share
    longest = max(args.length)
    loaded = load_from_config(
        EngineConfig(
            args.model,
            adapter=args.adapter,
            rope_theta=args.rope_theta,
            hf_overrides=args.hf_overrides,
            load_format=args.load_format,
            device=args.device,
            max_model_len=longest,
        )
    )
    if loaded.model.device.type == "cuda":
        torch.cuda.set_device(loaded.model.device)
    found: dict[int, dict[str, Kept]] = defaultdict(dict)
    for length in sorted(set(args.length)):
        for task in args.tasks:
            samples = ruler.samples(task, loaded.tokenizer, length, args.samples, args.seed, args.data)
            prompts = (loaded.tokenizer.encode(sample.turns[0], add_special_tokens=True) for sample in samples)
            found[length][task] = mean([measure(loaded, prompt) for prompt in prompts])
            print(f"{length} {task}: {density(found[length][task]):.4f}", flush=True)
    figures = summary(found, args.extrapolate, BLOCK_TOKENS[loaded.model.device.type])
    about = {**provenance(), "model": loaded.name, "share": args.share, "seed": args.seed, "samples": args.samples}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"about": about, **figures}, indent=1) + "\n", encoding="utf-8")
    print(f"--replay {figures['replay']}", flush=True)
    return 0


def measure(loaded: LoadedModel, prompt: list[int]) -> Kept:
    """Blocks kept for one prompt; raises ValueError if none of its blocks is sparse."""
    cache = open_cache(loaded, preset("full:prefill=sparse"), len(prompt) + 1)
    seen: defaultdict[int, list[Tensor]] = defaultdict(list)  # by the position of the first tile

    def hook(layer: int, q: Tensor, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        seen[indices.shape[2] - indices.shape[1]].append(counts.float().mean(0))
        return indices, counts

    cache.block_hook = hook
    prefill(loaded.model, cache, [(cache.allocate(len(prompt), len(prompt) + 1), prompt)], scored=True)
    if not seen:
        raise ValueError(f"a prompt of {len(prompt)} tokens is attended to as a whole")
    means = {first: torch.stack(counts).mean(0).tolist() for first, counts in seen.items()}
    return {first + tile: kept for first, row in means.items() for tile, kept in enumerate(row)}


def mean(prompts: Sequence[Kept]) -> Kept:
    """Mean tile by tile, over the prompts that have it."""
    tiles = sorted({tile for one in prompts for tile in one})
    return {tile: float(np.mean([one[tile] for one in prompts if tile in one])) for tile in tiles}


def density(kept: Kept, first: int = 0, stop: int | None = None) -> float:
    """Share of the blocks up to each tile from ``first`` to before ``stop``, with equal weight for each block."""
    tiles = [tile for tile in kept if tile >= first and (stop is None or tile < stop)]
    return sum(kept[tile] for tile in tiles) / sum(tile + 1 for tile in tiles)


def blocks_per_tile(kept: Kept) -> float:
    """Mean number of blocks of tiles that choose: without the last ones, which attend to everything."""
    whole = -(-sparse_prefill.DENSE_LAST // BLOCK) + 1  # a prompt may end within a tile
    return float(np.mean([kept[tile] for tile in sorted(kept)[:-whole]]))


def extrapolated(blocks: float, length: int, block_tokens: int) -> float:
    """Density of a prompt of ``length`` tokens whose tiles keep ``blocks`` each, after a first block of queries that
    attends to everything without choosing."""
    tiles = -(-length // BLOCK)
    dense = sparse_prefill.DENSE_LAST // BLOCK
    kept = {tile: min(blocks, tile + 1) for tile in range(block_tokens // BLOCK, tiles - dense)}
    return density(kept | {tile: float(tile + 1) for tile in range(tiles - dense, tiles)})


def summary(found: dict[int, dict[str, Kept]], longer: Sequence[int], block_tokens: int) -> dict[str, object]:
    """Content of the file, for prompts by length and task."""
    together = {length: mean(list(tasks.values())) for length, tasks in found.items()}
    step = block_tokens // BLOCK
    by_end = {
        str(length): {
            str((first + step) * BLOCK): density(kept, first, first + step)
            for first in range(min(kept) // step * step, max(kept) + 1, step)
        }
        for length, kept in together.items()
    }
    measured = {length: density(kept) for length, kept in together.items()}
    blocks = blocks_per_tile(together[max(together)])
    estimated = {length: extrapolated(blocks, length, block_tokens) for length in longer}
    return {
        "density": {str(length): value for length, value in measured.items()},
        "extrapolated": {str(length): value for length, value in estimated.items()},
        "blocks_per_tile": {str(length): blocks_per_tile(kept) for length, kept in together.items()},
        "by_task": {
            str(length): {task: density(one) for task, one in tasks.items()} for length, tasks in found.items()
        },
        "by_end_of_block_of_queries": by_end,
        "replay": ",".join(f"{length}={value:.4f}" for length, value in {**measured, **estimated}.items()),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Measures, on RULER's prompts, how many blocks of keys a sparse prefill attends to, and how much of the attention
these blocks do not represent.

A density is the share of the blocks up to a tile that the tile attends to. Densities go to a JSON file, in which each
model has an entry. The file's ``replay`` is a value for the sweeps' flag ``--replay``: for each length, the density of
the model that keeps most blocks. ``--extrapolate`` adds longer prompts, whose densities are extrapolated from how the
number of a tile's blocks grows with the tile's position. ``--mass-out`` adds rows to a CSV file. A row has the share of
the exact softmax that a tile's blocks leave out or count too often. One pair of columns has the mean and the 99th
percentile, over tiles, heads and layers, of the tile's mean over its queries; another pair has those of the tile's
worst query. Rows leave out the last tiles of a prompt, which attend to everything.

    python -m benchmarks.sweeps.density --adapter smollm2-135m-64k --rope-theta 4e6 --length 16384 32768 61440 \\
        --extrapolate 124928 249856 --out results/prefill/density.json --mass-out results/prefill/mass.csv
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.sweeps.engines import add_model_arguments, model_of
from benchmarks.sweeps.rows import append
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.provenance import provenance
from shadowkv.eval.running.caches import open_cache, prefill
from shadowkv.eval.suites import ruler
from shadowkv.kvcache.parts import prefill as sparse_prefill
from shadowkv.kvcache.policy.spec import PREFILL_ERROR
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel
from shadowkv.ops.select_blocks.reference import BLOCK, Blocks

TASKS = ("niah_multivalue", "vt", "qa_1", "fwe", "niah_multikey_3")

ROWS = 4096
"""Number of queries of a head whose exact softmax is computed at once. They form whole tiles."""

Kept = dict[int, float]
"""Number of blocks that a tile attended to, averaged over layers and heads, by the tile's number counted from the
prompt's start."""


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=ruler.TASKS, metavar="TASK", help="of RULER")
    parser.add_argument("--length", type=int, nargs="+", default=[61440], metavar="TOKENS", help="of prompts")
    parser.add_argument("--extrapolate", type=int, nargs="+", default=[], metavar="TOKENS", help="of longer ones")
    parser.add_argument("--samples", type=int, default=1, help="of each task and length (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, help="RULER's files (default: of the installed package)")
    parser.add_argument("--prefill-error", type=float, default=PREFILL_ERROR, metavar="SHARE", help="as of the server")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--mass-out", type=Path, help="CSV file (default: none; exact attention takes time)")
    args = parser.parse_args(argv)
    loaded = load_from_config(EngineConfig(**model_of(args), max_model_len=max(args.length)))
    if loaded.model.device.type == "cuda":
        torch.cuda.set_device(loaded.model.device)
    name = f"{loaded.name} {json.dumps(args.hf_overrides)}" if args.hf_overrides else loaded.name
    kept: dict[int, dict[str, Kept]] = defaultdict(dict)
    for length in sorted(set(args.length)):
        gone = LeftOut() if args.mass_out else None
        for task in args.tasks:
            samples = ruler.samples(task, loaded.tokenizer, length, args.samples, args.seed, args.data)
            prompts = (loaded.tokenizer.encode(sample.turns[0], add_special_tokens=True) for sample in samples)
            kept[length][task] = mean([measure(loaded, prompt, args.prefill_error, gone) for prompt in prompts])
            print(f"{length} {task}: {density(kept[length][task]):.4f}", flush=True)
        if gone:
            together = density(mean(list(kept[length].values())))
            row = {"model": name, "length": length, "rule": f"prefill_error={args.prefill_error}"}
            add_row(args.mass_out, {**row, "density": round(together, 4), **gone.figures()})
    about = {**provenance(), "prefill_error": args.prefill_error, "seed": args.seed, "samples": args.samples}
    figures = summary(kept, args.extrapolate, BLOCK_TOKENS[loaded.model.device.type])
    written = add_model(args.out, name, {"about": about, **figures})
    print(f"--replay {written['replay']}", flush=True)
    return 0


class LeftOut:
    """Collects the shares of exact attention that tiles of several prompts leave out."""

    def __init__(self) -> None:
        self._means: list[Tensor] = []
        self._largest: list[Tensor] = []

    def add(self, q: Tensor, k: Tensor, blocks: Blocks) -> None:
        """Adds the tiles of a layer."""
        means, largest = left_out(q, k, blocks)
        self._means.append(means.cpu())
        self._largest.append(largest.cpu())

    def figures(self) -> dict[str, float]:
        """Columns of a row."""
        means, largest = torch.cat(self._means), torch.cat(self._largest)
        figures = {
            "mass_left_out_mean": means.mean().item(),
            "mass_left_out_p99": np.quantile(means, 0.99).item(),
            "largest_of_a_tile_mean": largest.mean().item(),
            "largest_of_a_tile_p99": np.quantile(largest, 0.99).item(),
        }
        return {name: round(value, 5) for name, value in figures.items()}


def left_out(q: Tensor, k: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Returns the shares of the exact softmax that the tiles' blocks do not represent. A sampled block stands for
    several blocks, so its share is multiplied by this number. The result for a query is the distance from 1 of the sum
    over the listed blocks.

    Args:
        q: RoPE-rotated queries [n, H_q, d], the last n of m positions (H_q query heads, H kv heads, d dimensions of a
            head).
        k: RoPE-rotated keys [m, H, d].
        blocks: as ``select_blocks`` returns them.

    Returns:
        The mean over a tile's queries, and the largest of them, both float32 [tiles]. All heads' tiles are included,
        except tiles that are not full or attend to everything.
    """
    (n, query_heads, dim), (m, heads) = q.shape, k.shape[:2]
    indices, counts, weights = blocks
    number, none = indices.shape[2], q.new_empty(0, dtype=torch.float32)
    means, largest = [none], [none]
    position = torch.arange(number * BLOCK, device=q.device)
    keys = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, number * BLOCK - m))
    for head in range(query_heads):
        for start in range(0, n // BLOCK * BLOCK, ROWS):
            rows = q[start : min(start + ROWS, n // BLOCK * BLOCK), head]
            tiles = slice(start // BLOCK, start // BLOCK + len(rows) // BLOCK)
            scores = rows.float() @ keys[:, head * heads // query_heads].float().T * dim**-0.5
            own = torch.arange(m - n + start, m - n + start + len(rows), device=q.device)
            shares = scores.masked_fill_(position > own[:, None], float("-inf")).softmax(1)
            of_blocks = shares.unflatten(1, (number, BLOCK)).sum(2).unflatten(0, (-1, BLOCK))  # [tiles, rows, number]
            listed = torch.arange(number, device=q.device) < counts[head, tiles, None]
            stands_for = torch.zeros(listed.shape, device=q.device)
            stands_for.scatter_add_(
                1, indices[head, tiles].long() * listed, weights[head, tiles].masked_fill(~listed, 0)
            )
            gone = ((of_blocks * stands_for[:, None]).sum(2) - 1).abs()
            choosing = counts[head, tiles] < own[BLOCK - 1 :: BLOCK] // BLOCK + 1
            means.append(gone.mean(1)[choosing])
            largest.append(gone.amax(1)[choosing])
    return torch.cat(means), torch.cat(largest)


def add_row(path: Path, row: dict[str, object]) -> None:
    """Appends a row to a CSV file. A new file begins with the names of the columns."""
    row |= {name: value for name, value in provenance().items() if name in ("commit", "command", "gpu")}
    append(path, list(row), [row])
    print(row, flush=True)


def add_model(path: Path, name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Adds a model's figures to the file. Returns the content of the file."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    content["models"][name] = figures
    largest: dict[str, float] = {}
    for kind in ("extrapolated", "density"):  # measured values replace extrapolated ones
        here: dict[str, float] = {}
        for model in content["models"].values():
            for length, value in model[kind].items():
                here[length] = max(value, here.get(length, 0.0))
        largest |= here
    content["replay"] = ",".join(f"{length}={largest[length]:.4f}" for length in sorted(largest, key=int))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def measure(loaded: LoadedModel, prompt: list[int], error: float, gone: LeftOut | None = None) -> Kept:
    """Returns the number of blocks that tiles of a prompt attend to, and adds what they leave out to ``gone``. Raises
    ValueError if the prompt has no sparse tile."""
    cache = open_cache(loaded, preset("full", prefill="sparse", prefill_error=error), len(prompt) + 1)
    seen: defaultdict[int, list[Tensor]] = defaultdict(list)  # by the number of the first tile of a block of queries

    def hook(layer: int, q: Tensor, k: Tensor, blocks: Blocks) -> Blocks:
        indices, counts, _ = blocks
        seen[indices.shape[2] - indices.shape[1]].append(counts.float().mean(0))
        if gone is not None:
            gone.add(q, k, blocks)
        return blocks

    cache.block_hook = hook
    prefill(loaded.model, cache, [(cache.allocate(len(prompt), len(prompt) + 1), prompt)], scored=True)
    if not seen:
        raise ValueError(f"a prompt of {len(prompt)} tokens is attended to as a whole")
    means = {first: torch.stack(counts).mean(0).tolist() for first, counts in seen.items()}
    return {first + tile: kept for first, row in means.items() for tile, kept in enumerate(row)}


def mean(prompts: Sequence[Kept]) -> Kept:
    """Returns the mean of each tile, over the prompts that have this tile."""
    tiles = sorted({tile for kept in prompts for tile in kept})
    return {tile: float(np.mean([kept[tile] for kept in prompts if tile in kept])) for tile in tiles}


def density(kept: Kept, first: int = 0, stop: int | None = None) -> float:
    """Returns the share of the blocks up to a tile that the tile attends to, over the tiles from ``first`` to before
    ``stop``. Each block has the same weight."""
    tiles = [tile for tile in kept if tile >= first and (stop is None or tile < stop)]
    return sum(kept[tile] for tile in tiles) / sum(tile + 1 for tile in tiles)


def growth(kept: Kept) -> tuple[float, float]:
    """Returns factor and exponent of a power law: number of blocks of a tile = factor * position ** exponent, with
    positions counted from 1. It is a least-squares fit of logarithms over the sparse tiles. The last tiles are left
    out, because they attend to everything."""
    dense_tiles = -(-sparse_prefill.DENSE_LAST // BLOCK) + 1  # a prompt may end within a tile
    tiles = np.array(sorted(kept)[:-dense_tiles])
    exponent, factor = np.polyfit(np.log(tiles + 1), np.log([kept[tile] for tile in tiles]), 1)
    return float(np.exp(factor)), float(exponent)


def extrapolated(kept: Kept, length: int, block_tokens: int) -> float:
    """Returns the density of a prompt of ``length`` tokens if the number of blocks grows as in ``kept``. The first
    block of queries is left out, because it attends to everything."""
    factor, exponent = growth(kept)
    tiles = -(-length // BLOCK)
    dense = sparse_prefill.DENSE_LAST // BLOCK
    more = {
        tile: min(factor * (tile + 1) ** exponent, tile + 1) for tile in range(block_tokens // BLOCK, tiles - dense)
    }
    return density(more | {tile: float(tile + 1) for tile in range(tiles - dense, tiles)})


def summary(by_task: dict[int, dict[str, Kept]], longer: Sequence[int], block_tokens: int) -> dict[str, Any]:
    """Returns a model's entry in the file, from the prompts' blocks by length and task."""
    together = {length: mean(list(tasks.values())) for length, tasks in by_task.items()}
    step = block_tokens // BLOCK
    by_end = {
        str(length): {
            str((first + step) * BLOCK): density(kept, first, first + step)
            for first in range(min(kept) // step * step, max(kept) + 1, step)
        }
        for length, kept in together.items()
    }
    factor, exponent = growth(together[max(together)])
    return {
        "density": {str(length): density(kept) for length, kept in together.items()},
        "extrapolated": {str(length): extrapolated(together[max(together)], length, block_tokens) for length in longer},
        "blocks_of_tile": f"{factor:.3f} * tile ** {exponent:.3f}",
        "by_task": {
            str(length): {task: density(kept) for task, kept in tasks.items()} for length, tasks in by_task.items()
        },
        "by_end_of_block_of_queries": by_end,
    }


if __name__ == "__main__":
    sys.exit(main())

"""Benches of single ops: ``python -m benchmarks.ops NAME [--cases N] [--out FILE]`` prints rows of results for every
shape.

Every result is checked against the op's reference, or against another backend, before it is timed. On a GPU, times are
medians over replays of a CUDA graph that has several calls.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.ops.timing import BENCHES, Row
from shadowkv.eval.provenance import provenance

MODULES = {
    "dense_attention": "prefill_attention",
    "packed_attention": "prefill_attention",
    "select_blocks": "sparse_prefill",
    "attend_blocks": "sparse_prefill",
    "paged_attention": "paged_attention",
    "paged_attention_cpu": "paged_attention",
    "attend_selected": "selection.attend_selected",
    "attend_coded": "attend_coded",
    "attend_mixed": "attend_coded",
    "verified_rows": "paged_attention",
    "chunk_mean_scores": "selection.chunk_selection",
    "select_top_chunks": "selection.chunk_selection",
    "sign_scores": "selection.sketch_selection",
    "select_by_sketch": "selection.sketch_selection",
    "quantize_rows": "quantize_rows",
    "fetch_chunks": "selection.fetch_chunks",
    "sample_tokens": "sample_tokens",
    "ssd": "state_space",
    "grouped_matmul": "experts",
    "grouped_quantized_matmul": "experts",
}
"""Benches, and the modules in this folder that have them. A module is imported only for its own benches, because some
import Triton."""


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODULES, metavar="NAME", help=", ".join(MODULES))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--cases", type=int, help="measure only the first N shapes")
    args = parser.parse_args(argv)
    import_module(f"benchmarks.ops.{MODULES[args.name]}")
    bench = BENCHES[args.name]
    if not bench.available():
        raise SystemExit("needs a GPU and the CUDA ops (csrc/build_cuda.py)")
    torch.manual_seed(0)
    results: list[Row] = []
    for case in bench.cases[: args.cases]:
        for row in bench.measure(case):
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            results.append(row)
        torch.cuda.empty_cache()
    if args.out:
        content = {**provenance(), "results": results}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

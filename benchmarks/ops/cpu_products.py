"""Products with weights in every format on one CPU thread, beside float32 weights: processor time and bits per weight.

``python -m benchmarks.ops.cpu_products --out products.csv``
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from shadowkv.layers.quantized_matrix import QuantizedMatrix, RowBlock
from shadowkv.models.checkpoints.quantized.registry import SHAPES
from shadowkv.models.filling import fill_random
from shadowkv.ops.registry import Ops

ROWS, COLUMNS, ROUNDS = 8192, 2048, 20


def nanoseconds(product: Callable[[], object]) -> float:
    """Returns the processor time per weight. It is the least of several rounds, because other processes may use the
    caches in some."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        product()
        times.append(time.process_time() - start)
    return min(times[1:]) / (ROWS * COLUMNS) * 1e9


def main() -> int:
    """Writes a line for each format and number of tokens. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain, lines = torch.randn(ROWS, COLUMNS), []
    matrices = {name: QuantizedMatrix(COLUMNS, [RowBlock(ROWS, form)], dtype=torch.float32, device=torch.device("cpu"))
                for name, form in SHAPES.items()}  # fmt: skip
    for matrix in matrices.values():
        matrix.ops = Ops()
        fill_random(matrix, torch.Generator().manual_seed(0))
    for tokens in args.tokens:
        x = torch.randn(tokens, COLUMNS)
        lines.append(("float32", tokens, 32.0, nanoseconds(lambda x=x: F.linear(x, plain))))
        for name, matrix in matrices.items():
            took = nanoseconds(lambda x=x, matrix=matrix: matrix(x, 0, ROWS))
            lines.append((name, tokens, 8 * matrix.nbytes / matrix.num_values, took))
    with args.out.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(("form", "tokens", "bits", "ns"))
        rows.writerows((form, tokens, f"{bits:.3f}", f"{ns:.3f}") for form, tokens, bits, ns in lines)
    print(args.out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Rows of quantised numbers in PyTorch."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.quantised.rows import QuantisedRows


def dequantise_rows(rows: QuantisedRows) -> Tensor:
    """Rows as plain numbers.

    Args:
        rows: [N, K] in any form.

    Returns:
        float32 [N, K].

    Raises ValueError if their tensors do not fit their form.
    """
    return rows.form.unpack(rows.tensors)

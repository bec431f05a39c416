"""Dequantises rows in PyTorch."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.quantised.rows import QuantisedRows


def dequantise_rows(rows: QuantisedRows) -> Tensor:
    """Dequantises rows [N, K] to float32 [N, K].

    Args:
        rows: N rows of K columns, in any form.

    Raises:
        ValueError: the tensors do not fit the form.
    """
    return rows.form.unpack(rows.tensors)

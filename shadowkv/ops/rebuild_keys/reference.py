"""Low-rank key reconstruction in PyTorch (ShadowKV, arXiv:2410.21465, algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.gather_chunks.reference import locate
from shadowkv.ops.rotate.reference import rotate_by
from shadowkv.ops.rotate.tables import RotaryTables


def rebuild_keys(
    latents: Tensor, basis: Tensor, slots: Tensor, pages: Tensor, selected: Tensor, rotary: RotaryTables
) -> Tensor:
    """Rotated keys of selected chunks: RoPE(latents x basis).

    Args:
        latents: [N, C, c, r], views over all pages.
        basis: [slots, r, H, d].
        slots: int64 [B].
        pages: int64 [B, P].
        selected: int64 [B, H, k]; -1 yields some key of the sequence, to be masked by the reader.

    Returns:
        [B, H, k * c, d].
    """
    names, chunks = locate(pages, selected, latents.shape[1])
    picked = latents[names, chunks].flatten(2, 3)  # [B, H, k * c, r]
    keys = picked @ basis[slots].transpose(1, 2)
    within = torch.arange(latents.shape[2], device=selected.device)
    positions = (selected.clamp(min=0).unsqueeze(-1) * latents.shape[2] + within).flatten(2)
    return rotate_by(keys, rotary.cos[positions], rotary.sin[positions], rotary)

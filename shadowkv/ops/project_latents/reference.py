"""Projection of keys in PyTorch (ShadowKV, arXiv:2410.21465, section 4.1)."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.codec import LatentCodec


def project_latents(
    keys: Tensor,
    codec: LatentCodec,
    basis: Tensor,
    mean: Tensor | None,
    step: Tensor | None,
    states: Tensor,
    latents: Tensor,
    pages: Tensor,
    widths: Tensor | None = None,
) -> None:
    """Writes the latents of full pages of keys.

    Args:
        keys: [L, n, 64, H, d], n pages of keys of L layers, before RoPE.
        codec: codec of the latents.
        basis: [L, states, r, H, d], r rank dimensions. With ``step``, each row is multiplied by its step.
        mean: float32 [L, states, r], the products of the mean key with ``basis``. They are subtracted from the keys'
            products. None if ``step`` is None.
        step: float32 [L, states, r], quantization steps of the latents; None if latents are not quantized.
        states: int64 [n], the state of each page in ``basis``, ``mean`` and ``step``, or [1] if all pages share one.
        latents: [L, N, C, c, w] in the codec's format, views over all pages, each of C chunks of c tokens, C c = 64.
            Written.
        pages: int64 [n], page ids, at which the latents are written.
        widths: uint8 [L, states, r], bits of each rank dimension, for codecs that learn them; None for other codecs.
    """
    rows = basis[:, states].flatten(3).transpose(2, 3)  # [L, n or 1, H d, r]
    if mean is None or step is None:
        found = keys.flatten(3) @ rows
    else:
        centred = keys.flatten(3).float() @ rows.float() - mean[:, states].unsqueeze(2)
        found = centred / step[:, states].square().unsqueeze(2)
    learned = () if widths is None else (widths[:, states].unsqueeze(2),)
    latents[:, pages] = codec.encode(found, *learned).unflatten(2, latents.shape[2:4])

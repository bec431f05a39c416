"""Stored rows for the Triton attention kernels: decodes pages, and converts queries and outputs to match.

Kernels do not undo the codec's rotation, and they keep dimensions in the order of the stored bytes. So queries are
rotated and reordered before the kernel, and the output is rotated and ordered back after it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows
from shadowkv.ops.attention_results import merge_parts
from shadowkv.ops.codec import LANES, CodecId
from shadowkv.ops.triton_sizes import TOKENS, dot_size

PAGEWISE = (CodecId.KVARN_4BIT, CodecId.KVARN_2BIT)
"""Codecs whose tokens can be decoded only in whole pages."""

TOKENWISE = (*LANES, CodecId.POLAR_INT4, CodecId.TQ3_0, CodecId.FP8, CodecId.VQ_4X256)
"""Codecs whose tokens can be decoded one by one, so that tokens of several pages can be decoded together."""

FORMATS = {
    CodecId.FP8: "codes",
    CodecId.LLOYD_3BIT: "planes",
    CodecId.ROTATED_3BIT: "planes",
    CodecId.TQ3_0: "blocks",
    CodecId.VQ_4X256: "vectors",
    CodecId.KVARN_4BIT: "steps of channels",
    CodecId.KVARN_2BIT: "steps of tokens",
}
"""``FORMAT`` for ``decoded_rows``, by codec. Codecs that are not listed use ``codes``."""


def codes_of(source: DenseRows | CodedRows) -> Tensor:
    """Returns the stored tokens: the rows [N, H, C, c, d] of ``DenseRows``, or the codes uint8 [N, H, C, c, w] of
    ``CodedRows``."""
    return source.rows if isinstance(source, DenseRows) else source.codes


class StoredForm:
    """The arguments with which a kernel reads stored rows. Tensors that a format does not use are arbitrary.

    Args:
        source: the stored rows.
        dim: the head dim.
        exact: dtype of the operands of the kernel's matrix products.

    Attributes:
        format: ``FORMAT`` for ``decoded_rows``.
        bits: bits per code.
        columns: columns of a decoded row, a power of two.
        table: the value of each code, in units of the scale or the step, with dtype ``exact``.
        row_entries: entries of the table per row of the batch, 0 if all rows share one table.
        scales: number of scales per token. A token's scales are contiguous.
        scaled: whether the kernel multiplies a decoded row by the token's first scale.
        scale, scale_pages: the scales, and the ids of their pages.
        stepped: whether each head has a step, which multiplies all its rows.
        step: float32 [B, H, 1], the steps.

    Raises:
        ValueError: a codec that the kernels do not support.
    """

    def __init__(self, source: DenseRows | CodedRows, dim: int, exact: torch.dtype) -> None:
        self.rotation: Tensor | None = None
        self.largest: Tensor | None = None
        self.dim, self.exact, self.format, self.bits = dim, exact, "dense", 8
        self.scales, self.scaled, self.stepped, self.row_entries = 1, False, False, 0
        self.columns = dot_size(dim)
        self.scale = self.table = self.step = codes_of(source)
        self.scale_pages = source.pages
        self.order = torch.arange(self.columns, device=self.table.device)
        if isinstance(source, DenseRows):
            return
        codec, device = source.codec, self.table.device
        if codec.id not in TOKENWISE + PAGEWISE:
            raise ValueError(f"attend_coded in Triton does not know codec {codec.name!r} ({codec.id})")
        self.format, self.rotation, self.scale = FORMATS.get(CodecId(codec.id), "codes"), source.rotation, source.scale
        self.scale_pages = source.pages_of_scales
        self.scales = max(1, codec.scales(dim))
        levels = codec.code_levels(dim, device)
        if levels is not None:
            self.table, self.bits = levels.to(exact), len(levels).bit_length() - 1
        self.scaled = codec.id in (*LANES, CodecId.POLAR_INT4, CodecId.KVARN_4BIT)
        if codec.id in LANES:
            self.order = _lane_order(dim, self.bits, device)
            self.columns = len(self.order)
            if codec.id == CodecId.LLOYD_3BIT and dim % 128 == 0:
                self.format = "selectors"
        elif codec.id == CodecId.POLAR_INT4:
            self.order = _halves_order(dim, device)
        elif codec.id == CodecId.FP8:
            (step,) = source.state
            self.stepped, self.step = True, step[source.states].contiguous()
        elif codec.id == CodecId.VQ_4X256:
            largest, codebook = source.state
            self.largest, self.table = largest[source.states], codebook[source.states].to(exact).contiguous()
            self.row_entries = self.table[0].numel()
        elif codec.id in PAGEWISE:
            self.bits = codec.row_bytes(dim) * 8 // dim

    def ordered(self, q: Tensor) -> Tensor:
        """Rotates and reorders queries [..., d] to match stored rows, [..., columns]."""
        asked = q if self.rotation is None else q @ self.rotation
        padded = torch.nn.functional.pad(asked, (0, self.columns))
        return padded[..., self.order].to(self.exact)

    def merged(self, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Merges the attention of parts, ``out`` [B, H, parts, G, columns] and ``lse`` [B, H, parts, G], for G query
        heads per kv head. Returns the attention [B, H * G, d] and its log-sum-exps [B, H * G]."""
        joined, total = merge_parts(out, lse)
        return self._restored(joined).flatten(1, 2).to(dtype), total.flatten(1, 2)

    def _restored(self, out: Tensor) -> Tensor:
        """Converts sums of stored rows [B, H, G, columns] to [B, H, G, d]: orders, scales and rotates them back."""
        back = out.new_zeros(*out.shape[:-1], max(self.dim, self.columns) + 1)
        back[..., self.order] = out
        rows = back[..., : self.dim]
        if self.stepped:
            rows = rows * self.step.unsqueeze(2)
        if self.largest is not None:
            rows = rows * self.largest.unsqueeze(2)
        return rows if self.rotation is None else rows @ self.rotation.T


@cache
def _lane_order(dim: int, bits: int, device: torch.device) -> Tensor:
    """Returns the dimension that each column holds, int64 [columns], for codes that are stored in lanes. A padding
    column has ``dim``. The result is cached, because captured steps would otherwise compute it in every layer."""
    places = 8 // (1 if bits == 3 else bits)
    lane_bytes = dim // 8 // places
    byte = torch.arange(triton.next_power_of_2(8 * lane_bytes), device=device)[:, None]
    at = 8 * (byte % lane_bytes * places + torch.arange(places, device=device)) + byte // lane_bytes
    return at.masked_fill(byte >= 8 * lane_bytes, dim).flatten()


@cache
def _halves_order(dim: int, device: torch.device) -> Tensor:
    """As ``_lane_order``, for codes of which each byte holds one dimension of the first half and one of the second."""
    byte = torch.arange(dot_size(dim) // 2, device=device)[:, None]
    return (byte + torch.tensor([0, dim // 2], device=device)).masked_fill(byte >= dim // 2, dim).flatten()


@triton.jit
def decoded_rows(
    page, scales, table, head, token, FORMAT: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr = 0, SOME: tl.constexpr = 0,
):  # fmt: skip
    """Decodes 64 tokens of one head to rows [64, COLUMNS]: dense rows, or values of codes in the order of the stored
    bytes. The rows are not yet multiplied by the tokens' scales.

    ``SOME`` is the number of columns to decode, from ``FIRST`` on, or 0 for all. Both are multiples of 64. The
    ``blocks`` and ``steps`` formats are only decoded whole.

    Args:
        page: pointer to the start of a page, with all its heads. It is a single pointer, or [64, 1] if each token
            has its own page.
        scales: pointer to the scales of the page's tokens in this head, float16 [64, s]. Only the ``steps`` formats
            read them here.
        table: pointer to the table of this row of the batch.
        token: int32 [64], each token's place in its page.
    """
    WIDTH: tl.constexpr = COLUMNS if SOME == 0 else SOME
    if FORMAT == "dense":
        column = FIRST + tl.arange(0, WIDTH)[None, :]
        return _loaded(page + head * (TOKENS * DIM) + token[:, None] * DIM, column, DIM, COLUMNS)
    elif FORMAT == "vectors":
        byte, entry = FIRST // 4 + tl.arange(0, WIDTH // 4)[None, :], tl.arange(0, 4)[None, None, :]
        row = page + head * (TOKENS * DIM // 4) + token[:, None] * (DIM // 4)
        vector = _loaded(row, byte, DIM // 4, COLUMNS // 4).to(tl.int32)[:, :, None]
        return tl.reshape(tl.load(table + vector * 4 + entry), (TOKENS, WIDTH))
    elif FORMAT == "blocks":
        return _decoded_blocks(page, table, head, token, DIM, COLUMNS)
    elif FORMAT == "planes" or FORMAT == "selectors":
        row = page + head * (TOKENS * DIM * 3 // 8) + token[:, None] * (DIM * 3 // 8)
        byte, place = FIRST // 8 + tl.arange(0, WIDTH // 8)[None, :], tl.arange(0, 8)[None, None, :]
        LANE_BYTES: tl.constexpr = DIM // 64  # bytes in the plane of upper bits; the other plane has twice as many
        at = byte // LANE_BYTES * (2 * LANE_BYTES) + 2 * (byte % LANE_BYTES)
        first = _loaded(row, at, DIM // 4, COLUMNS // 4).to(tl.int32)
        second = _loaded(row, at + 1, DIM // 4, COLUMNS // 4).to(tl.int32)
        lower = ((first | (second << 8))[:, :, None] >> (2 * place)) & 3
        upper = row + DIM // 4
        if FORMAT == "selectors":  # each byte of a pair holds bits of the first eight codes and of the last eight
            even = _loaded(upper, byte - byte % 2, DIM // 8, COLUMNS // 8).to(tl.int32)
            odd = _loaded(upper, byte - byte % 2 + 1, DIM // 8, COLUMNS // 8).to(tl.int32)
            planes = ((even | (odd << 8)) >> (byte % 2 * 2))[:, :, None]
            codes = lower | (((planes >> (place // 4 * 8 + place % 4 // 2 * 4 + place % 2)) & 1) << 2)
        else:
            plane = _loaded(upper, byte, DIM // 8, COLUMNS // 8).to(tl.int32)[:, :, None]
            codes = lower | (((plane >> place) & 1) << 2)
        return tl.load(table + tl.reshape(codes, (TOKENS, WIDTH)))
    else:
        PLACES: tl.constexpr = 8 // BITS
        byte, place = FIRST // PLACES + tl.arange(0, WIDTH // PLACES)[None, :], tl.arange(0, PLACES)[None, None, :]
        row = page + head * (TOKENS * DIM // PLACES) + token[:, None] * (DIM // PLACES)
        packed = _loaded(row, byte, DIM // PLACES, COLUMNS // PLACES).to(tl.int32)[:, :, None]
        codes = tl.reshape((packed >> (place * BITS)) & ((1 << BITS) - 1), (TOKENS, WIDTH))
        if FORMAT == "codes":
            return tl.load(table + codes)
        else:
            return _stepped(codes.to(tl.float32), scales, token, FORMAT, DIM, COLUMNS)


@triton.jit
def _loaded(row, at, USED: tl.constexpr, ALL: tl.constexpr):
    """Loads elements ``at`` of rows. Elements from ``USED`` on are 0. If ``USED`` equals ``ALL``, the load has no
    mask."""
    if USED == ALL:
        return tl.load(row + at)
    else:
        return tl.load(row + at, mask=at < USED, other=0)


@triton.jit
def _decoded_blocks(page, table, head, token, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Decodes rows of ``tq3_0``. A block of 32 dimensions is 7 words of 16 bits: 4 of lower bits, 2 of upper bits, and
    a float16 scale."""
    WORDS: tl.constexpr = DIM // 32 * 7
    word, place = tl.arange(0, COLUMNS // 8)[None, :], tl.arange(0, 8)[None, None, :]
    row = page.to(tl.pointer_type(tl.uint16)) + head * (TOKENS * WORDS) + token[:, None] * WORDS
    block, inside = word // 4 * 7, word % 4
    lower = _loaded(row, block + inside, WORDS, COLUMNS // 32 * 7).to(tl.int32)[:, :, None]
    upper = _loaded(row, block + 4 + inside // 2, WORDS, COLUMNS // 32 * 7).to(tl.int32) >> (inside % 2 * 8)
    scale = _loaded(row, block + 6, WORDS, COLUMNS // 32 * 7).to(tl.float16, bitcast=True).to(tl.float32)
    codes = ((lower >> (2 * place)) & 3) | (((upper[:, :, None] >> place) & 1) << 2)
    return tl.reshape(tl.load(table + codes).to(tl.float32) * scale[:, :, None], (TOKENS, COLUMNS))


@triton.jit
def _stepped(codes, scales, token, FORMAT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes rows of variance-normalised pages (``baselines.kvarn``) from their codes.

    With "steps of channels", each channel has a step and a minimum, and the caller applies the tokens' scales. With
    "steps of tokens", each token has a step and a minimum, and each channel has a scale. The stored scales of a token
    are first the token's own numbers, then an equal share of the numbers of all channels.
    """
    OF_TOKEN: tl.constexpr = 1 if FORMAT == "steps of channels" else 2
    SHARE: tl.constexpr = (3 - OF_TOKEN) * DIM // TOKENS
    SCALES: tl.constexpr = OF_TOKEN + SHARE
    channel = tl.arange(0, COLUMNS)
    first = tl.load(scales + channel // SHARE * SCALES + OF_TOKEN + channel % SHARE).to(tl.float32)[None, :]
    if FORMAT == "steps of channels":
        behind = channel + DIM
        least = tl.load(scales + behind // SHARE * SCALES + OF_TOKEN + behind % SHARE).to(tl.float32)
        return codes * first + least[None, :]
    else:
        step = tl.load(scales + token * SCALES).to(tl.float32)[:, None]
        least = tl.load(scales + token * SCALES + 1).to(tl.float32)[:, None]
        return (codes * step + least) * first

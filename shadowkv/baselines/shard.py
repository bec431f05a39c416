"""Shard: low-rank keys whose rank dimensions have different widths in bits, and whose basis has 8-bit entries. Values
are stored as codebook entries (``vq.py``).

``allocate`` divides a budget of bits between groups of principal components, with more bits for stronger groups. The
allocation minimises the sum of the groups' costs. A group with b bits per component costs its variance / (3 * 4^b), the
error of quantizing it. A group without bits loses its variance, and costs 4 times this, so that few groups are dropped.
A dynamic program over the groups finds the exact minimum, for many matrices at a time. It runs on the device, and the
host does not wait for it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import CompressedTokens, FittedTokens
from shadowkv.kvcache.parts.keys_low_rank import HEADROOM, KEPT_ENERGY, LowRankKeys, kept_energy
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.ops.attend_selected.sources import LatentKeys
from shadowkv.ops.codec import CodecId, LatentCodec

WIDTHS = (8, 6, 4, 2, 0)
"""Possible widths of a component, in bits."""

GROUP = 16
"""Number of components per group. Groups are formed in order of variance; the last group has the rest. Shard itself has
groups of 64. Smaller groups follow the variances more closely and take no more bytes."""

DROP_PENALTY = 4.0
"""Cost of a group without bits, in units of its variance."""


def allocate(variance: Tensor, budget: int, group: int = GROUP, drop_penalty: float = DROP_PENALTY) -> Tensor:
    """Returns widths in bits, uint8 [M, r], for components with variances [M, r], strongest first. The r widths of a
    matrix sum to at most ``budget`` bits and have the lowest possible cost (defined in the module's docstring).

    Args:
        group: number of neighbouring components that share a width.
        drop_penalty: cost of a group without bits, in units of its variance.
    """
    groups = variance.float().split(group, dim=1)
    sizes = [part.shape[1] for part in groups]
    unit = 2 * math.gcd(*sizes)  # in bits; every sum of widths is a multiple of this
    units = budget // unit
    # Entry u is the least cost of the groups so far within a budget of u units.
    least = variance.new_zeros(len(variance), units + 1, dtype=torch.float32)
    choices = []
    for part, size in zip(groups, sizes, strict=True):
        total, taken = part.sum(1, keepdim=True), []
        for width in WIDTHS:
            spent = min(width * size // unit, units + 1)
            error = total / (3 * 4**width) if width else drop_penalty * total
            unable = least.new_full((len(least), spent), math.inf)
            taken.append(torch.cat((unable, least[:, : units + 1 - spent] + error), dim=1))
        least, choice = torch.stack(taken).min(0)
        choices.append(choice)
    widths = torch.tensor(WIDTHS, device=variance.device)
    left = torch.full_like(choices[0][:, :1], units)
    found: list[Tensor] = []
    for choice, size in zip(reversed(choices), reversed(sizes), strict=True):
        found.insert(0, widths[choice.gather(1, left)].expand(-1, size))
        left = left - found[0][:, :1] * size // unit
    return torch.cat(found, dim=1).to(torch.uint8)


LARGEST = 127
"""The largest integer of a basis row. A row's step is its largest absolute entry divided by this."""

COMPRESSED_AT_ONCE = 64
"""Pages of one layer that are projected at a time. Each can have its own basis."""

BYTES_OF_A_LATENT = 40
"""Temporary bytes for packing an entry of a latent in PyTorch: several 4-byte copies of the entry and of its shifted
and split code."""


class MixedLatents(LatentCodec):
    """Stores each rank dimension in 8, 6, 4, 2 or 0 bits, 4 on average. A row is a string of bits, which fills each
    byte from its lowest bit.

    With b bits a latent is an integer from -(2^(b-1) - 1) to 2^(b-1) - 1. Its code is the latent plus 2^(b-1). A row
    has half a byte for each rank dimension; unused bits are zero.
    """

    id, name, largest, rank_multiple, bits = CodecId.LATENT_MIXED, "low-rank-mixed", 127, 2, 4

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return rank * self.bits // 8, torch.uint8

    def encode(self, latents: Tensor, *widths: Tensor) -> Tensor:
        width, byte, shift = _places(*widths)
        half = 1 << width >> 1  # 0 for a width of 0
        codes = torch.maximum(torch.minimum(latents.round(), half - 1), 1 - half) + half
        bits = codes.masked_fill(width == 0, 0).to(torch.int32) << shift
        size = self.field(latents.shape[-1], latents.dtype)[0]
        stored = bits.new_zeros(*bits.shape[:-1], size + 2)  # two spare bytes, because codes of 0 bits may begin there
        for place, part in ((byte, bits & 255), (byte + 1, bits >> 8)):
            stored.scatter_add_(-1, place.expand_as(bits), part)
        return stored[..., :size].to(torch.uint8)

    def decode(self, stored: Tensor, rank: int, *widths: Tensor) -> Tensor:
        width, byte, shift = _places(*widths)
        padded, places = F.pad(stored, (0, 2)), byte.expand(*stored.shape[:-1], rank)
        low, high = (padded.gather(-1, places + i).to(torch.int32) for i in range(2))
        codes = (low | high << 8) >> shift & (1 << width) - 1
        return (codes - (1 << width >> 1)).to(torch.int8)


def _places(widths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the widths as int32 [..., r], and where each code starts: the byte, int64 [..., r], and the bit in this
    byte, int32 [..., r]."""
    width = widths.to(torch.int32)
    begin = width.cumsum(-1) - width
    return width, begin >> 3, (begin & 7).to(torch.int32)


class MixedLowRankKeys(LowRankKeys):
    """Stores latents of centred keys. ``allocate`` chooses the width of each rank dimension by its variance over the
    prompt.

    A basis row is stored as integers and one step. This step is already multiplied by the step of the latents in the
    row's rank dimension, so integer latents times the decoded basis are keys.
    """

    @classmethod
    def codec_of(cls, spec: KVSpec) -> LatentCodec:
        return MixedLatents()

    def state_fields(self) -> tuple[Field, ...]:
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        return (
            Field("basis", (self.rank, *heads), torch.int8),
            Field("basis_step", (self.rank,), torch.float32),
            Field("latent_bits", (self.rank,), torch.uint8),
            Field("key_mean", heads, self.dtype),
            Field(KEPT_ENERGY, (1,), torch.float32),
        )

    def compression_bytes(self) -> int:
        """Bases decoded in float32 and in the dtype of the product, keys in float32, and temporaries of packing."""
        # All layers of a page are projected together, however many layers there are.
        size, least = self.dtype.itemsize, max(COMPRESSED_AT_ONCE, self.shape.num_layers)
        basis = self.rank * self.shape.kv_dim * (4 + 2 * size)
        return least * (basis + PAGE * (4 * self.shape.kv_dim + BYTES_OF_A_LATENT * self.rank))

    def reading_bytes(self) -> int:
        """A basis in three forms: as stored, decoded in float32, and in the dtype of the product. Backends that cannot
        read the stored form need the other two."""
        return self.rank * self.shape.kv_dim * (1 + 4 + self.dtype.itemsize)

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        keys = tokens.keys.flatten(3).flatten(0, 1)  # [L n, S, H d]
        mean = keys.mean(1, dtype=torch.float32).to(self.dtype)
        basis, variance, largest, total = self.subspaces(store, keys, mean)
        assert self.codec.bits is not None
        widths = allocate(variance, self.codec.bits * self.rank)
        most = ((1 << widths.int() >> 1) - 1).clamp(min=1)
        step = HEADROOM * largest.clamp(min=1e-12) / most
        unit = basis.abs().amax(2).clamp(min=1e-12) / LARGEST
        learned = {
            "basis": (basis / unit.unsqueeze(2)).round(),
            "basis_step": unit * step,
            "latent_bits": widths,
            "key_mean": mean,
            KEPT_ENERGY: kept_energy(variance, total),
        }
        for name, value in learned.items():
            state = store.state[name][layers]
            state[:, states] = value.reshape(len(state), len(states), *state.shape[2:]).to(state.dtype)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        for portion in tokens.split(max(1, COMPRESSED_AT_ONCE // len(tokens.keys))):
            self._compress(store, portion)

    def _compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        mean, widths = (store.state[name][tokens.layers][:, tokens.states] for name in ("key_mean", "latent_bits"))
        basis = self._decoded(store, tokens.layers, tokens.states)
        step = basis.flatten(3).norm(dim=3)
        of_mean = (basis.flatten(3) @ mean.float().flatten(2).unsqueeze(3)).squeeze(3)
        basis = basis.to(tokens.keys.dtype)
        here = torch.arange(len(tokens.states), device=widths.device)
        latents = store.page["latents"][tokens.layers]
        store.ops.project_latents(tokens.keys, self.codec, basis, of_mean, step, here, latents, tokens.pages, widths)

    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> LatentKeys:
        names = ("basis", "key_mean", "latent_bits", "basis_step")
        basis, mean, widths, step = (store.state[name][layer] for name in names)
        of_batch = batch.states, batch.pages, batch.first, store.rotary
        return LatentKeys(store.page["latents"][layer], self.codec, basis, mean, *of_batch, widths, step)

    def _decoded(self, store: CompressedStore, layers: slice, states: Tensor) -> Tensor:
        """Returns decoded bases, float32 [L, n, r, H, d]: L layers, n states, rank r, H kv heads, d dimensions of a
        head."""
        basis, step = (store.state[name][layers][:, states] for name in ("basis", "basis_step"))
        return basis * step[..., None, None]


def register() -> None:
    """Registers the keys and the preset."""
    parts.register("keys", MixedLatents.name, MixedLowRankKeys)
    presets.register("shard", KVSpec(keys=MixedLatents.name, values="vq-4x256", local=64))

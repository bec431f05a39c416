"""Low-rank keys: one subspace per sequence and layer, fitted on the prompt's own keys before RoPE.

As in ShadowKV (arXiv:2410.21465, section 4.1), the keys of S tokens in H kv heads of d dimensions are one matrix: X [S,
H*d] ~ latents [S, r] x basis [r, H*d], with rank r.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowkv.kvcache.codecs import LATENT_CODECS, ROW_CODECS
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import STATES_AT_ONCE, CompressedTokens, FittedTokens, KeyPart
from shadowkv.kvcache.policy.shape import ModelShape, share
from shadowkv.kvcache.policy.spec import NARROW, KVSpec
from shadowkv.ops.attend_selected.sources import LatentKeys
from shadowkv.ops.codec import STRONG, LatentCodec
from shadowkv.ops.low_rank_basis.cuda import ROWS_AT_ONCE
from shadowkv.settings import at_least, setting

KEPT_ENERGY = "kept_energy"
"""State field with the share of the keys' squared norm that the subspace keeps."""

HEADROOM = 1.25
"""Factor by which latents of generated tokens can exceed the prompt's largest latent without being clipped, in 8-bit
codes."""


class LowRankKeys(KeyPart):
    """Keys as latents, which a codec stores.

    Quantized latents are computed from centred keys, because the mean key dominates every norm if keys have a bias
    (Qwen2). Each dimension of a latent has its own quantization step. The basis is multiplied by the steps, so a key is
    integer latents x basis + mean. ``source`` gives these arrays to the ops that rebuild keys: ``ops/attend_selected``
    for the tokens that a step selects, ``ops/rebuild_rows`` for all compressed tokens, because the prompt of a later
    turn attends to all of them.
    """

    ops = ("low_rank_basis", "project_latents")
    diagnostics = (KEPT_ENERGY,)
    fits_on_earlier = True

    @dataclass(frozen=True)
    class Settings:
        """``key_groups`` is the number of groups into which tensor-parallel ranks divide the kv heads. The rank is
        divided between the groups in proportion to their heads, and rounded up to a multiple of 32 (``ranks``)."""

        rank: int | None = setting(
            None, "keys", "dimensions of the low-rank keys (default: by model)", check=at_least(1)
        )
        key_groups: int = setting(
            1, "keys", "groups of kv heads, each with low-rank keys of its own", check=at_least(1)
        )

    @classmethod
    def codec_of(cls, spec: KVSpec) -> LatentCodec:
        """The codec of the latents."""
        return LATENT_CODECS[spec.keys]

    @classmethod
    def with_defaults(cls, spec: KVSpec, shape: ModelShape) -> Settings:
        """The default rank is 5/32 of H*d (the paper's 160 of 1,024). It is rounded up to a multiple of 32, because
        tensor cores multiply 32 dimensions at a time, but it is at most H*d.

        Narrow keys need a larger share of their dimensions. If latents are quantized, narrow keys keep all dimensions,
        up to the 256 that kernels support. With half of the dimensions, Qwen2.5-Coder-1.5B loses 0.9 points of RULER at
        32K, with a standard error of 0.7. With 16-bit latents, or a codec that learns the bits of each dimension,
        narrow keys keep half of the dimensions. A single kv head shares no subspace with others and always keeps all
        dimensions."""
        settings: LowRankKeys.Settings = cls.settings_of(spec)
        if settings.rank is not None:
            return settings
        codec, width = cls.codec_of(spec), shape.kv_dim
        if shape.num_kv_heads == 1:
            rank = width
        elif width >= NARROW:
            rank = round(width * 5 / 32)
        elif codec.largest is not None and codec.bits is None:
            rank = min(width, 256)
        else:
            rank = round(width / 2)
        return replace(settings, rank=min(-(-rank // 32) * 32, shape.kv_dim))

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        reasons, heads, own = super().unsupported(spec, shape), shape.num_kv_heads, cls.settings_of(spec)
        if own.rank > shape.kv_dim:
            reasons.append(f"rank={own.rank} is more than H*d={shape.kv_dim} of this model")
        if own.key_groups > heads:
            return [*reasons, f"key_groups={own.key_groups} is more than the model's {heads} kv heads"]
        multiple, rank = cls.codec_of(spec).rank_multiple, sum(rank for rank, _ in ranks(own, shape))
        if rank % multiple:
            reasons.append(f"keys={spec.keys!r} needs a rank that is a multiple of {multiple}, not {rank}")
        if spec.values in ROW_CODECS and ROW_CODECS[spec.values].tile > 1:
            reasons.append(f"values={spec.values!r} is decoded page by page, which keys={spec.keys!r} does not allow")
        return reasons

    @classmethod
    def in_groups(cls, spec: KVSpec, groups: int) -> KVSpec:
        """Gives each group its own low-rank keys. Raises ValueError if ``key_groups`` is neither 1 nor ``groups``."""
        given = cls.settings_of(spec).key_groups
        if given not in (1, groups):
            raise ValueError(f"key_groups={given} must be 1 or {groups}: ranks divide kv heads into {groups} groups")
        return spec.changed(**{"keys.key_groups": groups})

    @classmethod
    def of_heads(cls, spec: KVSpec, shape: ModelShape, heads: int) -> KVSpec:
        rank = _rank_of_heads(cls.settings_of(spec).rank, shape, heads)
        return spec.changed(**{"keys.rank": rank, "keys.key_groups": 1})

    @classmethod
    def described(cls, spec: KVSpec, shape: ModelShape) -> str:
        groups = ranks(cls.settings_of(spec), shape)
        return " + ".join(f"rank {rank} of {(last - first) * shape.head_dim}" for rank, (first, last) in groups)

    @cached_property
    def ranks(self) -> list[tuple[int, tuple[int, int]]]:
        """The result of the function ``ranks`` for the part's settings."""
        return ranks(self.settings, self.shape)

    @property
    def rank(self) -> int:
        return sum(rank for rank, _ in self.ranks)

    def rebuilt_bytes(self, selected: int, compressed: int) -> float:
        """A latent belongs to all kv heads together, and each head selects its own tokens. Heads can select the same
        tokens, so a step reads at most all latents."""
        return min(selected * self.shape.num_kv_heads, compressed) * self.bytes_per_token()

    @cached_property
    def codec(self) -> LatentCodec:
        return self.codec_of(self.spec).of_groups([rank for rank, _ in self.ranks])

    @property
    def codec_id(self) -> int:
        return self.codec.id

    def page_fields(self) -> tuple[Field, ...]:
        width, dtype = self.codec.field(self.rank, self.dtype)
        return (Field("latents", (self.chunks, self.spec.chunk, width), dtype),)

    def state_fields(self) -> tuple[Field, ...]:
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        fields = (Field("basis", (self.rank, *heads), self.dtype), Field(KEPT_ENERGY, (1,), torch.float32))
        if self.codec.largest is None:
            return fields
        of_latents = (Field(name, (self.rank,), torch.float32) for name in ("latent_step", "latent_mean"))
        return (*fields, Field("key_mean", heads, self.dtype), *of_latents)

    def fitting_bytes(self, tokens: int) -> int:
        """Bytes of two float32 copies of the Gram matrices of the states that are fitted together, of a workspace as
        large as one copy, and of rows of keys that are centred and multiplied. With several groups of heads, bytes of a
        copy of all rows of a group are added."""
        gram, size = 3 * 4 * STATES_AT_ONCE * self.shape.kv_dim**2, self.shape.kv_dim * self.dtype.itemsize
        rows = gram + 2 * size * min(tokens, ROWS_AT_ONCE)
        return rows if self.settings.key_groups == 1 else rows + size * tokens // self.settings.key_groups

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        keys = tokens.keys.flatten(3).flatten(0, 1)  # [L n, S, H d]
        mean = None if self.codec.largest is None else keys.mean(1, dtype=torch.float32).to(self.dtype)
        basis, variance, largest, total = self.subspaces(store, keys, mean)
        learned = {KEPT_ENERGY: kept_energy(variance, total)}
        if mean is not None and self.codec.largest is not None:
            # The prompt's largest latent sets the step. Later latents beyond the headroom are clipped.
            codes = self.codec.largest_codes(self.rank, keys.device)
            room = torch.where(codes == self.codec.largest, HEADROOM, 1.0)  # 4-bit codes have no headroom
            step = room * largest.clamp(min=1e-12) / codes
            basis = (basis * step.unsqueeze(2)).to(self.dtype)
            of_latents = (basis.float() @ mean.float().unsqueeze(2)).squeeze(2)
            learned |= {"key_mean": mean, "latent_step": step, "latent_mean": of_latents}
        learned["basis"] = basis.to(self.dtype)
        for name, value in learned.items():
            state = store.state[name][layers]
            state[:, states] = value.reshape(len(state), len(states), *state.shape[2:])

    def subspaces(
        self, store: CompressedStore, keys: Tensor, mean: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes ``low_rank_basis`` for each group of heads, from the keys [M, S, H d] of M states, and joins the
        results. A group's basis rows are zero in the columns of other groups. The strongest rows of all groups come
        first (``LatentCodec.of_groups``)."""
        groups = self.ranks
        if len(groups) == 1:
            result: tuple[Tensor, Tensor, Tensor, Tensor] = store.ops.low_rank_basis(keys, self.rank, mean)
            return result
        bases, numbers, totals = [], [], []
        for rank, heads in groups:
            columns = slice(*(head * self.shape.head_dim for head in heads))
            of_group = None if mean is None else mean[:, columns].contiguous()
            part, *of_rows, total = store.ops.low_rank_basis(keys[:, :, columns].contiguous(), rank, of_group)
            bases.append(pad(part, (columns.start, keys.shape[2] - columns.stop)))
            numbers.append(torch.stack(of_rows))
            totals.append(total)
        dimension = torch.cat([torch.arange(rank, device=keys.device) for rank, _ in groups])
        order = (dimension >= STRONG).int().argsort(stable=True)
        variance, largest = torch.cat(numbers, dim=2)[:, :, order]
        return torch.cat(bases, dim=1)[:, order], variance, largest, torch.stack(totals).sum(0)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        basis, latents = store.state["basis"][tokens.layers], store.page["latents"][tokens.layers]
        names = ("latent_mean", "latent_step")
        mean, step = (store.state[name][tokens.layers] if name in store.state else None for name in names)
        store.ops.project_latents(tokens.keys, self.codec, basis, mean, step, tokens.states, latents, tokens.pages)

    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> LatentKeys:
        latents, basis = store.page["latents"][layer], store.state["basis"][layer]
        mean = store.state["key_mean"][layer] if "key_mean" in store.state else None
        return LatentKeys(latents, self.codec, basis, mean, batch.states, batch.pages, batch.first, store.rotary)


def kept_energy(variance: Tensor, total: Tensor) -> Tensor:
    """Returns the share of the keys' squared norm that a basis keeps, float32 [M] for M states, from results of
    ``low_rank_basis``."""
    return (variance.sum(1) / total.clamp(min=1e-30)).clamp(max=1)


def ranks(settings: LowRankKeys.Settings, shape: ModelShape) -> list[tuple[int, tuple[int, int]]]:
    """Returns the rank of each group's low-rank keys, and the group's kv heads: first and last + 1."""
    assert settings.rank is not None, "the policy must be resolved"
    groups = settings.key_groups
    heads = [share(shape.num_kv_heads, group, groups) for group in range(groups)]
    if groups == 1:
        return [(settings.rank, heads[0])]
    return [(_rank_of_heads(settings.rank, shape, last - first), (first, last)) for first, last in heads]


def _rank_of_heads(rank: int, shape: ModelShape, heads: int) -> int:
    """The share of ``rank`` for ``heads`` kv heads."""
    own = -(-rank * heads // shape.num_kv_heads)
    return min(-(-own // 32) * 32, heads * shape.head_dim)

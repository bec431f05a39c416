"""Parts that store keys after RoPE, or values, row by row: exactly, or in a codec (``shadowkv.kvcache.codecs``).

A row is the key or value of one token in one kv head. Keys are on the device, values on the device or on the host.

Shapes: L layers, n pages or segments, S tokens of a segment, H kv heads, d dimensions of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import CompressedTokens, FittedTokens, KeyPart, StoredPart, ValuePart
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.ops.apply_rope.reference import rope_by
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows
from shadowkv.ops.codec import RowCodec
from shadowkv.ops.quantize_rows import in_one_pass
from shadowkv.ops.quantize_rows.reference import CODED_AT_ONCE
from shadowkv.settings import setting

KEY_MEAN = "key_mean"
"""State field with the mean key, which is subtracted from centred keys."""

CROSSING_AT_ONCE = 512
"""Maximum number of pages that are coded in device memory at a time, if the codes belong on the host. If a kernel wrote
codes directly to host memory, they would cross the bus byte by byte. This takes 27 ms per layer of 60K tokens on an
H200, while dense values, which are five times as large, take 2.8 ms."""


CENTRED_AT_ONCE = 64
"""Maximum number of pages, summed over layers, whose keys are centred at a time. Centring makes several float32 copies
of the keys, each of 16 MiB at 8 heads of 128 dimensions."""


class CodedPart(StoredPart):
    """Base class of coded keys and coded values. It stores a field of codes named after the axis, a field of scales if
    the codec has scales, and the state that the codec learns.

    Attributes:
        axis: ``keys`` or ``values``, which is also the name of the fixed rotation.
    """

    axis: ClassVar[str]
    ops = ("quantize_rows",)

    @classmethod
    def named(cls, spec: KVSpec) -> RowCodec:
        """The codec of ``spec`` on this axis."""
        return ROW_CODECS[getattr(spec, cls.axis)].for_axis(cls.axis)

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        codec, dim, reasons = cls.named(spec), shape.head_dim, super().unsupported(spec, shape)
        if cls.axis not in codec.axes:
            meant = " and ".join(codec.axes)
            return [*reasons, f"{cls.axis}={codec.name!r} has no meaning: the format is only for {meant}"]
        if codec.tile > 1 and spec.has_index:
            reason = f"is decoded page by page: it needs index='none', not {spec.index!r}"
            return [*reasons, f"{cls.axis}={codec.name!r} {reason}"]
        needed = codec.wanted(dim)
        if needed:
            reasons.append(f"{cls.axis}={codec.name!r} needs a head dim that is {needed}, not {dim}")
        return reasons

    @property
    def codec(self) -> RowCodec:
        return self.named(self.spec)

    @property
    def codec_id(self) -> int:
        return self.codec.id

    def fitting_bytes(self, tokens: int) -> int:
        return self.codec.fitting_bytes(tokens * self.shape.kv_dim)

    def compression_bytes(self) -> int:
        """Bytes of float32 copies of the rows (rotated, and scaled) and of codes before they are packed, at 8 bytes a
        code; 0 if one kernel does all steps."""
        copies = 32 * CODED_AT_ONCE * PAGE * self.shape.kv_dim
        return 0 if in_one_pass(self.codec_id, self.shape.head_dim) else copies

    def page_fields(self) -> tuple[Field, ...]:
        heads, dim, codec = self.shape.num_kv_heads, self.shape.head_dim, self.codec
        codes = Field(self.axis, (heads, self.chunks, self.spec.chunk, codec.row_bytes(dim)), torch.uint8)
        scale = Field(f"{self.axis[:-1]}_scale", (heads, PAGE, codec.scales(dim)), codec.scale_dtype)
        return (codes, scale) if codec.scales(dim) else (codes,)

    def learned_fields(self) -> tuple[Field, ...]:
        """State fields that the codec learns, in the codec's order."""
        heads, shapes = self.shape.num_kv_heads, self.codec.state_shapes(self.shape.head_dim)
        return tuple(
            Field(f"{self.axis[:-1]}_{name}", (1 if name in self.codec.shared else heads, *shape), torch.float32)
            for name, shape in shapes.items()
        )

    def state_fields(self) -> tuple[Field, ...]:
        return self.learned_fields()

    def fit_rows(self, store: CompressedStore, layers: slice, states: Tensor, rows: Tensor) -> None:
        """Fits what the codec learns on rows [L, n, S, H, d], and writes it to ``states`` int64 [n]."""
        fitted = [self.codec.fit(one) for one in rows.flatten(0, 1)]
        for field, learned in zip(self.learned_fields(), zip(*fitted, strict=True), strict=True):
            store.state[field.name][layers][:, states] = torch.stack(learned).unflatten(0, rows.shape[:2])

    def compress_rows(
        self, store: CompressedStore, tokens: CompressedTokens, rows: Tensor, pages: Tensor, across_bus: bool
    ) -> None:
        """Codes rows [L, n, 64, H, d]. Codes go to ``pages`` int64 [n], which are on the host if ``across_bus``; scales
        go to ``tokens.pages``."""
        codes, scale = self._stored(store, tokens.layers)
        state = tuple(store.state[field.name][tokens.layers][:, tokens.states] for field in self.learned_fields())
        coded = rows, self.codec, self._rotation(store), state
        if not across_bus:
            store.ops.quantize_rows(*coded, codes, pages, scale, tokens.pages)
            return
        here = torch.arange(len(pages), device=pages.device)
        near = torch.empty(len(codes), len(here), *codes.shape[2:], dtype=codes.dtype, device=here.device)
        store.ops.quantize_rows(*coded, near, here, scale, tokens.pages)
        store.write_heads(self.axis, tokens.layers, pages, near.flatten(3, 4).transpose(2, 3))

    def coded_rows(self, store: CompressedStore, layer: int, batch: CompressedBatch, pages: Tensor) -> CodedRows:
        """The source of the rows of the batch's compressed tokens. ``pages`` are the page ids of their codes."""
        codes, scale = self._stored(store, layer)
        state = tuple(store.state[field.name][layer] for field in self.learned_fields())
        dim, rotation = self.shape.head_dim, self._rotation(store)
        return CodedRows(codes, scale, self.codec, dim, rotation, pages, batch.pages, state, batch.states)

    def _stored(self, store: CompressedStore, layers: slice | int) -> tuple[Tensor, Tensor]:
        """Codes and scales of all pages. Scales are empty if the codec has none."""
        codes, *scale = (store.page[field.name][layers] for field in self.page_fields())
        return codes, scale[0] if scale else codes[..., :0].flatten(-3, -2)

    def _rotation(self, store: CompressedStore) -> Tensor | None:
        return store.rotation(self.axis, self.codec.rotation_matrix) if self.codec.rotated else None


class CodedKeys(CodedPart, KeyPart):
    axis = "keys"

    @dataclass(frozen=True)
    class Settings:
        """With ``centred``, the mean of the prompt's keys before RoPE is subtracted from keys. They then need about one
        bit less for the same error. Attention adds the mean key's share of the logits."""

        centred: bool | None = setting(
            None, "keys", "store keys without the mean key of their prompt (default: where keys have a bias)"
        )

    @classmethod
    def with_defaults(cls, spec: KVSpec, shape: ModelShape) -> Settings:
        """By default, keys are centred if they have a bias. Some biases of Qwen2.5-1.5B are as large as 354, while half
        of them are below 1. If the bias stays in the stored keys, ``fp8`` finds no needle of a needle-in-a-haystack
        test."""
        settings: CodedKeys.Settings = cls.settings_of(spec)
        return cls.Settings(shape.key_bias) if settings.centred is None else settings

    @classmethod
    def described(cls, spec: KVSpec, shape: ModelShape) -> str:
        return "without their mean" if cls.settings_of(spec).centred else ""

    @property
    def centred(self) -> bool:
        return bool(self.settings.centred)

    @property
    def fits_on_earlier(self) -> bool:
        """True for centred keys, so that the mean that is subtracted is the mean of all tokens' keys."""
        return self.centred

    def state_fields(self) -> tuple[Field, ...]:
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        return (*super().state_fields(), *((Field(KEY_MEAN, heads, torch.float32),) if self.centred else ()))

    def fitting_bytes(self, tokens: int) -> int:
        """Bytes that the codec needs. If a codec that learns gets centred keys, bytes of two float32 copies of the keys
        are added."""
        centred = 2 * 4 * tokens * self.shape.kv_dim if self.centred and self.learned_fields() else 0
        return centred + super().fitting_bytes(tokens)

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        rope_keys = tokens.rope_keys
        if self.centred:
            store.state[KEY_MEAN][layers][:, states] = tokens.keys.mean(2, dtype=torch.float32)
            if self.learned_fields():  # otherwise nothing would read this float32 copy of all tokens
                rope_keys = self._centred(store, layers, states, rope_keys, tokens.first)
        self.fit_rows(store, layers, states, rope_keys)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        if not self.centred:
            self.compress_rows(store, tokens, tokens.rope_keys, tokens.pages, False)
            return
        for some in tokens.split(max(1, CENTRED_AT_ONCE // len(tokens.rope_keys))):
            centred = self._centred(store, some.layers, some.states, some.rope_keys, some.first)
            self.compress_rows(store, some, centred, some.pages, False)

    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> CodedRows:
        rows = self.coded_rows(store, layer, batch, batch.pages)
        if not self.centred:
            return rows
        mean = store.state[KEY_MEAN][layer]
        # The mean is a field of the same states as what the codec has learned, so ``rows.states`` is right for it too.
        return CentredKeys(**vars(rows), mean=mean, first=batch.first, rotary=store.rotary)

    def _centred(
        self, store: CompressedStore, layers: slice, states: Tensor, rope_keys: Tensor, first: Tensor
    ) -> Tensor:
        """RoPE-rotated keys [L, n, S, H, d] minus the rotated mean key, float32. ``first`` [n] are the positions of the
        first tokens."""
        mean = store.state[KEY_MEAN][layers][:, states].unsqueeze(2)
        positions = first[:, None] + torch.arange(rope_keys.shape[2], device=first.device)
        cos, sin = (table[positions].unsqueeze(2) for table in (store.rotary.cos, store.rotary.sin))
        return rope_keys.float() - rope_by(mean, cos, sin, store.rotary)


class CodedValues(CodedPart, ValuePart):
    axis = "values"

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        self.fit_rows(store, layers, states, tokens.values)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        host = self.spec.place == "host"
        for portion in tokens.split(CROSSING_AT_ONCE if host else max(1, len(tokens.pages))):
            self.compress_rows(store, portion, portion.values, portion.value_pages, host)

    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> CodedRows:
        return self.coded_rows(store, layer, batch, batch.value_pages)


class DenseKeys(KeyPart):
    def page_fields(self) -> tuple[Field, ...]:
        shape = (self.shape.num_kv_heads, self.chunks, self.spec.chunk, self.shape.head_dim)
        return (Field("keys", shape, self.dtype),)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        store.write_heads("keys", tokens.layers, tokens.pages, tokens.rope_keys)

    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> DenseRows:
        return DenseRows(store.page["keys"][layer], batch.pages)


class DenseValues(ValuePart):
    def page_fields(self) -> tuple[Field, ...]:
        # A chunk's rows (c * d elements of one head) are contiguous, because a chunk is the unit of transfer.
        shape = (self.shape.num_kv_heads, self.chunks, self.spec.chunk, self.shape.head_dim)
        return (Field("values", shape, self.dtype),)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        store.write_heads("values", tokens.layers, tokens.value_pages, tokens.values)

    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> DenseRows:
        return DenseRows(store.page["values"][layer], batch.value_pages)

"""Values in 4, 3 or 2 bits after a fixed random rotation, taken back once, on the output of attention.

TurboQuant, arXiv:2504.19874: rotated coordinates are near Gaussian, so that one uniform quantiser fits them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import SealedTokens, ValuePart
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import PAGE, KVSpec
from shadowkv.ops.attend_selected.packing import row_multiple
from shadowkv.ops.attend_selected.sources import QuantisedRows

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


PAGES_AT_ONCE = 512
"""Pages of codes on the device at a time that go to the host: written there as they are made, they would cross the bus
a byte at a time (27 ms a layer of 60K tokens on an H200, where dense values of five times the size take 2.8)."""


class RotatedValues(ValuePart):
    bits: int

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        multiple = row_multiple(cls.bits)
        if shape.head_dim % multiple:
            return [f"{cls.bits}-bit values need a head dim that is a multiple of {multiple}, not {shape.head_dim}"]
        return []

    def page_fields(self) -> tuple[Field, ...]:
        heads, width = self.shape.num_kv_heads, self.shape.head_dim * self.bits // 8
        return (
            Field("values", (heads, self.chunks, self.spec.chunk, width), torch.uint8),
            Field("value_scale", (heads, PAGE), torch.float16),
        )

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        codes, scale = (store.page[name][tokens.layers] for name in ("values", "value_scale"))
        rotation = store.rotation("values")
        if self.spec.place == "device":
            places = (codes, tokens.value_pages, scale, tokens.pages)
            store.ops.quantise_rows(tokens.values, rotation, self.bits, *places)
            return
        for some in tokens.split(PAGES_AT_ONCE):
            here = torch.arange(len(some.pages), device=some.pages.device)
            near = torch.empty(len(codes), len(here), *codes.shape[2:], dtype=codes.dtype, device=here.device)
            store.ops.quantise_rows(some.values, rotation, self.bits, near, here, scale, some.pages)
            store.write_heads("values", tokens.layers, some.value_pages, near.flatten(3, 4).transpose(2, 3))

    def source(self, store: Store, layer: int, batch: SealedBatch) -> QuantisedRows:
        codes, scale = (store.page[name][layer] for name in ("values", "value_scale"))
        return QuantisedRows(codes, scale, self.bits, store.rotation("values"), batch.value_pages, batch.pages)


class RotatedValues4Bit(RotatedValues):
    bits = 4


class RotatedValues3Bit(RotatedValues):
    bits = 3


class RotatedValues2Bit(RotatedValues):
    bits = 2

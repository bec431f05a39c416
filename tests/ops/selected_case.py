"""Random arguments of attention over selected chunks, and their sources in another dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shadowkv.baselines.shard import MixedLatents
from shadowkv.kvcache.codecs import LATENT_CODECS
from shadowkv.kvcache.codecs.rotated import ROTATED_ROWS
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected import cpu, reference
from shadowkv.ops.attend_selected.sources import (
    BufferedRows,
    CodedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    ValueSource,
)
from shadowkv.ops.codec import LatentCodec

PAGES = 3
"""Pages of a row."""


def in_dtype(source: Any, dtype: torch.dtype) -> Any:
    """The source with rows, latents, basis and mean in ``dtype``. Codes stay as they are."""
    match source:
        case DenseRows():
            return replace(source, rows=source.rows.to(dtype))
        case LatentKeys():
            mean = None if source.mean is None else source.mean.to(dtype)
            latents = source.latents if source.codec.largest else source.latents.to(dtype)
            return replace(source, latents=latents, basis=source.basis.to(dtype), mean=mean)
        case BufferedRows():
            rows = source.rows.to(dtype) if source.rows.is_floating_point() else source.rows
            return replace(source, source=in_dtype(source.source, dtype), rows=rows)
    return source


def there(x: Any, device: str, copies: dict[int, Tensor] | None = None) -> Any:
    """A copy of ``x`` on the device. A tensor that occurs twice is copied once, because kernels compare pages by
    address. ``copies`` has the tensors that were copied."""
    copies = {} if copies is None else copies
    if isinstance(x, Tensor):
        return copies.setdefault(id(x), x.to(device))
    if isinstance(x, RotaryTables):
        return RotaryTables(x.config, len(x.cos), device)
    if hasattr(x, "__dataclass_fields__"):
        return replace(x, **{name: there(value, device, copies) for name, value in vars(x).items()})
    return tuple(there(one, device, copies) for one in x) if isinstance(x, tuple) else x


def learned(case: Case, values: CodedRows) -> CodedRows:
    """Vector codes whose state differs between rows. States of no row are NaN."""
    states = torch.randperm(2 * case.batch)[: case.batch]
    state = []
    for shape in ((case.heads, case.dim), (1, 256, 4)):
        of_states = torch.full((2 * case.batch, *shape), torch.nan)
        of_states[states] = torch.rand(case.batch, *shape) + 0.1
        state.append(of_states)
    return replace(values, scale=values.scale[..., :0], state=tuple(state), states=states)


class Case:
    """Random arguments. Data that is not selected, or belongs to no row, is NaN."""

    def __init__(
        self,
        batch: int = 2,
        heads: int = 2,
        group: int = 3,
        dim: int = 64,
        chunk: int = 8,
        keys: str = "low-rank",
        rank: int = 12,
        values: str = "rows",
        buffered: bool = False,
        sampled: bool = False,
        rope: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        least: int = 0,
    ) -> None:
        self.batch, self.heads, self.dim, self.chunk = batch, heads, dim, chunk
        self.per_page, self.names = 64 // chunk, 2 * batch * PAGES
        self.selected = self._selection(least)
        self.q = torch.randn(batch, heads * group, dim).to(dtype)
        self.log_weight = torch.rand(self.selected.shape) if sampled else None
        self.states = torch.randperm(2 * batch)[:batch]
        self.keys: KeySource
        latents = {**LATENT_CODECS, MixedLatents.name: MixedLatents()}
        if keys in latents:
            self.keys = self._latents(latents[keys], rank, dtype, rope or {})
        else:
            self.keys = self._rows(dtype) if keys == "rows" else self._codes(int(keys))
        self.values: ValueSource = self._rows(dtype) if values == "rows" else self._codes(int(values))
        if buffered:
            self.values = self._buffered(self.values)

    def _selection(self, least: int) -> Tensor:
        """At least ``least`` random chunks, then -1s."""
        count = PAGES * self.per_page
        order = torch.rand(self.batch, self.heads, count).argsort(-1)
        beyond = torch.arange(count) >= torch.randint(least, count + 1, (self.batch, self.heads, 1))
        return order.masked_fill(beyond, -1)

    def _pages(self) -> Tensor:
        return torch.randperm(self.names)[: self.batch * PAGES].view(self.batch, PAGES)

    def _used(self, pages: Tensor) -> Tensor:
        """bool [N, H, C]: the selected chunks, if rows have these pages."""
        used = torch.zeros(self.names, self.heads, self.per_page, dtype=torch.bool)
        row, head, i = (self.selected >= 0).nonzero(as_tuple=True)
        chosen = self.selected[row, head, i]
        used[pages[row, chosen // self.per_page], head, chosen % self.per_page] = True
        return used

    def _rows(self, dtype: torch.dtype) -> DenseRows:
        pages = self._pages()
        rows = torch.randn(self.names, self.heads, self.per_page, self.chunk, self.dim)
        return DenseRows(rows.masked_fill(~self._used(pages)[..., None, None], torch.nan).to(dtype), pages)

    def _latents(self, codec: LatentCodec, rank: int, dtype: torch.dtype, rope: dict[str, Any]) -> LatentKeys:
        pages, count = self._pages(), 2 * self.batch
        rank -= rank % codec.rank_multiple
        latents = torch.randn(self.names, self.per_page, self.chunk, rank)
        basis, mean = (
            torch.randn(count, rank, self.heads, self.dim) / rank**0.5,
            torch.randn(count, self.heads, self.dim),
        )
        nobody = torch.ones(count, dtype=torch.bool).index_fill(0, self.states, False)
        basis[nobody] = mean[nobody] = torch.nan
        used = self._used(pages).any(1)[..., None, None]
        widths = None
        if codec.bits:  # 4 on average, others of each state, in any order
            pairs = torch.tensor([[8, 0], [6, 2], [4, 4]], dtype=torch.uint8)
            widths = pairs[torch.randint(3, (count, rank // 2))].flatten(1)
            steps, basis = codec.largest / 3 * latents, basis * 3 / codec.largest
            latents = codec.encode(steps, widths[0])
            for row, state in zip(pages, self.states, strict=True):
                latents[row] = codec.encode(steps[row], widths[state])
            latents = latents.masked_fill(~used, 99)
        elif codec.largest:
            largest = codec.largest_codes(rank, latents.device) / 3
            latents, basis = codec.encode(largest * latents), basis / largest[:, None, None]
            latents = latents.masked_fill(~used, 99)
        else:
            latents = latents.masked_fill(~used, torch.nan).to(dtype)
        rotary = RotaryTables(RopeConfig(self.dim, **rope), 64 * (PAGES + 2))
        centred = mean.to(dtype) if codec.largest else None
        first = 64 * torch.randint(3, self.states.shape)
        return LatentKeys(latents, codec, basis.to(dtype), centred, self.states, pages, first, rotary, widths)

    def _codes(self, bits: int) -> CodedRows:
        pages, scale_pages = self._pages(), self._pages()
        rotation = torch.linalg.qr(torch.randn(self.dim, self.dim))[0]
        rows = torch.randn(self.names, self.heads, self.per_page, self.chunk, self.dim)
        codec = ROTATED_ROWS[bits]
        codes, scale = codec.encode(rows, rotation)
        scale = scale.masked_fill(~self._used(scale_pages)[..., None, None], torch.nan).flatten(2, 3)
        return CodedRows(codes, scale, codec, self.dim, rotation, pages, scale_pages)

    def _buffered(self, source: Any) -> BufferedRows:
        rows = source.rows if isinstance(source, DenseRows) else source.codes
        count = self.selected.shape[-1] + 3
        entries = torch.rand(self.batch, self.heads, count).argsort(-1)[..., : self.selected.shape[-1]]
        entries = entries.masked_fill(self.selected < 0, -1)
        buffer = rows.new_full((2 * self.batch, self.heads, count, *rows.shape[3:]), 99)
        if rows.is_floating_point():
            buffer.fill_(torch.nan)
        row, head, i = (entries >= 0).nonzero(as_tuple=True)
        chosen = self.selected[row, head, i]
        pages = source.pages[row, chosen // self.per_page]
        slots = self.states.flip(0)
        buffer[slots[row], head, entries[row, head, i]] = rows[pages, head, chosen % self.per_page]
        return BufferedRows(source, buffer, slots, entries)

    def field(self, name: str) -> Any:
        """An argument, or a field of its sources, by name."""
        owner, attribute = self._place(name)
        return getattr(owner, attribute)

    def put(self, name: str, value: Any) -> None:
        """Replaces a ``field``."""
        owner, attribute = self._place(name)
        if owner is self:
            setattr(self, attribute, value)
        elif owner is self.keys:
            self.keys = replace(self.keys, **{attribute: value})
        elif owner is self.values:
            self.values = replace(self.values, **{attribute: value})
        else:
            self.values = replace(self.values, source=replace(owner, **{attribute: value}))

    def _place(self, name: str) -> tuple[Any, str]:
        stored = self.values.source if isinstance(self.values, BufferedRows) else self.values
        match name:
            case "pages" | "states" | "first" | "latents" | "basis" | "mean" | "rotary":
                return self.keys, name
            case "keys":
                return self.keys, "rows"
            case "values":
                return stored, "rows"
            case "codes pages":
                return stored, "pages"
            case "codes" | "scale" | "scale_pages" | "rotation":
                return stored, name
            case "buffer slots" | "entries":
                return self.values, name.removeprefix("buffer ")
        return self, name

    @property
    def arguments(self) -> tuple[Tensor, KeySource, ValueSource, Tensor, Tensor | None]:
        return self.q, self.keys, self.values, self.selected, self.log_weight

    @property
    def raw_arguments(self) -> tuple[Any, ...]:
        """The arguments of the C++ op."""
        sources = *cpu._keys(self.keys), *cpu._values(self.values)
        return self.q, self.selected, self.log_weight, *sources

    def exact(self) -> tuple[Tensor, Tensor]:
        """The reference's result in float64. Coded values are decoded in float32."""
        sources = in_dtype(self.keys, torch.float64), in_dtype(self.values, torch.float64)
        return reference.attend_selected(self.q.double(), *sources, self.selected, self.log_weight)

"""The interface of key, index and value parts.

A part declares its fields (bytes per page and per fitted state) and reads and writes them through the cache's
``CompressedStore``; it owns no memory. Shapes: n pages, B sequences, P pages of the longest, H kv heads, G query heads
per kv head, d head dim, c chunk, C = 64 / c chunks per page.

On a GPU ``select`` and ``source`` run while a decode step is captured in a graph, and ``compress`` in one of its own:
they may not wait for the device, and shapes may depend on those of their arguments alone. ``fit`` and ``observe`` may.
Pages in a batch's tables past a row's ``num_pages`` are any existing ones, to be masked; so are chunks that are
``EXCLUDED``, by the index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource
from shadowkv.ops.chunk_mean_scores.reference import mask_logits
from shadowkv.ops.codec import CodecId
from shadowkv.settings import settings_of

EXCLUDED = "excluded"
"""The field of compressed pages, bool [H, C], that says which chunks are exact elsewhere (sink, outliers), so neither
scored nor selected. It belongs to the cache: policies with outliers have it, and those whose index reads it."""


COMPRESSED_AT_ONCE = 512
"""Pages of one layer that are coded at a time, to bound the temporary memory."""

OBSERVED = 64
"""Newest queries of a prompt that an index can learn from."""

TOKENS_AT_ONCE, STATES_AT_ONCE = 65536, 16
"""Layers of a short prompt are stored together, and so are sequences that are compressed as they grow: each launch that
stores them takes as long as one for a single layer. At most that many tokens of all layers are stored together, the
queries kept of them counted too, and that many fitted states, of one sequence or of several."""


@dataclass(frozen=True)
class CompressedTokens:
    """Full pages of tokens about to be stored, of L layers at once.

    Attributes:
        layers: which ones.
        states: int64 [n], or [1] when all pages are stored with one.
        first: int64 [n], positions of the pages' first tokens.
        pages: int64 [n], granules of the device pages.
        value_pages: int64 [n], granules of the pages that hold ``ValuePart.placed_field`` (the same where it stays on
            the device).
        keys: [L, n, 64, H, d] before RoPE.
        rope_keys: [L, n, 64, H, d] after RoPE.
        values: [L, n, 64, H, d].
    """

    layers: slice
    states: Tensor
    first: Tensor
    pages: Tensor
    value_pages: Tensor
    keys: Tensor
    rope_keys: Tensor
    values: Tensor

    def split(self, count: int) -> Iterator[CompressedTokens]:
        """Portions of at most ``count`` pages."""
        for start in range(0, len(self.pages), count):
            rows = slice(start, start + count)
            yield CompressedTokens(
                self.layers,
                self.states if len(self.states) == 1 else self.states[rows],
                *(x[rows] for x in (self.first, self.pages, self.value_pages)),
                *(x[:, rows] for x in (self.keys, self.rope_keys, self.values)),
            )


@dataclass(frozen=True)
class FittedTokens:
    """Tokens that states are fitted on, of L layers and n equally long segments at once.

    Attributes:
        keys: [L, n, S, H, d] before RoPE. For few tokens after others, these are the keys of the whole sequence, the
            earlier ones rebuilt, where the key part asks for them (``KeyPart.fits_on_earlier``).
        rope_keys: [L, n, S, H, d] after RoPE.
        values: [L, n, S, H, d].
        first: int64 [n], positions of the first tokens of ``rope_keys``.
    """

    keys: Tensor
    rope_keys: Tensor
    values: Tensor
    first: Tensor


@dataclass(frozen=True)
class Selection:
    """Chunks that queries attend to, for every row and kv head.

    Attributes:
        chunks: int64 [B, H, k], ascending; -1 is none, after the others.
        log_weight: float32 [B, H, k], the logarithm of how many chunks each stands for, as some were sampled; any value
            where there is none. None where nothing is sampled.
    """

    chunks: Tensor
    log_weight: Tensor | None = None


@dataclass(frozen=True)
class NoSettings:
    """Of a part that leaves nothing to choose."""


class Part(ABC):
    """What the three axes have in common.

    Attributes:
        axis: of the policy that it is on: ``keys``, ``index`` or ``values``.
        Settings: what it lets a policy choose, a frozen dataclass of fields declared by ``shadowkv.settings.setting``.
        settings: these, of its policy.
        ops: the ops that it calls, beyond those that every policy calls (``shadowkv.kvcache.case``).
        diagnostics: names of fields of its states that hold one number, which says how well a state fits: the smaller,
            the worse.
        weights: names of what a checkpoint has to bring for it in every layer (``CompressedStore.weights``).
    """

    axis: ClassVar[str]
    Settings: ClassVar[type[Any]] = NoSettings
    ops: ClassVar[tuple[str, ...]] = ()
    diagnostics: ClassVar[tuple[str, ...]] = ()
    weights: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: KVSpec, shape: ModelShape, dtype: torch.dtype) -> None:
        self.spec = spec
        self.settings = self.settings_of(spec)
        self.shape = shape
        self.dtype = dtype
        self.chunks = PAGE // spec.chunk

    @classmethod
    def settings_of(cls, spec: KVSpec) -> Any:
        """Its own settings in ``spec``: those of its names, and of its axis where they say one."""
        values = {}
        for name, value in dict(spec.settings).items():
            axis, _, own = name.rpartition(".")
            if own in settings_of(cls.Settings) and axis in ("", cls.axis):
                values[own] = value
        return cls.Settings(**values)

    @classmethod
    def with_defaults(cls, spec: KVSpec, shape: ModelShape) -> Any:
        """Its settings in ``spec``, with values where they are None and the model decides."""
        return cls.settings_of(spec)

    @classmethod
    def described(cls, spec: KVSpec, shape: ModelShape) -> str:
        """What to say of its settings beside its name, in the lines at the start of a server."""
        return ""

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        """Why the part cannot serve ``spec`` on models of ``shape``; empty where it can."""
        return []

    @property
    def codec_id(self) -> int:
        """Id of the format that it stores (``shadowkv.ops.codec``)."""
        return CodecId.DENSE

    @abstractmethod
    def page_fields(self) -> tuple[Field, ...]:
        """Arrays of one compressed page in one layer."""

    def bytes_per_token(self) -> float:
        """Bytes of one compressed token in one layer, all kv heads."""
        return sum(field.nbytes for field in self.page_fields()) / PAGE

    def state_fields(self) -> tuple[Field, ...]:
        """Arrays of a fitted state in one layer."""
        return ()

    def state_bytes_read(self) -> int:
        """Bytes of a fitted state that a decode step reads."""
        return sum(field.nbytes for field in self.state_fields())

    def fitting_bytes(self, tokens: int) -> int:
        """Device bytes that ``fit`` takes at a time for that many tokens of all layers and states, beyond its
        arguments."""
        return 0

    def compression_bytes(self) -> int:
        """Device bytes that ``compress`` takes at a time, beyond its arguments and copies as large as those."""
        return 0

    def reading_bytes(self) -> int:
        """Device bytes that a decode step takes for each row of a batch to say where its tokens are (``source``)."""
        return 0

    def observe(self, store: CompressedStore, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        """Learns what it can from a prompt's last queries; before ``fit``, long before it where a prompt is kept dense.

        Args:
            states: int64 [n].
            queries: [L, n, w, H_q, d], after RoPE: w is at most ``OBSERVED``, and 0 where they are gone.
            first: int64 [n], the token within its segment that each one's first query belongs to.
        """
        return

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        """Learns states int64 [n] of segments of L layers from all their tokens, including those that stay exact."""
        return

    @abstractmethod
    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        """Stores full pages."""


class KeyPart(Part):
    """How a selected key is rebuilt."""

    axis = "keys"

    @property
    def centred(self) -> bool:
        """Whether keys are stored without the mean key of their prompt."""
        return False

    @classmethod
    def in_groups(cls, spec: KVSpec, groups: int) -> KVSpec:
        """The policy of all heads where ranks have ``groups`` of them, which cannot share what a part finds in several
        heads."""
        return spec

    @classmethod
    def of_heads(cls, spec: KVSpec, shape: ModelShape, heads: int) -> KVSpec:
        """A resolved policy as it is for ``heads`` of the kv heads of ``shape``, one of those groups."""
        return spec

    @property
    def fits_on_earlier(self) -> bool:
        """Whether a state for few tokens after others is fitted on all of them (``FittedTokens.keys``)."""
        return False

    @property
    def rank(self) -> int:
        """Dimensions of its latents, all groups of heads together; 0 where keys are kept head by head."""
        return 0

    def rebuilt_bytes(self, selected: int, compressed: int) -> float:
        """Bytes that a step reads to rebuild the keys of ``selected`` tokens per kv head, of ``compressed`` ones, in
        one layer, all kv heads."""
        return selected * self.bytes_per_token()

    @abstractmethod
    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> KeySource:
        """Where the keys of the batch's compressed tokens are."""


class IndexPart(Part):
    """How chunks are found.

    Attributes:
        samples: whether it can sample a share of the budget by its scores.
        estimates_mass: whether it can stop once it has found a given share of the softmax.
        reads_excluded: whether it reads from the pages' field ``EXCLUDED`` what may not be selected. Otherwise it gets
            that from ``exclude``.
    """

    axis = "index"
    samples: ClassVar[bool] = False
    reads_excluded: ClassVar[bool] = True

    estimates_mass: ClassVar[bool] = False

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        reasons = []
        if spec.mass is not None and not cls.estimates_mass:
            reasons.append(f"index={spec.index!r} estimates no softmax over all chunks: mass has no meaning with it")
        if spec.sampled and not cls.samples:
            reasons.append(f"index={spec.index!r} samples no chunks: sampled={spec.sampled} has no meaning with it")
        return reasons

    def scored_bytes(self, tokens: int, chunks: int) -> float:
        """Bytes that a step reads to find ``chunks`` of ``tokens`` compressed tokens, in one layer, all kv heads."""
        return tokens * self.bytes_per_token()

    def exclude(self, store: CompressedStore, layers: slice, pages: Tensor, excluded: Tensor) -> None:
        """Marks chunks of pages just compressed that may not be selected, bool [L, n, H, C]."""
        return

    @abstractmethod
    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        """What RoPE-rotated queries [B, H_q, d] attend to: as many chunks as the batch's budget, plus the sampled
        ones."""


class ScoredIndex(IndexPart):
    """An index that scores every chunk; those with the largest share of any query head's softmax are selected."""

    estimates_mass = True
    ops: ClassVar[tuple[str, ...]] = ("select_top_chunks",)

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        logits, lse = self.logits(store, layer, q, batch)
        k = min(batch.max_budget, logits.shape[-1])
        return Selection(store.ops.select_top_chunks(logits, lse, batch.budget, k, self.spec.mass))

    @abstractmethod
    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        """Logits float32 [B, H, G, P * C] of all chunks for RoPE-rotated queries [B, H_q, d], -inf where not
        selectable; and log-sum-exps of them over disjoint ranges of chunks, float32 [B, H, G, T]."""


class RankedIndex(IndexPart):
    """An index that ranks every chunk regardless of the query."""

    ops = ("select_top_chunks",)

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        ranks = self.ranks(store, layer, batch).unsqueeze(2)
        logits, _ = mask_logits(ranks, store.page[EXCLUDED][layer], batch.pages, batch.num_chunks)
        # No log-sum-exp, which would lose the last digits of the ranks.
        lse = torch.zeros_like(logits[..., :1])
        k = min(batch.max_budget, logits.shape[-1])
        return Selection(store.ops.select_top_chunks(logits, lse, batch.budget, k))

    @abstractmethod
    def ranks(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> Tensor:
        """Ranks float32 [B, H, P * C] of all chunks, including those that may not be selected, the largest first; none
        is above 0, as ``select_top_chunks`` takes them for logarithms of shares."""


class ValuePart(Part):
    """How values are stored."""

    axis = "values"

    @property
    def placed_field(self) -> Field:
        """The first of its page fields, [H, C, c, w], rows of chunks: where the policy places values on the host, it is
        stored there, and selected rows are fetched; the others stay on the device."""
        return self.page_fields()[0]

    @abstractmethod
    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> DenseRows | CodedRows:
        """Where the values of the batch's compressed tokens are."""

"""The interface of the parts of a policy: keys, index and values, which store bytes, and prefill strategies.

A key, index or value part declares its fields (arrays per page and per fitted state). It reads and writes them through
the cache's ``CompressedStore`` and owns no memory. Shapes: L layers, n pages or sequences, S tokens of a segment, B
rows of a step, P compressed pages of a row, H kv heads, H_q query heads, G query heads per kv head, d dimensions of a
head, c tokens per chunk, C = 64 / c chunks per page.

On a GPU, the CUDA graph of a decode step captures ``select`` and ``source``. Another graph captures ``compress``.
Graphs of prompts capture ``source`` and ``compress``. So these methods must not wait for the device, and shapes must
depend only on the shapes of their arguments. The same holds for ``observe`` if ``captures_observe`` returns True.
``fit`` is never captured. Past a row's ``num_pages``, page tables have ids of arbitrary existing pages. Parts must mask
these pages. An index must also mask chunks that are ``EXCLUDED``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource
from shadowkv.ops.chunk_scores.reference import mask_logits
from shadowkv.ops.codec import CodecId
from shadowkv.ops.registry import Ops
from shadowkv.ops.select_blocks.reference import Blocks
from shadowkv.settings import Check, setting, settings_of

EXCLUDED = "excluded"
"""Field of compressed pages, bool [H, C]: True for chunks that are stored exactly elsewhere (sink, outliers) and must
be neither scored nor selected. The cache declares it, and not a part. Pages have this field if the policy has outliers,
or if its index reads the field."""


INDEX_KEYS = "index_keys"
"""Field of exact and of compressed pages in layers with an indexer, [1, 64, d]: index keys, after RoPE unless the
indexer is pooled."""

COMPRESSED_AT_ONCE = 512
"""Maximum number of pages, summed over layers, that are compressed at a time. It limits temporary memory."""

OBSERVED = 64
"""Number of a prompt's newest queries that an index can learn from."""

TOKENS_AT_ONCE, STATES_AT_ONCE = 65536, 16
"""Limits on what is stored together: the number of tokens and kept queries, summed over layers and sequences, and the
number of fitted states. Several layers of a short prompt are stored together, and so are several sequences that are
compressed as they grow. This saves time, because a kernel takes as long for several of them as for one."""


@dataclass(frozen=True)
class CompressedTokens:
    """Full pages of tokens to compress, of L layers at once.

    Attributes:
        layers: the layers.
        states: int64 [n], the states of the pages, or [1] if all pages have the same state.
        first: int64 [n], positions of the pages' first tokens.
        pages: int64 [n], page ids on the device.
        value_pages: int64 [n], page ids for ``ValuePart.placed_field``; the same as ``pages`` if that field is on the
            device.
        keys: [L, n, 64, H, d] before RoPE.
        rope_keys: [L, n, 64, H, d] after RoPE.
        values: [L, n, 64, H, d].
        index_keys: [L, n, 64, 1, d] as ``INDEX_KEYS``, in layers with an indexer; None in other layers.
    """

    layers: slice
    states: Tensor
    first: Tensor
    pages: Tensor
    value_pages: Tensor
    keys: Tensor
    rope_keys: Tensor
    values: Tensor
    index_keys: Tensor | None = None

    def split(self, count: int) -> Iterator[CompressedTokens]:
        """Yields portions of at most ``count`` pages."""
        for start in range(0, len(self.pages), count):
            rows = slice(start, start + count)
            yield replace(
                self,
                states=self.states if len(self.states) == 1 else self.states[rows],
                **{name: getattr(self, name)[rows] for name in ("first", "pages", "value_pages")},
                **{name: getattr(self, name)[:, rows] for name in ("keys", "rope_keys", "values")},
                index_keys=None if self.index_keys is None else self.index_keys[:, rows],
            )


@dataclass(frozen=True)
class FittedTokens:
    """Tokens to fit states on, of L layers and n equally long segments at once.

    Attributes:
        keys: [L, n, S, H, d] before RoPE. For a short later segment, these are the keys of the whole sequence if the
            key part asks for them (``KeyPart.fits_on_earlier``). Those before the segment are rebuilt from compressed
            pages.
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
        chunks: int64 [B, H, k], ascending; -1 fills unused entries at the end.
        log_weight: float32 [B, H, k], logarithm of the number of chunks that each sampled chunk stands for; arbitrary
            in unused entries. None if nothing is sampled.
    """

    chunks: Tensor
    log_weight: Tensor | None = None


@dataclass(frozen=True)
class NoSettings:
    """The settings of a part that has none."""


class Part:
    """A part of a policy on any axis: its settings, and what they allow.

    Attributes:
        axis: ``keys``, ``index``, ``values`` or ``prefill``.
        Settings: frozen dataclass of the part's settings. Its fields are declared by ``shadowkv.settings.setting``.
        unstored: names of settings that change no stored byte.
        ops: names of the ops that the part calls, beyond those that every policy calls (``shadowkv.kvcache.case``).
    """

    axis: ClassVar[str]
    Settings: ClassVar[type[Any]] = NoSettings
    unstored: ClassVar[tuple[str, ...]] = ()
    ops: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def settings_of(cls, spec: KVSpec) -> Any:
        """The part's settings in ``spec``. Their names in ``spec`` can be plain, or begin with the part's axis."""
        values = {}
        for name, value in dict(spec.settings).items():
            axis, _, own = name.rpartition(".")
            if own in settings_of(cls.Settings) and axis in ("", cls.axis):
                values[own] = value
        return cls.Settings(**values)

    @classmethod
    def with_defaults(cls, spec: KVSpec, shape: ModelShape) -> Any:
        """The part's settings in ``spec``, with the model's defaults in place of None."""
        return cls.settings_of(spec)

    @classmethod
    def described(cls, spec: KVSpec, shape: ModelShape) -> str:
        """Describes the settings, for the lines that a server logs at start. Empty if the part's name says all."""
        return ""

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        """Reasons why the part does not support ``spec`` on models of ``shape``; empty if it does."""
        return []


class StoredPart(Part, ABC):
    """A part whose arrays are in the pages and states of a cache: base class of key, index and value parts.

    Attributes:
        settings: the part's settings in its policy.
        diagnostics: names of state fields that hold one number, which says how well a state fits. Smaller is worse.
        weights: names of the weights that a checkpoint must have in every layer (``CompressedStore.weights``).
    """

    diagnostics: ClassVar[tuple[str, ...]] = ()
    weights: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: KVSpec, shape: ModelShape, dtype: torch.dtype) -> None:
        self.spec = spec
        self.settings = self.settings_of(spec)
        self.shape = shape
        self.dtype = dtype
        self.chunks = PAGE // spec.chunk

    @property
    def codec_id(self) -> int:
        """Id of the stored format (``shadowkv.ops.codec``)."""
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
        """Peak temporary device memory of ``fit``, in bytes, without its arguments. ``tokens`` is the number of tokens,
        summed over layers and states."""
        return 0

    def compression_bytes(self) -> int:
        """Peak temporary device memory of ``compress``, in bytes, without its arguments and without copies of the
        arguments."""
        return 0

    def reading_bytes(self) -> int:
        """Temporary device bytes of ``source`` in a decode step, for each row of a batch."""
        return 0

    @property
    def observes(self) -> bool:
        """Whether the part learns from a prompt's last queries."""
        return type(self).observe is not StoredPart.observe

    def captures_observe(self, ops: Ops) -> bool:
        """Whether a CUDA graph can capture ``observe`` with an engine's ops. If not, prompts from which the part learns
        run without graphs."""
        return False

    def observe(self, store: CompressedStore, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        """Learns from a prompt's last queries. ``observe`` is called before ``fit``. If the prompt stays dense at
        first, it is called long before.

        Args:
            states: int64 [n], the states that learn.
            queries: [L, n, w, H_q, d], after RoPE. w is at most ``OBSERVED``, and 0 for generated tokens, whose queries
                are not kept.
            first: int64 [n], the number of the first query's token within its segment.
        """
        return

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        """Fits states int64 [n] of L layers on all tokens of their segments, including those that stay exact."""
        return

    @abstractmethod
    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        """Compresses full pages of tokens and writes them."""


class KeyPart(StoredPart):
    """How keys are stored and rebuilt."""

    axis = "keys"

    @property
    def centred(self) -> bool:
        """Whether keys are stored without the mean key of their prompt."""
        return False

    @classmethod
    def in_groups(cls, spec: KVSpec, groups: int) -> KVSpec:
        """Returns the policy for all kv heads when tensor-parallel ranks divide them into ``groups`` groups. Heads on
        different ranks cannot share a basis, for example."""
        return spec

    @classmethod
    def of_heads(cls, spec: KVSpec, shape: ModelShape, heads: int) -> KVSpec:
        """Returns the resolved policy for one group of kv heads (``in_groups``), which has ``heads`` of the kv heads of
        ``shape``."""
        return spec

    @property
    def fits_on_earlier(self) -> bool:
        """Whether the state of a short later segment is fitted on the earlier tokens too (``FittedTokens.keys``)."""
        return False

    @property
    def rank(self) -> int:
        """Dimensions of the latents, all groups of heads together; 0 if keys are stored head by head."""
        return 0

    def rebuilt_bytes(self, selected: int, compressed: int) -> float:
        """Bytes that a step reads in one layer to rebuild keys, summed over kv heads. Each head selects ``selected`` of
        ``compressed`` tokens."""
        return selected * self.bytes_per_token()

    @abstractmethod
    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> KeySource:
        """The source from which kernels rebuild the keys of the batch's compressed tokens."""


class IndexPart(StoredPart):
    """How chunks are selected.

    Attributes:
        sampled: share of the budget for chunks that are sampled.
        mass: share of the softmax at which the selection stops; None if the selection takes the whole budget.
        reads_excluded: whether the index reads the field ``EXCLUDED`` of pages. If not, ``exclude`` must mark excluded
            chunks in the index's own fields.
    """

    axis = "index"
    reads_excluded: ClassVar[bool] = True

    @property
    def sampled(self) -> float:
        return 0.0

    @property
    def mass(self) -> float | None:
        return None

    def sampled_chunks(self, budget: np.ndarray, selectable: np.ndarray) -> np.ndarray:
        """Returns how many chunks of ``budget`` are sampled from ``selectable`` tokens, int64. The other chunks of the
        budget are the top-k. Nothing is sampled if the budget covers all tokens."""
        top_k = np.ceil(np.round(budget * (1 - self.sampled), 6)).astype(np.int64)
        scarce = budget * self.spec.chunk < selectable
        return np.where(scarce, budget - top_k, 0)

    def scored_bytes(self, tokens: int, chunks: int) -> float:
        """Bytes that a step reads in one layer to select ``chunks`` chunks of ``tokens`` compressed tokens, summed over
        kv heads."""
        return tokens * self.bytes_per_token()

    def exclude(self, store: CompressedStore, layers: slice, pages: Tensor, excluded: Tensor) -> None:
        """Marks chunks of newly compressed pages that must not be selected: True in ``excluded`` bool [L, n, H, C]."""
        return

    @abstractmethod
    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        """Selects chunks for RoPE-rotated queries [B, H_q, d]: the batch's budget of top-k chunks, and sampled ones."""


class ScoredIndex(IndexPart):
    """An index that scores every chunk. A kv head selects the chunks with the largest share of the softmax of any of
    its query heads."""

    unstored = ("mass",)
    ops: ClassVar[tuple[str, ...]] = ("select_top_chunks",)

    @dataclass(frozen=True)
    class Settings:
        """With a ``mass``, each kv head selects its best chunks until they have this share of the softmax of each of
        its query heads, as the index estimates it. The budget, and the tokens and bytes that follow from it, are then
        upper bounds."""

        mass: float | None = setting(
            None,
            "index",
            "share of the softmax at which a step stops selecting (default: it takes the whole budget)",
            check=Check(lambda mass: 0 < mass < 1, "must be in (0, 1)"),
        )

    @classmethod
    def described(cls, spec: KVSpec, shape: ModelShape) -> str:
        mass = cls.settings_of(spec).mass
        return "" if mass is None else f"up to {mass:.4g} of the estimated softmax"

    @property
    def mass(self) -> float | None:
        mass: float | None = self.settings.mass
        return mass

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        logits, lse = self.logits(store, layer, q, batch)
        k = min(batch.max_budget, logits.shape[-1])
        return Selection(store.ops.select_top_chunks(logits, lse, batch.budget, k, self.mass))

    @abstractmethod
    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        """Returns the logits of all chunks for RoPE-rotated queries [B, H_q, d], float32 [B, H, G, P * C], -inf for
        chunks that cannot be selected. Also returns the log-sum-exps of the logits over T disjoint ranges of chunks,
        float32 [B, H, G, T]."""


class RankedIndex(IndexPart):
    """An index that ranks every chunk, independent of the query."""

    ops = ("select_top_chunks",)

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        ranks = self.ranks(store, layer, batch).unsqueeze(2)
        logits, _ = mask_logits(ranks, store.page[EXCLUDED][layer], batch.pages, batch.num_chunks)
        # Zeros replace the log-sum-exps: subtracting log-sum-exps would lose the last digits of the ranks.
        lse = torch.zeros_like(logits[..., :1])
        k = min(batch.max_budget, logits.shape[-1])
        return Selection(store.ops.select_top_chunks(logits, lse, batch.budget, k))

    @abstractmethod
    def ranks(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> Tensor:
        """Ranks float32 [B, H, P * C] of all chunks, also of excluded ones. Larger ranks are selected first. Ranks are
        at most 0, because ``select_top_chunks`` reads them as logarithms of shares."""


class ValuePart(StoredPart):
    """How values are stored."""

    axis = "values"

    @property
    def placed_field(self) -> Field:
        """The page field to which the policy's place applies, [H, C, c, w] with w elements per row: the first field.
        With ``place="host"``, it is on the host, and selected rows are fetched. The other fields stay on the device."""
        return self.page_fields()[0]

    @abstractmethod
    def source(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> DenseRows | CodedRows:
        """The source from which kernels read the values of the batch's compressed tokens."""


BlockHook = Callable[[int, Tensor, Tensor, Blocks], Blocks]
"""A function that is called with the layer's number in the model, RoPE-rotated queries [n, H_q, d] and keys [m, H, d],
and the selected blocks. Returns the blocks to attend to."""


class PrefillStrategy(Part, ABC):
    """How the new tokens of a prompt attend to each other and to the tokens before them. A cache has one instance.

    Layers with a window do not use it.

    Attributes:
        selects_blocks: whether the strategy selects blocks of keys and calls ``hook``.
        hook: changes the selected blocks; None leaves them as they are.
    """

    axis = "prefill"
    selects_blocks: ClassVar[bool] = False

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        self.settings, self.device = self.settings_of(spec), device
        self.hook: BlockHook | None = None

    @abstractmethod
    def pays(self, new: int, keys: int) -> bool:
        """Whether to use ``attend`` for queries of ``new`` new tokens of a sequence, where the queries see up to
        ``keys`` keys. Otherwise they attend exactly."""

    @abstractmethod
    def attend(
        self, ops: Ops, layer: int, q: Tensor, k: Tensor, v: Tensor, to_come: int, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends causally with the queries of the last n of m positions. Returns [n, H_q, d]. The softmax scale is 1 /
        sqrt(d).

        Args:
            ops: the engine's ops.
            layer: layer of the model.
            q: [n, H_q, d], after RoPE.
            k, v: [m, H, d], keys after RoPE and values of all positions.
            to_come: number of tokens of the prompt after the last position.
            sinks: float32 [H_q], scores of one more position in every softmax. The value of that position is 0.
        """

    def take_density(self) -> float | None:
        """Share of the visible blocks of keys that queries attended to since the last call; None if ``attend`` was not
        called, or if the strategy selects no blocks. Waits for the device."""
        return None

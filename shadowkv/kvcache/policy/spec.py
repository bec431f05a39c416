"""KVSpec: a cache policy as a value, keys x index x values x place, with a budget (design: one cache, four parts)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.ops.page import PAGE as PAGE

DEFAULT_BUDGET = 1 / 64
"""Share of the context that a step selects: 1.56 % (ShadowKV, section 5.1)."""

SINK = 8
"""First tokens that always stay exact, in whole chunks: they attract attention whatever they are (arXiv:2309.17453)."""

DEFAULT_BUDGET_FLOOR = 960
"""Tokens that a step selects at least, where the budget is the default: 1.56 % of 61,440. The error of what is sampled
depends on how many tokens are sampled, not on their share of the context (docs/benchmarks/answers.md)."""

MIN_SEGMENT = 256
"""Tokens beyond the sink and the newest ones from which on compressing a tail pays, where the budget is the default."""

LATE = 512
"""Tokens by which an answer may exceed the length from which prompts are compressed, and stay dense: most end before.
At a GPU's costs (``engine.startup.crossover``) compressing 8K tokens pays for itself 1,500 tokens later, not at
once."""

FETCH_BUFFER = 2.0
"""Chunks of values on the host that a buffer keeps, as a multiple of those that a step selects: most are selected
again."""

PREFILL_ERROR = 0.05
"""Default error of a sparse prefill (``parts.prefill.SparsePrefill``)."""

ROTATED = "rotated"
"""Values in 3 bits, or 4 where the head dim does not suit 3: a name that stands for one of two parts."""


@dataclass(frozen=True)
class KVSpec:
    """How a sequence's keys and values are stored and found. Parts that are registered (``parts.register``) add names.

    Attributes:
        keys: how keys are stored and rebuilt: ``dense``, ``low-rank``, ``low-rank-int8``, ``low-rank-int4``, or a
            codec of rows after RoPE, as for values.
        index: how chunks are found: ``none`` (attend to all), ``chunk-mean``, ``chunk-mean-fp8``, ``sketch``,
            ``sketch-1bit`` or ``exact``.
        values: how values are stored: ``dense``, or a codec of rows (``shadowkv.kvcache.codecs``): ``rotated-4bit``,
            ``-3bit`` or ``-2bit``, ``lloyd-8bit``, ``-4bit``, ``-3bit`` or ``-2bit``, or ``fp8``. ``rotated`` is 3
            bits, or 4 if the head dim is not a multiple of 64.
        place: where compressed values live: ``device`` or ``host`` (pinned where there is a GPU).
        budget: tokens selected per step: a float is a fraction of the context, an int a number of tokens,
            None the default (1.56 %, at least 960 tokens). Sink, outliers and local window come on top.
        chunk: tokens found and fetched together; divides 64.
        outliers: chunks per kv head whose mean fits them worst and that stay exact on the device.
        local: newest tokens that always stay exact.
        dense_below: sequences of fewer tokens stay dense, where compressing them would cost more than it saves; None
            is as few as possible: what would be attended exactly anyway (see ``dense_limit``).
        prefill: how prompts attend: ``dense`` to everything, or ``sparse`` to sampled blocks of keys
            (``parts.prefill``). None lets an engine choose; everything else takes it as dense.
        skip_layers: that many of the first and of the last layers stay as they are: keys and values exact on the
            device, all of them attended to (TurboQuant in vLLM has 2).
        settings: what its parts have of their own (``parts.Part.Settings``), by name, ``rank``, or with the axis,
            ``keys.rank``, where two of its parts have a setting of one name. Given as a mapping; kept as sorted pairs,
            of a resolved policy with their axes.
    """

    keys: str = "dense"
    index: str = "none"
    values: str = "dense"
    place: str = "device"
    budget: float | int | None = None
    chunk: int = 8
    outliers: int = 0
    local: int = 32
    dense_below: int | None = None
    prefill: str | None = None
    skip_layers: int = 0
    settings: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(sorted(dict(self.settings).items())))

    def changed(self, **values: Any) -> KVSpec:
        """The policy with other values of its own fields, and of settings of its parts by all other names. Settings
        that name the axis of a part (``keys.centred``) go where another part takes its place."""
        own = {name: value for name, value in values.items() if name in NAMES}
        of_parts = {name: value for name, value in values.items() if name not in NAMES}
        others = {axis for axis in own if getattr(self, axis) not in (None, own[axis])}

        def goes(name: str) -> bool:
            axis, _, plain = name.rpartition(".")
            return axis in others or plain in of_parts or (not axis and any(n.endswith(f".{name}") for n in of_parts))

        kept = {name: value for name, value in dict(self.settings).items() if not goes(name)}
        return replace(self, **own, settings=kept | of_parts)

    def as_dict(self) -> dict[str, Any]:
        """Its fields, and in place of ``settings`` every one of these, without the axis where no other has its name."""
        settings = dict(self.settings)
        plain = [name.rpartition(".")[2] for name in settings]
        names = (one if plain.count(one) == 1 else name for one, name in zip(plain, settings))
        return {name: getattr(self, name) for name in NAMES} | dict(zip(names, settings.values()))

    def contradictions(self, shape: ModelShape) -> list[str]:
        """Why its numbers are invalid for models of ``shape``; its parts say themselves what they cannot do
        (``parts.resolve``)."""
        reasons = []
        if self.chunk < 1 or PAGE % self.chunk:
            reasons.append(f"chunk={self.chunk} does not divide a page of {PAGE} tokens; use 1, 2, 4, 8, 16, 32 or 64")
        if self.outliers < 0:
            reasons.append(f"outliers={self.outliers} is negative")
        if self.local < 1:
            reasons.append(f"local={self.local} is less than 1: the newest token is always exact")
        if self.dense_below is not None and self.dense_below < 0:
            reasons.append(f"dense_below={self.dense_below} tokens is negative")
        if not 0 <= 2 * self.skip_layers <= shape.num_layers:
            half = shape.num_layers // 2
            reasons.append(
                f"skip_layers={self.skip_layers} at either end is not between 0 and half of the layers, {half}"
            )
        if self.skip_layers and not self.compresses:
            reasons.append(f"skip_layers={self.skip_layers} has no meaning where every layer is exact")
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            reasons.append(f"budget={self.budget} as a fraction must be in (0, 1]; a token count is an integer")
        if isinstance(self.budget, int) and self.budget < 1:
            reasons.append(f"budget={self.budget} tokens is less than 1")
        if not self.selects and (self.budget is not None or self.outliers):
            reasons.append("index='none' attends to every token: budget, outliers have no meaning with it")
        return reasons

    @property
    def compresses(self) -> bool:
        """Whether pages ever leave the exact store; not when everything is dense, on the device and attended."""
        return (self.keys, self.index, self.values, self.place) != ("dense", "none", "dense", "device")

    @property
    def selects(self) -> bool:
        """Whether an index selects the compressed tokens that a step attends to, or it attends to all of them."""
        return self.index != "none"

    @property
    def sink_chunks(self) -> int:
        """Chunks at the start that stay exact."""
        return -(-SINK // self.chunk)

    @property
    def static_tokens(self) -> int:
        """Tokens per kv head that stay exact permanently from prefill on: the sink and the outliers."""
        return (self.sink_chunks + self.outliers) * self.chunk

    @property
    def exact_limit(self) -> int:
        """Longest tail, in tokens, that stays exact: a segment of fewer gains nothing."""
        least = MIN_SEGMENT if self.selects and self.budget is None else 0
        return self.static_tokens + self.local + PAGE + least

    @property
    def dense_limit(self) -> int:
        """Longest sequence, in tokens, that is kept dense once its prompt is computed."""
        return max(self.exact_limit, (self.dense_below or 0) - 1)

    @property
    def late_limit(self) -> int:
        """Longest sequence, in tokens, that stays dense while an answer is generated."""
        return self.dense_limit + (LATE if self.dense_limit > self.exact_limit else 0)

    @property
    def ring_pages(self) -> int:
        """Exact pages of a compressed sequence's tail: it holds ``local`` to ``local + 64`` tokens."""
        return math.ceil((self.local + PAGE) / PAGE)

    @property
    def static_pages(self) -> int:
        """Exact pages that hold the sink and the outliers."""
        return math.ceil(self.static_tokens / PAGE)

    @property
    def outlier_pages(self) -> int:
        """Exact pages that hold the outliers of a later segment."""
        return math.ceil(self.outliers * self.chunk / PAGE)

    def compressed_pages(self, length: int) -> int:
        """Pages of a compressed sequence of ``length`` tokens that are compressed."""
        return max(0, length - self.local) // PAGE

    def budget_chunks(self, context: np.ndarray) -> np.ndarray:
        """Chunks per kv head that a step may select out of contexts of ``context`` tokens, int64 of any shape."""
        return -(-self.budget_tokens(context) // self.chunk)

    def budget_tokens(self, context: np.ndarray) -> np.ndarray:
        """Tokens that a step may select out of contexts of ``context`` tokens, int64 of any shape."""
        if not self.selects:
            return context
        if isinstance(self.budget, int):
            return np.full_like(context, self.budget)
        share = np.ceil((self.budget or DEFAULT_BUDGET) * context).astype(np.int64)
        return share if self.budget else np.maximum(share, DEFAULT_BUDGET_FLOOR)

    def attended_tokens(self, context: int) -> int:
        """Tokens that a step attends to, at most, out of a context of ``context`` tokens, per kv head."""
        if not self.compresses or context <= self.dense_limit:
            return context
        tail = context - PAGE * self.compressed_pages(context)
        return min(context, self.static_tokens + tail + int(self.budget_chunks(np.asarray(context))) * self.chunk)

    def describe_budget(self) -> str:
        """How much a step selects."""
        if isinstance(self.budget, int):
            return f"budget {self.budget} tokens"
        floor = f", at least {DEFAULT_BUDGET_FLOOR} tokens" if self.budget is None else ""
        return f"budget {self.budget or DEFAULT_BUDGET:.2%} of the context{floor}"


NAMES = tuple(one.name for one in fields(KVSpec) if one.name != "settings")
"""Fields of a KVSpec that are its own."""

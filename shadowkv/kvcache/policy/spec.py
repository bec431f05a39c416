"""``KVSpec``: a cache policy as a value, keys x index x values x place x prefill, with a budget. ``presets.py`` names
policies, ``parts.resolve`` checks them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shadowkv.kvcache.policy.shape import Indexer, ModelShape
from shadowkv.ops.page import PAGE as PAGE
from shadowkv.settings import NOT_NEGATIVE, Check, at_least, setting, violations

PARTS, POLICY = "parts", "policy"
"""Groups of a ``KVSpec``'s fields. A field of the group ``PARTS`` has one of the names in ``parts.AXES``."""

SINK = 8
"""Number of first tokens that always stay exact, rounded up to whole chunks. First tokens attract attention whatever
they are (arXiv:2309.17453)."""

DEFAULT_BUDGET = 1 / 64, 960
SKETCH_BUDGET = 1 / 96, 640
"""The share of the context that a step selects by default, and the minimum number of tokens that it selects. The
minimum applies to contexts of fewer than 61,440 tokens: the error of sampling depends on the number of sampled tokens,
not on their share of the context (docs/benchmarks/answers.md). ``DEFAULT_BUDGET`` has the share of the ShadowKV paper,
1.56 % (section 5.1). ``SKETCH_BUDGET`` is for a sketch that finds single tokens. It has two thirds of the tokens.
Instead, a step examines 1.5 times as many runs of the sketch. This loses less than ``DEFAULT_BUDGET`` with the smaller
number of runs (docs/design/measured.md)."""

NARROW = 512
"""Keys are narrow if the kv heads of a layer have fewer dimensions than this together. Models with few kv heads have
less redundancy: the same error of keys and values costs them more answers."""

NARROW_BUDGET = 1280
"""The minimum of ``SKETCH_BUDGET`` for models with narrow keys, whose values have 4 bits by default. With both, they
lose 0.2 to 0.7 points of RULER less than with 640 tokens and 3 bits (docs/benchmarks/answers.md)."""

MIN_SEGMENT = 256
"""With the default budget, a tail is compressed only if it has this many tokens besides the sink, the outliers and the
newest ones."""

LATE = 512
"""Number of tokens by which a dense sequence can grow beyond the length from which prompts are compressed. Most answers
are shorter than that. On a GPU, compressing 8K tokens saves time only after 1,500 more tokens
(``engine.startup.crossover``)."""

FETCH_BUFFER = 2.0
"""Size of the device buffer for values on the host, as a multiple of the chunks that a step selects. Later steps select
most of these chunks again."""

PREFILL_ERROR = 0.05
"""Default error of a sparse prefill (``parts.prefill.SparsePrefill``)."""
PREFILL_ERROR_HELP = (
    "maximum error of a sparse prefill, which sums a query's attention weights over sampled blocks: the standard "
    "deviation of this sum, as a share of the sum over all blocks; a lower value is slower and more exact"
)

NATIVE = "native"
"""Name of the index of layers that were trained with an indexer (``shape.Indexer``)."""

SKETCH = "sketch"
"""Name of the index of ``turbo``. For models that have an indexer, resolving a policy replaces this name by
``native``."""

ROTATED = "rotated"
"""Name of values in 3 bits, or in 4 bits if 3 bits do not fit the head dim or the model has narrow keys (``NARROW``).
Resolving a policy replaces this name by ``rotated-3bit`` or ``rotated-4bit``."""


@dataclass(frozen=True)
class KVSpec:
    """How a sequence's keys and values are stored and found. The help of a field says what it means (``shadowkv serve
    --kv help`` prints it). Fields that name parts also accept the names of registered parts (``parts.register``).

    Attributes:
        settings: settings of the policy's parts (``parts.base.Part.Settings``) by name. A name can include the axis:
            ``rank`` or ``keys.rank``. The axis is needed if two parts have a setting with this name. A mapping is
            converted to sorted pairs. In a resolved policy every name includes its axis.
    """

    keys: str = setting("dense", PARTS, "how keys are stored and rebuilt: a codec keeps rows after RoPE in few bits")
    index: str = setting(
        "none",
        PARTS,
        "how chunks are found; none attends to all tokens; native is the model's own indexer, which replaces none and "
        "sketch in models that have one",
    )
    values: str = setting(
        "dense",
        PARTS,
        "how values are stored; rotated is rotated-3bit, or rotated-4bit if the head dim is not a multiple of 64 or if "
        f"the kv heads of a layer have fewer than {NARROW} dimensions together",
    )
    place: str = setting(
        "device", PARTS, "where compressed values are: device, or host (pinned memory if there is a GPU)"
    )
    budget: float | int | None = setting(
        None,
        POLICY,
        "what a step selects: a share of the context (0.0156) or a number of tokens (2048), besides sink, outliers and "
        "newest tokens (default: 1.56 %; for single tokens that a sketch finds 1.04 %; at least min_budget tokens)",
        check=Check(
            lambda budget: 0 < budget <= 1 if isinstance(budget, float) else budget >= 1,
            "must be a share of the context in (0, 1], with a decimal point, or a number of tokens of at least 1",
        ),
    )
    min_budget: int | None = setting(
        None,
        POLICY,
        "minimum number of tokens that a step selects with the default budget (default: 960; for single tokens that a "
        f"sketch finds 640, or {NARROW_BUDGET} if the kv heads of a layer have fewer than {NARROW} dimensions together "
        "and drafts is false)",
        check=at_least(1),
    )
    chunk: int = setting(
        8,
        POLICY,
        "number of tokens that are found and fetched together",
        check=Check(
            lambda chunk: chunk >= 1 and PAGE % chunk == 0,
            f"does not divide a page of {PAGE} tokens; use 1, 2, 4, 8, 16, 32 or 64",
        ),
    )
    drafts: bool = setting(
        False,
        POLICY,
        "the index selects for drafts alone, and all other steps attend to every token, so that answers do not depend "
        "on it",
    )
    outliers: int = setting(
        0,
        POLICY,
        "number of chunks per kv head that stay exact on the device: those that their mean represents worst",
        check=NOT_NEGATIVE,
    )
    local: int = setting(32, POLICY, "number of newest tokens that always stay exact", check=at_least(1))
    dense_below: int | None = setting(
        None,
        POLICY,
        "sequences of fewer tokens stay dense, because compressing them would cost more time than it saves (default: "
        "by --kv-dense-below)",
        check=NOT_NEGATIVE,
    )
    prefill: str | None = setting(
        None, PARTS, "how prompts attend: dense, sparse or a registered strategy (default: by --prefill)"
    )
    skip_layers: int = setting(
        0,
        POLICY,
        "number of first layers, and of last layers, that stay exact and attend to everything: 2 is four layers",
        check=NOT_NEGATIVE,
    )
    settings: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(sorted(dict(self.settings).items())))

    def changed(self, **values: Any) -> KVSpec:
        """The policy with changed fields. Names that are not fields are settings of the policy's parts. If an axis gets
        another part, settings that name this axis (``keys.centred``) are removed."""
        own = {name: value for name, value in values.items() if name in NAMES}
        of_parts = {name: value for name, value in values.items() if name not in NAMES}
        others = {axis for axis in own if getattr(self, axis) not in (None, own[axis])}

        def goes(name: str) -> bool:
            axis, _, plain = name.rpartition(".")
            return axis in others or plain in of_parts or (not axis and any(n.endswith(f".{name}") for n in of_parts))

        kept = {name: value for name, value in dict(self.settings).items() if not goes(name)}
        return replace(self, **own, settings=kept | of_parts)

    def of_indexer(self, indexer: Indexer) -> KVSpec:
        """The policy in layers that were trained with an indexer. Keys, values and place stay as they are, and the
        indexer decides what is attended to."""
        chunk = self.chunk if indexer.pooled is None else indexer.block_size
        return replace(
            self,
            index=NATIVE,
            budget=indexer.budget,
            min_budget=None,
            chunk=chunk,
            drafts=False,
            outliers=0,
            dense_below=None,
            skip_layers=0,
        )

    def as_dict(self) -> dict[str, Any]:
        """The policy's fields and settings by name. The name of a setting includes its axis only if another setting has
        the same name."""
        settings = dict(self.settings)
        plain = [name.rpartition(".")[2] for name in settings]
        names = (one if plain.count(one) == 1 else name for one, name in zip(plain, settings))
        return {name: getattr(self, name) for name in NAMES} | dict(zip(names, settings.values()))

    def contradictions(self, shape: ModelShape) -> list[str]:
        """Reasons why the policy's numbers are invalid for models of ``shape``. The policy's parts give further reasons
        (``parts.resolve``)."""
        reasons = violations(self)
        if 2 * self.skip_layers > shape.num_layers:
            half = shape.num_layers // 2
            reasons.append(f"skip_layers={self.skip_layers} at either end is more than half of the layers, {half}")
        if self.skip_layers and not self.compresses:
            reasons.append(f"skip_layers={self.skip_layers} has no meaning where every layer is exact")
        if self.skip_layers and shape.indexed:
            reasons.append(f"skip_layers={self.skip_layers} cannot leave layers with an indexer exact: use 0")
        if not self.has_index and (self.budget is not None or self.min_budget is not None or self.outliers):
            reasons.append("index='none' attends to every token: budget, min_budget, outliers have no meaning with it")
        if self.budget is not None and self.min_budget is not None:
            reasons.append(
                f"min_budget={self.min_budget} is the minimum of the default budget: leave out one of min_budget and "
                f"budget={self.budget}"
            )
        if self.drafts and shape.indexed:
            reasons.append(
                "drafts=true (which drafts of method='sparse' need) has no meaning with this model, whose own indexer "
                "selects in every step: leave out drafts"
            )
        elif self.drafts and not self.has_index:
            reasons.append("drafts=true needs an index that selects for drafts, such as index=sketch, not 'none'")
        if self.drafts and self.outliers:
            reasons.append(f"drafts=true attends to every token: outliers={self.outliers} have no meaning with it")
        if self.drafts and self.place != "device":
            reasons.append(f"drafts=true attends to every token: values must be on the device, not the {self.place}")
        if self.native and not shape.indexed:
            reasons.append("index='native' needs a model with layers that have an indexer, and this one has none")
        elif self.native and (self.budget is not None or self.min_budget is not None or self.outliers):
            reasons.append(
                "index='native' selects as many blocks as the model does: leave out budget, min_budget and outliers"
            )
        elif shape.indexed and self.index not in ("none", NATIVE):
            reasons.append(
                f"index={self.index!r} cannot replace the indexer that this model's layers were trained with: add "
                f"index={NATIVE}, or use a policy such as turbo, full or fp8"
            )
        return reasons

    @property
    def compresses(self) -> bool:
        """Whether the policy compresses pages. It does not if keys and values are dense, values are on the device, and
        steps attend to all tokens."""
        return (self.keys, self.index, self.values, self.place) != ("dense", "none", "dense", "device")

    @property
    def has_index(self) -> bool:
        """Whether an index can select compressed tokens, for every step or for drafts alone."""
        return self.index != "none"

    @property
    def selects(self) -> bool:
        """Whether a step attends only to compressed tokens that an index selects, and not to all of them. Draft steps
        select also if other steps do not (``drafts``)."""
        return self.has_index and not self.drafts

    @property
    def native(self) -> bool:
        """Whether the model's own indexer selects. It selects among all tokens of the sequence, including exact tokens
        and the sink."""
        return self.index == NATIVE

    @property
    def sink_chunks(self) -> int:
        """Number of chunks at the start of a sequence that stay exact."""
        return 0 if self.native else -(-SINK // self.chunk)

    @property
    def static_tokens(self) -> int:
        """Number of tokens per kv head that stay exact from prefill on: the sink and the outliers."""
        return (self.sink_chunks + self.outliers) * self.chunk

    @property
    def exact_limit(self) -> int:
        """Length of the longest tail that stays exact, because compressing it would save nothing."""
        least = MIN_SEGMENT if self.selects and self.budget is None else 0
        return self.static_tokens + self.local + PAGE + least

    @property
    def dense_limit(self) -> int:
        """Length of the longest sequence that stays dense after its prompt. In layers with an indexer, it is the number
        of tokens that a query attends to, because queries attend to all tokens of a dense sequence."""
        if self.native and isinstance(self.budget, int):
            return self.budget
        return max(self.exact_limit, (self.dense_below or 0) - 1)

    @property
    def late_limit(self) -> int:
        """Length of the longest sequence that stays dense while its answer is generated."""
        return self.dense_limit + (LATE if self.dense_limit > self.exact_limit and not self.native else 0)

    @property
    def ring_pages(self) -> int:
        """Number of exact pages for the tail of a compressed sequence, which has ``local`` to ``local + 64`` tokens."""
        return math.ceil((self.local + PAGE) / PAGE)

    @property
    def static_pages(self) -> int:
        """Number of exact pages for the sink and the outliers."""
        return math.ceil(self.static_tokens / PAGE)

    @property
    def outlier_pages(self) -> int:
        """Number of exact pages for the outliers of a later segment."""
        return math.ceil(self.outliers * self.chunk / PAGE)

    def compressed_pages(self, length: int) -> int:
        """Number of compressed pages of a compressed sequence of ``length`` tokens."""
        return max(0, length - self.local) // PAGE

    @property
    def default_budget(self) -> tuple[float, int]:
        """The share of the context, and the minimum number of tokens, that a step selects if ``budget`` is None."""
        share, least = SKETCH_BUDGET if self.finds_tokens else DEFAULT_BUDGET
        return share, self.min_budget or least

    @property
    def finds_tokens(self) -> bool:
        """Whether a sketch finds single tokens."""
        return self.index == SKETCH and self.chunk == 1

    def budget_chunks(self, context: np.ndarray) -> np.ndarray:
        """Maximum number of chunks per kv head that a step selects from ``context`` tokens, int64 of any shape."""
        return -(-self.budget_tokens(context) // self.chunk)

    def budget_tokens(self, context: np.ndarray) -> np.ndarray:
        """Maximum number of tokens that a step selects from ``context`` tokens, int64 of any shape."""
        if not self.has_index:
            return context
        if isinstance(self.budget, int):
            return np.full_like(context, self.budget)
        share, floor = (self.budget, 0) if self.budget else self.default_budget
        return np.maximum(np.ceil(share * context).astype(np.int64), floor)

    def attended_tokens(self, context: int) -> int:
        """Maximum number of tokens per kv head that a step attends to in a context of ``context`` tokens."""
        if self.native and isinstance(self.budget, int):
            return min(context, self.budget)
        if not self.compresses or self.drafts or context <= self.dense_limit:
            return context
        tail = context - PAGE * self.compressed_pages(context)
        return min(context, self.static_tokens + tail + int(self.budget_chunks(np.asarray(context))) * self.chunk)

    def describe_budget(self) -> str:
        """The budget in words."""
        if isinstance(self.budget, int):
            return f"budget {self.budget} tokens"
        if self.budget:
            return f"budget {self.budget:.2%} of the context"
        share, floor = self.default_budget
        return f"budget {share:.2%} of the context, at least {floor} tokens"


NAMES = tuple(one.name for one in fields(KVSpec) if one.name != "settings")
"""Names of the fields of a KVSpec, without ``settings``."""

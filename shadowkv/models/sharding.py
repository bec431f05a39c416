"""The part of a model that a tensor-parallel rank holds. Attention heads, the MLP's inner width and the vocabulary are
split. A rank has either a part of every expert's inner width, or some whole experts.

Megatron-LM (arXiv:1909.08053), section 3: a rank has rows of the projections that produce heads and the MLP's inner
values, and columns of those that consume them. The ranks' outputs are then summed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from shadowkv.kvcache.parts import key_part, resolve
from shadowkv.kvcache.policy.shape import Heads, share
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.layers.spec import LinearAttention, StateSpace
from shadowkv.models.checkpoints.stored_weight import Stored, dense
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.ops.activation_rows.reference import inputs_of
from shadowkv.ops.quantized.rows import Form, QuantizedRows
from shadowkv.wording import SettingsError, counted

Span = tuple[int, int]
"""A range [first, stop)."""

INNER_MULTIPLE = 16
"""The MLP's inner width is split at multiples of this number, as tensor cores need."""


_TABLE = "n_grams.table.weight"
"""Name, within its layer, of a table of n-gram embeddings. Each has another number of rows."""

_OF_DRAFT_HEAD = "draft_head."
"""Prefix of the names of a draft head's parameters."""


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a rank holds.

    Attributes:
        rows: spans of the parameter's rows, in ascending order. The rank's parameter has them in this order.
        columns: a span of the parameter's columns; None for all.
    """

    rows: tuple[Span, ...]
    columns: Span | None = None

    @cached_property
    def held_from(self) -> list[int]:
        """For each span of ``rows``, the row of the rank's parameter at which the span begins."""
        return [0, *accumulate(map(_length, self.rows))][:-1]


@dataclass(frozen=True)
class Shard:
    """A rank's part of a model; raises ValueError if the model cannot be split.

    With at most as many ranks as kv heads, each rank has whole kv heads and all of their query heads, divided as evenly
    as possible. With more ranks, several ranks hold the same kv head, and each has some of its query heads.

    Attributes:
        whole: the whole model.
        rank, size: this rank's number, and the number of ranks.
        expert_parallel: whether each expert is whole and on one rank.
    """

    whole: ModelConfig
    rank: int = 0
    size: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not among {self.size} ranks")
        if self.size > self.whole.num_query_heads:
            raise SettingsError(
                f"tensor_parallel_size={self.size} is more than the model's "
                f"{counted(self.whole.num_query_heads, 'query head')}",
                ["tensor_parallel_size"],
            )
        if self.whole.normed_heads is not None and self.size > self.whole.num_kv_heads:
            raise SettingsError(
                f"tensor_parallel_size={self.size} is more than the model's "
                f"{counted(self.whole.num_kv_heads, 'kv head')}; {self.whole.architecture} models normalise all heads "
                "together, so that ranks cannot share a kv head",
                ["tensor_parallel_size"],
            )
        if self.expert_parallel and self.whole.experts is None:
            reason = f"enable_expert_parallel: {self.whole.architecture} models have no experts; leave it out"
            raise SettingsError(reason, ["enable_expert_parallel"])
        _ = self.config  # raises for invalid sizes

    def kv_heads(self, heads: Heads) -> Span:
        """The kv heads of this rank, in layers with ``heads``."""
        count, size, rank = heads.num_kv_heads, self.size, self.rank
        if size <= count:
            return share(count, rank, size)
        ranks = self._ranks_of_head(count)
        head = next(head for head in range(count) if rank < sum(ranks[: head + 1]))
        return head, head + 1

    def query_heads(self, heads: Heads) -> Span:
        """The query heads of this rank, in layers with ``heads``. They attend to this rank's kv heads."""
        first, last = self.kv_heads(heads)
        if self.size <= heads.num_kv_heads:
            return first * heads.group, last * heads.group
        ranks = self._ranks_of_head(heads.num_kv_heads)
        start, stop = share(heads.group, self.rank - sum(ranks[:first]), ranks[first])
        return first * heads.group + start, first * heads.group + stop

    def _ranks_of_head(self, count: int) -> list[int]:
        """Number of ranks that share each of ``count`` kv heads, if there are more ranks than heads."""
        return [stop - start for start, stop in (share(self.size, head, count) for head in range(count))]

    def _held(self, heads: Heads) -> Heads:
        """This rank's part of ``heads``."""
        return Heads(_length(self.query_heads(heads)), _length(self.kv_heads(heads)), heads.head_dim)

    @property
    def inner(self) -> Span:
        """This rank's span of the MLP's inner width."""
        return self._inner("intermediate_size", self.whole.intermediate_size)

    def _inner(self, name: str, width: int) -> Span:
        """This rank's share of an inner width; raises SettingsError if it is empty."""
        first, last = share(width, self.rank, self.size, INNER_MULTIPLE)
        if first == last:
            reason = f"tensor_parallel_size={self.size} is too much for {name}={width}"
            raise SettingsError(reason, ["tensor_parallel_size"])
        return first, last

    @property
    def experts(self) -> Span:
        """The experts of this rank, whole or in part."""
        assert self.whole.experts is not None, "there are no experts"
        count = self.whole.experts.routing.experts
        if not self.expert_parallel:
            return 0, count
        if self.size > count:
            reason = f"tensor_parallel_size={self.size} is more than the {counted(count, 'expert')} of a layer"
            raise SettingsError(reason, ["tensor_parallel_size", "enable_expert_parallel"])
        return share(count, self.rank, self.size)

    @property
    def experts_note(self) -> str | None:
        """A line about expert parallelism on this rank, which an engine logs when it starts and a plan prints. None
        without expert parallelism."""
        if not self.expert_parallel:
            return None
        if self.size == 1:
            return "--enable-expert-parallel has no effect on one rank; --tensor-parallel-size sets the number of ranks"
        assert self.whole.experts is not None, "there are no experts"
        first, last = self.experts
        return f"rank {self.rank} has {last - first} of {self.whole.experts.routing.experts} whole"

    @property
    def experts_inner(self) -> Span:
        """This rank's span of the inner width of each of its experts."""
        assert self.whole.experts is not None, "there are no experts"
        width = self.whole.experts.intermediate_size
        return (0, width) if self.expert_parallel else self._inner("the experts' intermediate_size", width)

    @property
    def shared_inner(self) -> Span:
        """This rank's span of the shared expert's inner width."""
        assert self.whole.experts is not None, "there are no experts"
        width = self.whole.experts.shared_size
        return self._inner("the shared expert's intermediate_size", width) if width else (0, 0)

    @property
    def linear_share(self) -> Span:
        """This rank's key heads of linear attention, with the value heads that belong to these; or its groups of heads
        of Mamba-2."""
        linear = self.whole.linear
        assert linear is not None, "there is no linear attention"
        count, name = linear.shares
        if isinstance(linear, LinearAttention) and linear.tiled and self.size > 1:
            reason = f"tensor_parallel_size={self.size}: GGUF files of {self.whole.architecture} run on one rank"
            raise SettingsError(f"{reason}; use safetensors files", ["tensor_parallel_size"])
        if self.size > count:
            layers = "linear attention" if isinstance(linear, LinearAttention) else "Mamba-2"
            reason = f"tensor_parallel_size={self.size} is more than the {counted(count, name)} of {layers}"
            raise SettingsError(reason, ["tensor_parallel_size"])
        return share(count, self.rank, self.size)

    @property
    def vocabulary(self) -> Span:
        """Tokens whose embeddings and logits this rank has. All ranks have equally many, except that the last ones may
        have fewer."""
        each, count = vocabulary_rows(self.whole, self.size), self.whole.vocab_size
        return min(count, self.rank * each), min(count, (self.rank + 1) * each)

    @cached_property
    def config(self) -> ModelConfig:
        """The model as this rank's layers and cache see it, with its own heads and inner width."""
        whole = self.whole
        kinds = (
            kind if kind.heads is None else replace(kind, heads=self._held(kind.heads)) for kind in whole.layer_kinds
        )
        config = replace(
            whole,
            **self._held(whole.shape.heads)._asdict(),
            layer_kinds=tuple(kinds),
            intermediate_size=_length(self.inner) if whole.has_mlps else whole.intermediate_size,
        )
        if whole.linear is not None and self.size > 1:
            config = config.with_linear(whole.linear.part(_length(self.linear_share)))
        if whole.experts is None or self.size == 1:
            return config
        experts = replace(
            whole.experts,
            intermediate_size=_length(self.experts_inner),
            shared_size=_length(self.shared_inner),
            held=self.experts,
        )
        return replace(config, experts=experts)

    def policy(self, spec: KVSpec) -> KVSpec:
        """Returns the policy for this rank's heads, with a value for every setting; raises ValueError if it cannot be
        used."""
        whole, groups = self.whole.shape, min(self.size, self.whole.num_kv_heads)
        if self.size == 1:
            return resolve(spec, whole)
        resolve(spec, whole)
        keys = key_part(spec)
        try:
            spec = keys.in_groups(spec, groups)
        except ValueError as error:
            raise SettingsError(f"tensor_parallel_size={self.size}: {error}", ["tensor_parallel_size"]) from error
        spec = resolve(spec, whole)
        if spec.place == "host" and whole.num_kv_heads % groups:
            raise SettingsError(
                f"place='host' needs equally many kv heads on every rank, and tensor_parallel_size={self.size} "
                f"does not divide {whole.num_kv_heads} kv heads evenly: keep the values on the device",
                ["tensor_parallel_size"],
            )
        first, last = self.kv_heads(whole.heads)
        return keys.of_heads(spec, whole, last - first)

    def cut(self, parameter: str) -> Cut | None:
        """The part of a parameter that this rank holds; None if that is all of it."""
        if self.size == 1:
            return None
        if parameter.startswith(_OF_DRAFT_HEAD):
            return self._draft_head.cut(parameter.removeprefix(_OF_DRAFT_HEAD))
        if not parameter.startswith("layers."):
            return Cut((self.vocabulary,)) if parameter in ("embedding", "head") else None
        _, number, name = parameter.split(".", 2)
        layer = int(number)
        alike = name, self.whole.heads_of(layer), self._projected(layer), self.whole.widening_of(layer)
        if name == _TABLE:
            alike = f"{layer}.{name}", *alike[1:]
        if alike not in self._cuts:
            self._cuts[alike] = self._cut(name, layer)
        return self._cuts[alike]

    @cached_property
    def _draft_head(self) -> Shard:
        """This rank's part of the draft head, as a model of its own."""
        return replace(self, whole=self.whole.of_draft_head)

    @cached_property
    def _cuts(self) -> dict[tuple[str, Heads, int, int], Cut | None]:
        """Results of ``cut``, by a parameter's name within its layer and by the properties in which layers differ. The
        results are kept because experts have thousands of tensors."""
        return {}

    def _projected(self, layer: int) -> int:
        """Number of projections that compute a layer's own keys and values."""
        if self.whole.reuses_keys(layer):
            return 0
        return 1 if self.whole.has_keys_as_values(layer) else 2

    def _cut(self, name: str, layer: int) -> Cut | None:
        """Computes ``cut``. ``name`` is the parameter's name within its layer."""
        module, _, kind = name.rpartition(".")
        if name == _TABLE:
            n_grams = self.whole.n_grams_of(layer)
            assert n_grams is not None
            return Cut((share(n_grams.rows, self.rank, self.size),))
        whole, heads, wide = self.whole, self.whole.heads_of(layer), self.whole.widening_of(layer)
        q, kv, dim = heads.num_query_heads * heads.head_dim, heads.kv_dim, heads.head_dim
        queries, keys = _times(self.query_heads(heads), dim), _times(self.kv_heads(heads), dim)
        if module.startswith("linear_attention") and whole.linear is not None:
            name = name.removeprefix("linear_attention.")
            linear = whole.linear
            return (
                self._cut_linear(name, linear)
                if isinstance(linear, LinearAttention)
                else self._cut_mamba2(name, linear)
            )
        if module.startswith(("mlp.experts.", "mlp.shared.")):
            return self._cut_experts(module, kind, wide)
        if module == "attention.qkv":
            gated = 2 if whole.output_gate else 1
            of_keys = (_moved(keys, q * gated + number * kv) for number in range(self._projected(layer)))
            return Cut((_times(queries, gated), *of_keys))
        if module == "attention.indexer.query":  # one head for each kv head; all ranks have the index key
            return Cut((keys,))
        if name == "attention.sinks":
            return Cut((self.query_heads(heads),))
        if whole.normed_heads is not None and module in ("attention.query_norm", "attention.key_norm"):
            return Cut((queries if module == "attention.query_norm" else keys,))
        if module == "mlp.gate_up":
            inner = _times(self.inner, wide)
            return Cut(
                tuple(
                    _moved(inner, part * wide * whole.intermediate_size) for part in range(inputs_of(whole.activation))
                )
            )
        if module in ("attention.out", "mlp.down"):
            if kind == "bias":  # the outputs are summed, so only one rank has the bias
                return Cut(((0, whole.hidden_size),) if self.rank == 0 else ())
            return Cut(((0, whole.hidden_size),), queries if module == "attention.out" else _times(self.inner, wide))
        return None

    def _cut_linear(self, name: str, linear: LinearAttention) -> Cut | None:
        """Computes ``cut`` for linear attention."""
        groups = linear.value_heads // linear.key_heads
        heads = _times(self.linear_share, groups)
        keys, values = _times(self.linear_share, linear.key_dim), _times(heads, linear.value_dim)
        channels = keys, _moved(keys, linear.keys), _moved(values, 2 * linear.keys)
        rows = {
            "qkvz.weight": (*channels, _moved(values, linear.channels)),
            "convolution": channels,
            "beta_decay.weight": (heads, _moved(heads, linear.value_heads)),
            "log_rate": (heads,),
            "rate_bias": (heads,),
        }
        if name == "out.weight":
            return Cut(((0, self.whole.hidden_size),), values)
        return Cut(rows[name]) if name in rows else None

    def _cut_mamba2(self, name: str, sizes: StateSpace) -> Cut:
        """Computes ``cut`` for Mamba-2. ``name`` is the parameter's name within ``Mamba2``."""
        heads = _times(self.linear_share, sizes.heads // sizes.groups)
        keys, values = _times(self.linear_share, sizes.state_dim), _times(heads, sizes.head_dim)
        if name == "out.weight":
            return Cut(((0, self.whole.hidden_size),), values)
        channels = values, _moved(keys, sizes.values), _moved(keys, sizes.values + sizes.keys)
        projected = *(_moved(span, sizes.values) for span in channels), _moved(heads, sizes.values + sizes.channels)
        rows = {
            "zxbcdt.weight": (values, *projected),
            "convolution": channels,
            "convolution_bias": channels,
            "norm.weight": (values,),
            **dict.fromkeys(("log_rate", "time_bias", "skip"), (heads,)),
        }
        return Cut(rows[name])

    def _cut_experts(self, module: str, kind: str, wide: int) -> Cut:
        """Computes ``cut`` for a parameter of the shared expert or of the routed experts. In this layer the shared
        expert is ``wide`` times as wide as in other layers. The rows of the routed experts follow one another."""
        experts, hidden = self.whole.experts, self.whole.hidden_size
        assert experts is not None, "there are no experts"
        if module.startswith("mlp.shared."):
            numbers, size, inner = range(1), wide * experts.shared_size, _times(self.shared_inner, wide)
        else:
            numbers, size, inner = range(*self.experts), experts.intermediate_size, self.experts_inner
        if module.endswith(".down"):
            rows = numbers.start * hidden, numbers.stop * hidden
            if kind == "bias":  # the outputs are summed, so only one rank has the bias
                return Cut((rows,) if inner == (0, size) or self.rank == 0 else ())
            return Cut((rows,), None if inner == (0, size) else inner)
        inputs = inputs_of(self.whole.activation)
        if inner == (0, size):
            return Cut(((numbers.start * inputs * size, numbers.stop * inputs * size),))
        parts = range(inputs * numbers.start, inputs * numbers.stop)
        return Cut(tuple(_moved(inner, part * size) for part in parts))

    def pieces(self, parameter: str, start: int, stop: int, stored: Stored) -> Iterator[tuple[slice, Stored]]:
        """Yields this rank's parts of ``stored``, which is rows ``start`` to ``stop`` of the whole parameter. Each part
        comes with its rows in the rank's parameter. Quantized rows whose columns cannot be cut are dequantized."""
        cut = self.cut(parameter)
        for here, rows in self.spans(parameter, start, stop):
            part = stored[rows]
            if cut is not None and cut.columns is not None:
                if isinstance(part, QuantizedRows) and self.form(parameter, part.form, part.columns) is not None:
                    part = part.cut(*cut.columns)
                else:
                    part = dense(part)[:, slice(*cut.columns)]
            yield here, part

    def spans(self, parameter: str, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yields the row ranges that this rank holds of rows ``start`` to ``stop`` of the whole parameter. Each range
        is given twice: as rows of the rank's parameter, and relative to ``start``."""
        cut = self.cut(parameter)
        if cut is None:
            yield slice(start, stop), slice(0, stop - start)
            return
        for number in range(bisect_right(cut.rows, start, key=itemgetter(1)), len(cut.rows)):
            (first, last), here = cut.rows[number], cut.held_from[number]
            if first >= stop:
                return
            low, high = max(first, start), min(last, stop)
            yield slice(here + low - first, here + high - first), slice(low - start, high - start)

    def form(self, parameter: str, form: Form, columns: int) -> Form | None:
        """Returns the form that rows have on this rank if they have ``form`` in the whole parameter; None if this rank
        dequantizes them. ``columns`` is the whole parameter's number of columns."""
        cut = self.cut(parameter)
        if cut is not None and parameter in ("embedding", "head"):
            return None  # their last rows may be padding
        return form if cut is None or cut.columns is None else form.cut_form(columns, *cut.columns)


def vocabulary_rows(config: ModelConfig, size: int) -> int:
    """Rows of the embedding and the head on every rank; the last ones may be padding."""
    return -(-config.vocab_size // size)


def _length(span: Span) -> int:
    return span[1] - span[0]


def _times(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by

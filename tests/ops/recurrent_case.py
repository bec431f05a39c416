"""Arguments of ops with recurrent states, in rows among NaN, and the plain formulas, token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from devices import DEVICE, TRITON_RUNS
from precision import assert_close_like_lowp
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.extension import cpu_missing
from shadowkv.ops.recurrence import CHUNK, Spans, in_order

NAMES = ("triton",) if TRITON_RUNS else ("reference", *(() if cpu_missing() else ("cpu",)))
"""Backends that run here."""

DRAWS = 2
"""Of rounding."""

LENGTHS = [None, (1, 70, 3, 2), (64, 129, 5)]
"""Tokens of spans, shorter than a convolution and up to several chunks; None for a step of five sequences."""

CHAINS = [(1, 4, 1), (5, 2), (1, 1)]
"""Tokens of chains."""


class Rule(NamedTuple):
    """Arguments of ``gated_delta_rule``."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    states: Tensor
    spans: Spans


class StateSpace(NamedTuple):
    """Arguments of ``ssd``."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    states: Tensor
    spans: Spans


class Convolution(NamedTuple):
    """Arguments of ``causal_convolution``."""

    x: Tensor
    weight: Tensor
    states: Tensor
    spans: Spans
    bias: Tensor | None = None


def draw_spans(lengths: tuple[int, ...] | None) -> tuple[Spans, int, int]:
    """Spans on shuffled rows, their tokens, and the rows that there are. Every second span writes the row it reads."""
    count = 5 if lengths is None else len(lengths)
    rows = torch.randperm(3 * count).to(DEVICE)
    read, other = rows[:count], rows[count : 2 * count]
    write = torch.where(torch.arange(count, device=DEVICE) % 2 == 0, read, other)
    return Spans(lengths, read, write), count if lengths is None else sum(lengths), 3 * count


def draw_step(chains: tuple[int, ...]) -> tuple[Spans, int, int]:
    """A step of chains of these lengths on shuffled rows, then two padding rows; its tokens, and the rows
    that there are."""
    count = sum(chains) + len(chains) + 1
    rows = torch.randperm(count + 3)
    read, write, at = [], [], 1
    for length in chains:
        read += rows[at : at + length].tolist()
        write += rows[at + 1 : at + 1 + length].tolist()
        at += length + 1
    padding = [int(rows[0])] * 2
    return Spans(None, *torch.tensor([read + padding, write + padding]).to(DEVICE), True), len(read) + 2, len(rows)


def one_by_one(compute: Callable[..., Tensor], case: Any) -> Tensor:
    """What steps of one token each return, in the order of the case's spans."""
    names = [name for name in case._fields if name not in ("states", "spans", "weight", "bias", "a", "d")]

    def one(*own: Any) -> Tensor:
        return compute(**case._replace(**dict(zip([*names, "spans"], own, strict=True)))._asdict())

    return in_order(one, case.spans, *(getattr(case, name) for name in names))


def draw_states(spans: Spans, rows: int, *shape: int) -> Tensor:
    """States of which those that are not read are NaN: one layer's among others'."""
    states = torch.full((2, rows, *shape), torch.nan, device=DEVICE)[1]
    states[spans.read] = torch.randn(len(spans.read), *shape, device=DEVICE)
    return states


def draw_rule(
    lengths: tuple[int, ...] | None,
    key_heads: int,
    group: int,
    key_dim: int,
    dim: int,
    dtype: torch.dtype,
    chains: tuple[int, ...] = (),
) -> Rule:
    """Queries, keys and values lie in one tensor, as the convolution leaves them."""
    spans, tokens, rows = draw_step(chains) if chains else draw_spans(lengths)
    heads, sizes = key_heads * group, (key_heads * key_dim, key_heads * key_dim, key_heads * group * dim)
    q, k, v = torch.randn(tokens, sum(sizes), device=DEVICE).to(dtype).split(sizes, dim=-1)
    q, k, v = q.unflatten(1, (key_heads, -1)), k.unflatten(1, (key_heads, -1)), v.unflatten(1, (heads, -1))
    log_decay, beta = -3 * torch.rand(2, tokens, heads, device=DEVICE) ** 8
    return Rule(q, k, v, log_decay, 1 + beta / 3, draw_states(spans, rows, heads, key_dim, dim), spans)


def draw_state_space(
    lengths: tuple[int, ...] | None,
    groups: int,
    group: int,
    state_dim: int,
    dim: int,
    dtype: torch.dtype,
    chains: tuple[int, ...] = (),
) -> StateSpace:
    """x, b and c lie in one tensor, as the convolution leaves them. Heads forget a few tokens or hundreds."""
    spans, tokens, rows = draw_step(chains) if chains else draw_spans(lengths)
    heads, sizes = groups * group, (groups * group * dim, groups * state_dim, groups * state_dim)
    x, b, c = torch.randn(tokens, sum(sizes), device=DEVICE).to(dtype).split(sizes, dim=-1)
    x, b, c = x.unflatten(1, (heads, -1)), b.unflatten(1, (groups, -1)), c.unflatten(1, (groups, -1))
    dt, a = 3 * torch.rand(tokens, heads, device=DEVICE) ** 4, -(torch.rand(heads, device=DEVICE) ** 3)
    d = torch.randn(heads, device=DEVICE)
    return StateSpace(x, dt, a, b, c, d, draw_states(spans, rows, heads, state_dim, dim), spans)


def draw_convolution(
    lengths: tuple[int, ...] | None,
    channels: int,
    width: int,
    dtype: torch.dtype,
    chains: tuple[int, ...] = (),
    bias: bool = False,
) -> Convolution:
    """Inputs lie among others, as a projection leaves them. States are inputs, too."""
    spans, tokens, rows = draw_step(chains) if chains else draw_spans(lengths)
    x = torch.randn(tokens, channels + 8, device=DEVICE).to(dtype)[:, :channels]
    weight = torch.randn(channels, width, device=DEVICE).to(dtype)
    states = draw_states(spans, rows, channels, width - 1).to(dtype).float()
    return Convolution(x, weight, states, spans, torch.randn(channels, device=DEVICE).to(dtype) if bias else None)


def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel is given to write to holds NaN."""

    def full(like: Tensor, size: int | Sequence[int], **options: Any) -> Tensor:
        options = {"dtype": like.dtype, "device": like.device, **options}
        shape, poison = (size,) if isinstance(size, int) else size, options["dtype"].is_floating_point
        return torch.full(shape, torch.nan if poison else 0, **options)

    monkeypatch.setattr(Tensor, "new_empty", full)


def token_slices(spans: Spans) -> list[slice]:
    """The tokens of each span."""
    ends = torch.tensor(spans.lengths or (1,) * len(spans.read)).cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


def rounded(x: Tensor, size: Tensor, step: float = torch.finfo(torch.float32).eps) -> Tensor:
    """``x`` in float32, off by up to ``step * size`` at random."""
    return x.float() + step * size * (2 * torch.rand(x.shape, device=x.device) - 1)


def draws_of_rule(case: Rule, step: float = torch.finfo(torch.float32).eps) -> list[tuple[Tensor, ...]]:
    """The formula in float32 of numbers that are rounded once more, at random, as another order of sums rounds. Of log
    decays, chunks subtract sums of up to CHUNK tokens', which are rounded as the larger numbers that they are.

    Args:
        step: of what queries, keys, values and states are rounded to.
    """
    sums = case.log_decay.abs() if case.spans.lengths is None else CHUNK * case.log_decay.abs().mean(0)

    def draw() -> Rule:
        q, k, v, states = (rounded(x, x.float().abs(), step) for x in (case.q, case.k, case.v, case.states))
        return Rule(q, k, v, rounded(case.log_decay, sums), rounded(case.beta, case.beta), states, case.spans)

    return [plain_rule(draw(), torch.float32) for _ in range(DRAWS)]


def plain_rule(case: Rule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Results [T, H, dv] and the states after the spans, computed in ``dtype``."""
    group = case.v.shape[1] // case.q.shape[1]
    q, k = (x.to(dtype).repeat_interleave(group, dim=1) for x in case[:2])
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, v, beta = q / q.shape[-1] ** 0.5, case.v.to(dtype), case.beta.to(dtype).unsqueeze(-1)
    decay = case.log_decay.to(dtype).exp()[..., None, None]
    outs, states = [], case.states.to(dtype)
    states = states.clone()
    for tokens, read, write in zip(token_slices(case.spans), case.spans.read.tolist(), case.spans.write.tolist()):
        state = states[read]
        for t in range(tokens.start, tokens.stop):
            state = state * decay[t]
            change = beta[t] * (v[t] - (k[t].unsqueeze(1) @ state).squeeze(1))
            state = state + k[t].unsqueeze(2) * change.unsqueeze(1)
            outs.append((q[t].unsqueeze(1) @ state).squeeze(1))
        states[write] = state
    return torch.stack(outs), states


def plain_convolution(case: Convolution, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Results [T, C] and the states after the spans, computed in ``dtype``."""
    x, weight, states = (one.to(dtype) for one in case[:3])
    bias = torch.zeros((), dtype=dtype) if case.bias is None else case.bias.to(dtype)
    outs, states = [], states.clone()
    for tokens, read, write in zip(token_slices(case.spans), case.spans.read.tolist(), case.spans.write.tolist()):
        inputs = torch.cat((states[read], x[tokens].T), dim=1)
        outs.append((inputs.unfold(1, weight.shape[1], 1) * weight.unsqueeze(1)).sum(-1).T)
        states[write] = inputs[:, x[tokens].shape[0] :]
    return F.silu(torch.cat(outs) + bias.to(x.device)), states


def draws_of_state_space(case: StateSpace, step: float = torch.finfo(torch.float32).eps) -> list[tuple[Tensor, ...]]:
    """As ``draws_of_rule``. Log decays, dt a, are rounded by way of numbers dt of their own."""
    sums = case.dt if case.spans.lengths is None else CHUNK * case.dt.mean(0)

    def draw() -> StateSpace:
        x, b, c, states = (rounded(one, one.float().abs(), step) for one in (case.x, case.b, case.c, case.states))
        return case._replace(x=x, b=b, c=c, states=states)

    return [plain_ssd(draw(), torch.float32, rounded(case.dt, sums)) for _ in range(DRAWS)]


def plain_ssd(case: StateSpace, dtype: torch.dtype, decaying: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Results [T, H, P] and the states after the spans, computed in ``dtype``.

    Args:
        decaying: what decays are computed of instead of ``case.dt``.
    """
    group = case.x.shape[1] // case.b.shape[1]
    x, dt, a, d = (one.to(dtype) for one in (case.x, case.dt, case.a, case.d))
    b, c = (one.to(dtype).repeat_interleave(group, dim=1) for one in (case.b, case.c))
    decay = ((dt if decaying is None else decaying.to(dtype)) * a).exp()[..., None, None]
    outs, states = [], case.states.to(dtype)
    states = states.clone()
    for tokens, read, write in zip(token_slices(case.spans), case.spans.read.tolist(), case.spans.write.tolist()):
        state = states[read]
        for t in range(tokens.start, tokens.stop):
            state = state * decay[t] + b[t].unsqueeze(2) * (dt[t].unsqueeze(1) * x[t]).unsqueeze(1)
            outs.append((c[t].unsqueeze(1) @ state).squeeze(1) + d.unsqueeze(1) * x[t])
        states[write] = state
    return torch.stack(outs), states


class Op(NamedTuple):
    """An op with a matrix for each head as its state, and what it is tested with.

    Attributes:
        name: of the op.
        values: the name of the argument that has the dtype and the shape of the results.
        draw: draws arguments: ``draw_rule`` or ``draw_state_space``.
        plain: the formula, token by token, in a dtype.
        draws: the formula in float32 of numbers that are rounded at random.
    """

    name: str
    values: str
    draw: Callable[..., Any]
    plain: Callable[..., tuple[Tensor, Tensor]]
    draws: Callable[..., list[tuple[Tensor, ...]]]

    def check(self, backend: Any, case: Any, precision: torch.dtype = torch.float32) -> None:
        """Results and states lose at most twice what the formula loses of arguments that are rounded in ``precision``;
        other rows are as before. States in bfloat16 are rounded once, after a span.

        Args:
            precision: what the backend rounds arguments, and states within a span, to.
        """
        exact, draws = self.plain(case, torch.float64), self.draws(case, torch.finfo(precision).eps)
        before, written, values = case.states.clone(), case.spans.write, getattr(case, self.values)
        out = getattr(backend, self.name)(*case)
        assert (out.dtype, out.shape) == (values.dtype, values.shape)
        assert_close_like_lowp(out, exact[0], *(low.to(out.dtype) for low, _ in draws))
        held = before.dtype if precision == torch.float32 else precision
        lows = (low[written].to(held) for _, low in draws)
        assert_close_like_lowp(case.states[written], exact[1][written], *lows)
        before[written] = case.states[written]
        torch.testing.assert_close(case.states, before, atol=0, rtol=0, equal_nan=True)

    def check_beside(self, case: Any, theirs: Tensor, their_states: Tensor) -> None:
        """Results and states of every backend that runs here lose at most twice what another implementation's
        ``theirs`` and ``their_states`` lose."""
        written, draws = case.spans.write, self.draws(case)
        exact, exact_states = self.plain(case, torch.float64)
        for name in NAMES:
            states = case.states.clone()
            op = getattr(import_module(f"shadowkv.ops.linear_attention.{name}"), self.name)
            found = (op(*case._replace(states=states)), theirs, exact, *(low for low, _ in draws))
            after = (states[written], their_states, exact_states[written], *(low[written] for _, low in draws))
            for mine, other, oracle, *low in (found, after):
                assert_close_like_lowp(mine, oracle, *low)
                mine_lost, other_lost = ((one.double() - oracle).abs().max() for one in (mine, other))
                assert mine_lost <= 2 * other_lost, f"{name} is off by {mine_lost:.3g}, the other by {other_lost:.3g}"


RULE = Op("gated_delta_rule", "v", draw_rule, plain_rule, draws_of_rule)
SSD = Op("ssd", "x", draw_state_space, plain_ssd, draws_of_state_space)


def install(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], module: str) -> None:
    """Makes ``function`` what fla-core's ``module`` has by this name."""
    for name in ("fla", "fla.ops", module):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    setattr(sys.modules[module], function.__name__, function)

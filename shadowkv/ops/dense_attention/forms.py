"""Dense attention as one op: what it is called with, and which function of which backend serves a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from shadowkv.ops.add_sinks.reference import add_sinks


class Packed(NamedTuple):
    """Where S packed sequences begin in n queries and m keys. Each of them sees itself alone.

    Attributes:
        cu_seqlens: int32 [S + 1], the start of each sequence's queries, from 0 to n.
        lengths: queries of each sequence, for the host, which then need not wait for ``cu_seqlens``. None where only
            the device knows them, as in a graph.
        cu_seqlens_k: int32 [S + 1], the start of each sequence's keys, from 0 to m or less: its queries are its last
            positions. None where sequences have a query for every key.
    """

    cu_seqlens: Tensor
    lengths: Sequence[int] | None = None
    cu_seqlens_k: Tensor | None = None


@dataclass(frozen=True)
class DenseAttention:
    """The op. A call has one of four forms, and each form has the backend that was chosen for it: few backends serve
    all of them. A backend's functions have these names.

    Attributes:
        causal: one sequence.
        partial: one sequence, with the log-sum-exp by which the result is merged with that of other keys.
        packed: packed sequences.
        windowed: one sequence or packed ones, within a window, with sinks or without.
    """

    causal: Callable[[Tensor, Tensor, Tensor], Tensor]
    partial: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    packed: Callable[[Tensor, Tensor, Tensor, Packed], Tensor]
    windowed: Callable[[Tensor, Tensor, Tensor, int, Tensor | None, Packed | None], Tensor]

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pack: Packed | None = None,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, return_lse: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pack: Packed | None = None,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
        causal: bool = True,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention [n, H_q, d] of q [n, H_q, d], the last n of m positions, over k, v [m, H, d], each position up to
        its own. n and m are at least 1, or 0 for packed sequences; the last dimension of every tensor is dense.

        Args:
            pack: where packed sequences begin; None for one sequence.
            window: each position sees as many of the newest, its own included; None for all.
            sinks: float32 [H_q], scores of one more position in every softmax, whose value is 0.
            causal: False lets every query see all m positions.
            return_lse: whether to return the log-sum-exp too, float32 [n, H_q].

        Raises:
            TypeError: a log-sum-exp of packed sequences, a window or sinks, or attention that is not causal and
                has no log-sum-exp: there are no kernels for these.
        """
        if return_lse or not causal:
            if not return_lse or pack is not None or window is not None or sinks is not None:
                raise TypeError("return_lse=True goes with causal alone, and causal=False with return_lse=True")
            return self.partial(q, k, v, causal)
        if window is not None or sinks is not None:
            return self.windowed(q, k, v, len(k) if window is None else window, sinks, pack)
        return self.causal(q, k, v) if pack is None else self.packed(q, k, v, pack)


def of_each(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, pack: Packed
) -> Tensor:
    """What ``attend`` makes of each packed sequence, one after the other: [n, H_q, d] of q [n, H_q, d] and k, v
    [m, H, d]. Waits for ``cu_seqlens`` where lengths are not known, and for ``cu_seqlens_k``."""
    lengths = pack.cu_seqlens.diff().tolist() if pack.lengths is None else list(pack.lengths)
    keys = lengths if pack.cu_seqlens_k is None else pack.cu_seqlens_k.diff().tolist()
    k, v = k[: sum(keys)], v[: sum(keys)]
    parts = zip(q.split(lengths), k.split(keys), v.split(keys), strict=True)
    attended = [attend(*each) for each in parts if len(each[0])]
    return torch.cat(attended) if attended else torch.empty_like(q)


def windowed_by(
    attend: Callable[[Tensor, Tensor, Tensor, bool, int], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: Tensor | None,
    pack: Packed | None,
) -> Tensor:
    """As ``DenseAttention.__call__`` within a window, by a library's attention of one sequence, which returns its
    log-sum-exp: sinks are a factor on its result. [n, H_q, d] of q [n, H_q, d]."""

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attend(q, k, v, True, window)
        return out if sinks is None else add_sinks(out, lse, sinks)[0]

    return one(q, k, v) if pack is None else of_each(one, q, k, v, pack)

"""Defines ``DenseAttention``, which calls one of the op's four forms, and ``Packed``, which describes packed
sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from shadowkv.ops.partial_attention.reference import add_sinks


class Packed(NamedTuple):
    """Where each of S packed sequences starts in n queries and m keys. A sequence sees only its own keys.

    Attributes:
        cu_seqlens: int32 [S + 1], the start of each sequence's queries, from 0 to n.
        lengths: number of queries of each sequence, so that the host need not wait for ``cu_seqlens``. None if only the
            device knows the numbers, as in a CUDA graph.
        cu_seqlens_k: int32 [S + 1], the start of each sequence's keys, from 0 to at most m. The queries are at the last
            positions of their sequence. None if sequences have as many keys as queries.
    """

    cu_seqlens: Tensor
    lengths: Sequence[int] | None = None
    cu_seqlens_k: Tensor | None = None


@dataclass(frozen=True)
class DenseAttention:
    """The op. Each of its four forms has its own backend, because few backends serve all forms. A backend has a
    function with the name of each form that it serves.

    Attributes:
        causal: one sequence.
        partial: one sequence, with the log-sum-exp for merging the result with attention to other keys.
        packed: packed sequences.
        windowed: one sequence or packed sequences, with a window, sinks or both.
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
        """Computes causal attention [n, H_q, d] of q [n, H_q, d] over k, v [m, H, d]. The queries are the last n of m
        positions. H_q query heads share H kv heads; d is the head dim.

        n and m are at least 1; for packed sequences, they can be 0. The last dimension of every tensor is contiguous.

        Args:
            pack: the starts of packed sequences; None for one sequence.
            window: number of positions that each position sees: its own and those just before it. None for all.
            sinks: float32 [H_q], the score of an additional position in every softmax. The position's value is 0.
            causal: False lets every query see all m positions.
            return_lse: whether to return the log-sum-exp too, float32 [n, H_q].

        Raises:
            TypeError: ``return_lse`` with ``pack``, ``window`` or ``sinks``, or ``causal=False`` without
                ``return_lse``: no form serves these.
        """
        if return_lse or not causal:
            if not return_lse or pack is not None or window is not None or sinks is not None:
                raise TypeError("return_lse=True is only for calls with causal alone, and causal=False needs it")
            return self.partial(q, k, v, causal)
        if window is not None or sinks is not None:
            return self.windowed(q, k, v, len(k) if window is None else window, sinks, pack)
        return self.causal(q, k, v) if pack is None else self.packed(q, k, v, pack)


def of_each(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, pack: Packed
) -> Tensor:
    """Calls ``attend`` for each packed sequence of q [n, H_q, d] and k, v [m, H, d]. Returns the results [n, H_q, d].
    The host waits for ``cu_seqlens_k``, and for ``cu_seqlens`` if ``pack.lengths`` is None."""
    lengths = pack.cu_seqlens.diff().tolist() if pack.lengths is None else list(pack.lengths)
    keys = lengths if pack.cu_seqlens_k is None else pack.cu_seqlens_k.diff().tolist()
    k, v = k[: sum(keys)], v[: sum(keys)]
    parts = zip(q.split(lengths), k.split(keys), v.split(keys), strict=True)
    attended = [attend(*each) for each in parts if len(each[0])]
    return torch.cat(attended) if attended else torch.empty_like(q)


def from_one_sequence(
    attend: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Makes the forms ``causal``, ``partial`` and ``windowed`` from a library's attention of one sequence.

    Args:
        attend: computes attention of q [n, H_q, d] over k, v [m, H, d], given whether it is causal, and the window or
            None. Returns the result [n, H_q, d] and its log-sum-exp, float32 [n, H_q], which is needed to add sinks.
            For packed sequences, it is called once per sequence.
    """

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, True)[0]

    def partial(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, causal)

    def windowed(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None, pack: Packed | None) -> Tensor:
        def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = attend(q, k, v, True, window)
            return out if sinks is None else add_sinks(out, lse, sinks)[0]

        return one(q, k, v) if pack is None else of_each(one, q, k, v, pack)

    return causal, partial, windowed

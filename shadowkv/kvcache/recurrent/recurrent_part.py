"""``RecurrentPart``: the tokens of a batch in the form that layers with a recurrent state need. ``KVCache`` makes the
parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.streams import Numbers
from shadowkv.kvcache.recurrent.states import Checkpoint, RecurrentSequence
from shadowkv.ops.recurrence import Spans


class Round(NamedTuple):
    """Spans (consecutive tokens of one sequence, ``ops/recurrence.py``) that one call of an op computes. This is not
    the glossary's round of prefill.

    Attributes:
        rows: int64 [n], the rows of the spans' tokens in the part. None if the spans contain all tokens of the part.
        spans: the spans, at most one of each sequence.
    """

    rows: Tensor | None
    spans: Spans


@dataclass(frozen=True)
class RecurrentPart:
    """The new tokens of a decode step, or of prompts: a ``batch.Part``.

    Attributes:
        num_tokens: T.
        rounds: the rounds, in order. Each token is in one round. A round reads states that earlier rounds have written.
        waits: a function for each restored sequence whose layers are still arriving. The function waits until a layer,
            given by its number in the model, has arrived.
    """

    num_tokens: int
    rounds: tuple[Round, ...]
    waits: tuple[Callable[[int], None], ...] = ()

    def split(self, count: int) -> list[RecurrentPart]:
        """Splits the rows of a decode step into ``count`` micro-batches. ``count`` is at most the number of rows."""
        ((_, spans),) = self.rounds
        bounds = [part * self.num_tokens // count for part in range(count + 1)]
        return [step(spans.read[start:stop], spans.write[start:stop]) for start, stop in pairwise(bounds)]


def over_rounds(parts: Sequence[RecurrentPart], compute: Callable[..., Tensor], *tokens: Tensor) -> Tensor:
    """Computes what a layer with a recurrent state does with a batch's tokens. The rounds of a part are computed one
    after another, because a round reads states that earlier rounds have written.

    Args:
        parts: the parts of the batch, in order.
        compute: gets the rows of each tensor in ``tokens`` for a round's tokens, and the round's spans. It returns the
            results of these tokens [n, ...].
        tokens: tensors [T, ...], with a row for each of the batch's tokens.

    Returns:
        The results of all tokens [T, ...].
    """
    outs, start = [], 0
    for part in parts:
        own = [x[start : start + part.num_tokens] for x in tokens]
        start += part.num_tokens
        out = None
        for rows, spans in part.rounds:
            result = compute(*(x if rows is None else x[rows] for x in own), spans)
            if rows is None:  # the only round
                out = result
                break
            out = result.new_empty(part.num_tokens, *result.shape[1:]) if out is None else out
            out[rows] = result
        assert out is not None, "a part has a round"
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def step(read: Tensor, write: Tensor, drafted: bool = False) -> RecurrentPart:
    """Makes the part of a decode step of B tokens. ``read`` and ``write``, int64 [B], are the rows of the states before
    and after each token. ``drafted`` is whether a sequence can have several tokens, one after the other."""
    return RecurrentPart(len(read), (Round(None, Spans(None, read, write, drafted)),))


class RecurrentTokens(NamedTuple):
    """The new tokens of a prompt, for layers with a recurrent state: rows ``start`` to ``stop`` of a packed batch.

    Attributes:
        cached: number of the sequence's tokens before the new ones.
        checkpoints: checkpoints to write at positions among the new tokens.
        wait: waits until a layer, given by its number in the model, has arrived; None if all layers have.
    """

    sequence: RecurrentSequence
    start: int
    stop: int
    cached: int
    checkpoints: list[Checkpoint]
    wait: Callable[[int], None] | None = None


def block(prompts: Sequence[RecurrentTokens], start: int, stop: int, device: torch.device) -> RecurrentPart:
    """Makes the part of rows ``start`` to ``stop`` of packed prompts. A span ends where a checkpoint is to be written,
    and the sequence's next span is in the next round."""
    rounds: list[list[tuple[range, int, int]]] = []
    for new in prompts:
        first, last = max(start, new.start), min(stop, new.stop)
        if first >= last:
            continue
        to_position = new.cached - new.start
        kept = {one.position: one.row for one in new.checkpoints if one.row is not None}
        inner = (at - to_position for at in kept if first < at - to_position < last)
        for number, (begin, end) in enumerate(pairwise((first, *inner, last))):
            read, write = (
                kept[at] if at in kept else new.sequence.row(at) for at in (begin + to_position, end + to_position)
            )
            if number == len(rounds):
                rounds.append([])
            rounds[number].append((range(begin - start, end - start), read, write))
    waits = (new.wait for new in prompts if new.start < stop and start < new.stop)
    return RecurrentPart(
        stop - start,
        tuple(_round(spans, stop - start, device) for spans in rounds),
        tuple(wait for wait in waits if wait is not None),
    )


def _round(spans: list[tuple[range, int, int]], num_tokens: int, device: torch.device) -> Round:
    lengths = tuple(len(rows) for rows, _, _ in spans)
    numbers = Numbers()
    states = numbers.add([[read for _, read, _ in spans], [write for _, _, write in spans]])
    whole = sum(lengths) == num_tokens
    tokens = numbers.add(() if whole else np.concatenate([np.arange(rows.start, rows.stop) for rows, _, _ in spans]))
    on_device = numbers.on(device)
    read, write = on_device[states].view(2, -1)
    return Round(None if whole else on_device[tokens], Spans(lengths, read, write))

"""Sequences of one policy that answer together: every step decodes all that have not ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.running.caches import figures, open_cache, prefill
from shadowkv.kvcache.sequence import CachedSequence
from shadowkv.kvcache.spec import KVSpec
from shadowkv.models.loader import LoadedModel


class Answering:
    """A cache for ``slots`` sequences of ``capacity`` tokens, and the sequences in it.

    Decode steps are CUDA graphs where the engine's would be.
    """

    def __init__(self, loaded: LoadedModel, spec: KVSpec, capacity: int, slots: int) -> None:
        self.cache = open_cache(loaded, spec, capacity, slots)
        graphs = self.cache.device.type == "cuda" and not self.cache.ops.synchronising
        self.runner = Runner(loaded.model, self.cache, slots if graphs else None)
        self.sequences: list[CachedSequence] = []

    def answers(
        self, first: list[int], turns: Sequence[Sequence[list[int]]], limit: int, ends: Collection[int]
    ) -> list[list[list[int]]]:
        """Greedy answers of every sequence, by turn.

        Args:
            first: per sequence the token after its prompt, which is in the cache already.
            turns: per sequence the tokens of every later turn, equally many for all: they extend it with its answers.
            limit: most tokens of an answer.
            ends: tokens that end an answer; they are not part of it.
        """
        answers = [[answer] for answer in self._decode(first, limit, ends)]
        for turn in zip(*turns, strict=True):
            work = []
            for sequence, tokens, answer in zip(self.sequences, turn, answers, strict=True):
                # The token that reached the limit was chosen, but is not in the cache yet. End tokens never get there.
                new = [*(answer[-1][-1:] if len(answer[-1]) == limit else []), *tokens]
                length = sequence.length
                self.cache.extend(sequence, length + len(new), sequence.capacity)
                work.append((sequence, new))
            tokens = prefill(self.runner.model, self.cache, work).argmax(-1).tolist()
            for answer, found in zip(answers, self._decode(tokens, limit, ends), strict=True):
                answer.append(found)
        return answers

    def figures(self) -> list[dict[str, float | int]]:
        """``caches.figures`` for every sequence."""
        return [figures(self.cache, sequence) for sequence in self.sequences]

    def clear(self) -> None:
        """Forgets the sequences and frees their memory."""
        while self.sequences:
            self.cache.release(self.sequences.pop())

    def _decode(self, tokens: list[int], limit: int, ends: Collection[int]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in tokens]
        rows = list(range(len(tokens)))
        while True:
            going = []
            for row, token in zip(rows, tokens, strict=True):
                if token not in ends:
                    answers[row].append(token)
                    if len(answers[row]) < limit:
                        going.append(row)
            if not going:
                return answers
            rows, newest = going, [answers[row][-1] for row in going]
            # One wait per step, for all rows; the next step may overwrite the logits.
            tokens = self.runner.decode([self.sequences[row] for row in rows], newest).argmax(-1).tolist()

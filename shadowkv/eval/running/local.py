"""Answers samples with several policies. Policies with the same prefill attention share one prefill of each prompt.

Samples of a task and length are batched. The prompt of each sample is prefilled into the caches of all policies. Then
every policy decodes the whole batch together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.metrics.scoring import score
from shadowkv.eval.records.policies import Policy
from shadowkv.eval.records.predictions import Prediction, Sample
from shadowkv.eval.running.caches import figures, open_cache, prefill, prefill_all, sequences_that_fit
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.loader import LoadedModel
from shadowkv.wording import counted


class Answering:
    """A policy's cache for ``slots`` sequences of ``capacity`` tokens, and the decoding of their answers. Every step
    decodes all sequences whose answers are unfinished.

    On a GPU, decode steps are CUDA graphs, unless an op must synchronise with the host.
    """

    def __init__(self, loaded: LoadedModel, spec: KVSpec, capacity: int, slots: int) -> None:
        self.cache = open_cache(loaded, spec, capacity, slots)
        graphs = self.cache.device.type == "cuda" and not self.cache.ops.synchronising
        self.runner = Runner(loaded.model, self.cache, slots if graphs else None)
        self.sequences: list[CachedSequence] = []

    def answers(
        self, first: list[int], turns: Sequence[Sequence[list[int]]], limit: int, ends: Collection[int]
    ) -> list[list[list[int]]]:
        """Returns the tokens of every sequence's answers, one answer per turn, decoded greedily.

        Args:
            first: per sequence, the first token of its first answer. The first prompt is already in the cache.
            turns: per sequence, the tokens of every later turn. All sequences have the same number of turns.
            limit: maximum tokens of an answer.
            ends: tokens that end an answer and are not part of it.
        """
        answers = [[answer] for answer in self._decode(first, limit, ends)]
        for turn in zip(*turns, strict=True):
            work = []
            for sequence, tokens, answer in zip(self.sequences, turn, answers, strict=True):
                # If an answer reached the limit, its last token is not in the cache yet. End tokens are never put into
                # the cache.
                new = [*(answer[-1][-1:] if len(answer[-1]) == limit else []), *tokens]
                length = sequence.length
                self.cache.extend(sequence, length + len(new), sequence.capacity)
                work.append((sequence, new))
            tokens = prefill(self.runner.model, self.cache, work).argmax(-1).tolist()
            for answer, next_answer in zip(answers, self._decode(tokens, limit, ends), strict=True):
                answer.append(next_answer)
        return answers

    def figures(self) -> list[dict[str, float | int]]:
        """``caches.figures`` for every sequence."""
        return [figures(self.cache, sequence) for sequence in self.sequences]

    def clear(self) -> None:
        """Releases the sequences and their memory."""
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
            # ``tolist`` waits for the device once per step, before the next step may overwrite the logits.
            tokens = self.runner.decode([self.sequences[row] for row in rows], newest).argmax(-1).tolist()


@dataclass(frozen=True)
class Prompts:
    """A sample's turns as tokens. ``need`` is the total number of tokens of the turns and of the longest possible
    answers."""

    sample: Sample
    turns: list[list[int]]
    need: int


class Forks:
    """A model with a cache for each policy. The caches are reused from batch to batch.

    Args:
        loaded: the model.
        batch: number of samples to answer together. None means as many as fit in memory, and 1 on a CPU.
    """

    def __init__(self, loaded: LoadedModel, batch: int | None = None) -> None:
        self.loaded, self.batch = loaded, batch
        self.ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
        self._caches: dict[str, Answering] = {}
        self._capacity = self._slots = 0

    def answers(self, work: Sequence[tuple[Sample, list[Policy]]]) -> Iterator[Prediction]:
        """Yields predictions batch by batch, policy by policy. Raises ValueError if a sample is longer than the model
        allows."""
        groups = [list(group) for _, group in groupby(work, lambda asked: _kind(*asked))]
        largest_group = max(map(len, groups), default=0)
        for group in groups:
            samples, policies = [sample for sample, _ in group], group[0][1]
            while samples:
                self._open(policies, samples[0].length, largest_group)
                with ThreadPoolExecutor() as threads:  # the tokenizer releases the interpreter's lock
                    prompts = list(threads.map(self._encode, samples[: self._slots]))
                self._open(policies, max(prompt.need for prompt in prompts), largest_group)
                yield from self._answer(prompts[: self._slots], policies)
                samples = samples[self._slots :]

    def _encode(self, sample: Sample) -> Prompts:
        encode = self.loaded.tokenizer.encode
        turns = [encode(turn, add_special_tokens=number == 0) for number, turn in enumerate(sample.turns)]
        need = sum(map(len, turns)) + len(turns) * sample.max_new_tokens
        if need > self.loaded.config.max_position:
            raise ValueError(
                f"sample {sample.id} of {sample.task} needs {counted(need, 'token')}, more than the "
                f"{self.loaded.config.max_position} that {self.loaded.name} takes"
            )
        return Prompts(sample, turns, need)

    def _open(self, policies: list[Policy], capacity: int, largest_group: int) -> None:
        """Opens caches of all ``policies`` for sequences of ``capacity`` tokens, unless the open ones suffice. A cache
        has ``largest_group`` slots, or fewer if ``batch`` or the memory does not allow as many."""
        if capacity <= self._capacity and all(policy.label in self._caches for policy in policies):
            return
        self._caches.clear()
        gc.collect()  # frees the caches, which form cycles with their graphs
        specs = [policy.spec for policy in policies if policy.spec is not None]
        fit = self.batch or sequences_that_fit(self.loaded, specs, capacity)
        batches = -(-largest_group // fit)
        self._capacity, self._slots = capacity, -(-largest_group // batches)  # batches of about the same size
        for policy, spec in zip(policies, specs, strict=True):
            self._caches[policy.label] = Answering(self.loaded, spec, capacity, self._slots)

    def _answer(self, prompts: list[Prompts], policies: list[Policy]) -> Iterator[Prediction]:
        caches = [self._caches[policy.label] for policy in policies]
        first: list[list[int]] = []  # first tokens of the answers, by prompt and policy
        prefill_seconds = []
        for prompt in prompts:
            start = time.perf_counter()
            first.append(self._prefill(caches, prompt))
            prefill_seconds.append(time.perf_counter() - start)
        limit, turns = prompts[0].sample.max_new_tokens, [prompt.turns[1:] for prompt in prompts]
        for policy, cache, tokens in zip(policies, caches, zip(*first, strict=True), strict=True):
            start = time.perf_counter()
            answers = cache.answers(list(tokens), turns, limit, self.ends)
            seconds = (time.perf_counter() - start) / len(prompts)
            for row, (prompt, of_sequence) in enumerate(zip(prompts, cache.figures(), strict=True)):
                texts = [self.loaded.tokenizer.decode(answer) for answer in answers[row]]
                yield Prediction(
                    task=prompt.sample.task,
                    id=prompt.sample.id,
                    length=prompt.sample.length,
                    policy=policy.label,
                    kv=policy.kv,
                    budget=policy.budget(prompt.sample.length),
                    predictions=texts,
                    score=score(prompt.sample, texts),
                    seconds=round(seconds, 4),
                    prefill_seconds=round(prefill_seconds[row], 4),
                    attended_tokens=int(of_sequence["attended_tokens"]),
                    least_kept_energy=of_sequence.get("least_kept_energy"),
                    output_tokens=sum(map(len, answers[row])),
                )
            cache.clear()

    def _prefill(self, caches: list[Answering], prompt: Prompts) -> list[int]:
        """Prefills the prompt into every cache. Returns, for each cache, the first token of the answer."""
        stores = [answering.cache for answering in caches]
        sequences, logits = prefill_all(self.loaded.model, stores, prompt.turns[0], prompt.need)
        for cache, sequence in zip(caches, sequences, strict=True):
            cache.sequences.append(sequence)
        return [int(token) for token in logits.argmax(-1).tolist()]  # waits for the device


def _kind(sample: Sample, policies: list[Policy]) -> tuple[object, ...]:
    """Returns a key for batching: samples with the same key can be answered together."""
    labels = tuple(policy.label for policy in policies)
    return sample.task, sample.length, len(sample.turns), sample.max_new_tokens, labels

"""Answers of several policies to the same samples, from one prefill: attention in a prefill is exact under each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from shadowkv.eval.files import Prediction
from shadowkv.eval.metrics import score
from shadowkv.eval.policies import Policy
from shadowkv.eval.sample import Sample
from shadowkv.eval.session import Session
from shadowkv.models.loader import LoadedModel

CAPACITY_STEP = 1024
"""Caches are made for a multiple of so many tokens, so that samples of nearly the same length share them."""


class Forks:
    """A model, and a cache for each policy, kept from sample to sample."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
        self._sessions: dict[str, Session] = {}

    def answers(self, work: Sequence[tuple[Sample, list[Policy]]]) -> Iterator[Prediction]:
        """Predictions of each sample's policies, in that order; raises ValueError for a sample that is too long."""
        for sample, policies in work:
            yield from self._answer(sample, policies)

    def _answer(self, sample: Sample, policies: list[Policy]) -> Iterator[Prediction]:
        encode = self.loaded.tokenizer.encode
        turns = [encode(turn, add_special_tokens=number == 0) for number, turn in enumerate(sample.turns)]
        need = sum(map(len, turns)) + len(turns) * sample.max_new_tokens
        if need > self.loaded.config.max_position:
            raise ValueError(
                f"sample {sample.id} of {sample.task} needs {need} tokens, more than the "
                f"{self.loaded.config.max_position} that {self.loaded.name} takes"
            )
        sessions = self._open(policies, need)
        start = time.perf_counter()
        logits = sessions[0].feed(turns[0], sessions[1:])
        first = int(logits.argmax())  # waits for the device
        prefill_seconds = time.perf_counter() - start
        for policy, session in zip(policies, sessions):
            start = time.perf_counter()
            answers = self._converse(session, first, turns, sample.max_new_tokens)
            seconds = time.perf_counter() - start
            texts = [self.loaded.tokenizer.decode(answer) for answer in answers]
            figures = session.figures()
            yield Prediction(
                task=sample.task,
                id=sample.id,
                length=sample.length,
                policy=policy.label,
                kv=policy.kv,
                budget=policy.budget(sample.length),
                predictions=texts,
                score=score(sample, texts),
                seconds=round(seconds, 4),
                prefill_seconds=round(prefill_seconds, 4),
                attended_tokens=int(figures["attended_tokens"]),
                least_kept_energy=figures.get("least_kept_energy"),
            )

    def _open(self, policies: list[Policy], need: int) -> list[Session]:
        if any(session.capacity < need for session in self._sessions.values()):
            self._sessions.clear()
        for session in self._sessions.values():
            session.clear()
        capacity = -(-need // CAPACITY_STEP) * CAPACITY_STEP
        for policy in policies:
            if policy.label not in self._sessions:
                assert policy.spec is not None
                self._sessions[policy.label] = Session(self.loaded, policy.spec, capacity)
        return [self._sessions[policy.label] for policy in policies]

    def _converse(self, session: Session, first: int, turns: list[list[int]], limit: int) -> list[list[int]]:
        """Greedy answers to every turn; each later turn extends the sequence with its answers."""
        answers = [self._decode(session, first, limit)]
        for turn in turns[1:]:
            # The token that reached the limit was chosen, but is not in the cache yet. End tokens never get there.
            last = answers[-1][-1:] if len(answers[-1]) == limit else []
            answers.append(self._decode(session, _best(session.feed([*last, *turn])), limit))
        return answers

    def _decode(self, session: Session, token: int, limit: int) -> list[int]:
        tokens: list[int] = []
        while token not in self.ends:
            tokens.append(token)
            if len(tokens) == limit:
                break
            token = _best(session.step(token))
        return tokens


def _best(logits: Tensor) -> int:
    return int(logits.argmax())

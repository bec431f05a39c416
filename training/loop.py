"""The loop: steps of both kinds of batches until the time is used, what is logged of them, and what a stop leaves."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from shadowkv.models.tokenization.tokenizer import Tokenizer
from training.batches import Lengths, RetrievalBatches, chat_batches, in_order
from training.chats import Chat
from training.losses import divergence, retrieval_loss
from training.model import Base, Lora
from training.samples import Tokens, tokenizer_of

LM_WEIGHT = 0.05
WARM_UP_STEPS = 30
LAST_SHARE = 0.05
"""Of the learning rate, at the end of its cosine."""
SAVE_SECONDS = 60.0
TEST_TOKENS = 16_384
"""Of a batch of held-out chats."""


@dataclass(frozen=True)
class Recipe:
    """How an adapter is trained.

    Attributes:
        model: base, a catalogue name.
        texts: folder of prose and words.
        out: where the adapter, the log and the state to go on from are written.
        minutes: time of training, over all runs of the command together.
        rate: peak of the learning rate.
        lengths, phased: of retrieval samples, and their shares of the time (``Lengths``).
        tokens: of a batch of retrieval samples.
        batches: of retrieval samples in a step.
        theta: RoPE's, of the adapter.
        chat_tokens, chat_batches: of chats; none without ``chats``.
        chat_weight: of the divergence, beside the 1 of retrieval.
        test_minutes: between two tests on held-out chats.
        workers: processes that make samples.
    """

    model: str
    texts: Path
    out: Path
    minutes: float
    rate: float
    lengths: dict[int, float]
    phased: bool
    tokens: int
    batches: int
    theta: float
    chat_tokens: int
    chat_batches: int
    chat_weight: float
    test_minutes: float
    workers: int


@dataclass
class Progress:
    """Where training is: what a later run goes on from, beside the weights."""

    step: int = 0
    seconds: float = 0.0
    made: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """An adapter while it is trained.

    Args:
        recipe: how.
        base: the frozen model.
        initial: directory of an adapter to begin with; None for a new one.
        chats: answered chats, held-out ones among them; without any nothing is distilled.
    """

    def __init__(self, recipe: Recipe, base: Base, initial: Path | None, chats: list[Chat]) -> None:
        self.recipe, self.base, self.lora, self.progress = recipe, base, Lora(base), Progress()
        if initial is not None:
            self.lora.load(initial)
        device = base.embedding.device
        self.optimizer = torch.optim.AdamW(
            self.lora.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
        )
        self._state = recipe.out / "state.pt"
        if self._state.exists():
            self._resume()
        tokenizer = tokenizer_of(recipe.model)
        self.test = held_out(chats, tokenizer)
        learnt = [chat.tokens(tokenizer) for chat in chats if not chat.held_out]
        self._chats = chat_batches(learnt, recipe.chat_tokens, random.Random(self.progress.step)) if learnt else None
        self._generator = torch.Generator().manual_seed(self.progress.step)

    def run(self) -> None:
        """Trains until the recipe's time is used, then saves the adapter."""
        recipe, progress = self.recipe, self.progress
        recipe.out.mkdir(parents=True, exist_ok=True)
        lengths = Lengths(recipe.lengths, recipe.phased)
        made = RetrievalBatches(recipe.model, recipe.texts, recipe.tokens, lengths, progress.made, recipe.workers)
        limit = 60 * recipe.minutes
        try:
            if progress.step == 0 and self.test:
                self._test()
            made.begin(progress.seconds / limit)
            saved = tested = progress.seconds
            while progress.seconds < limit:
                began = monotonic()
                self._step(made)
                progress.seconds += monotonic() - began
                if progress.seconds - saved > SAVE_SECONDS:
                    self._save()
                    saved = progress.seconds
                if self.test and progress.seconds - tested > 60 * recipe.test_minutes:
                    self._test()
                    tested = progress.seconds
        finally:
            made.close()
        if self.test:
            self._test()
        self._save()

    def _step(self, made: RetrievalBatches) -> None:
        recipe, progress = self.recipe, self.progress
        share = progress.seconds / (60 * recipe.minutes)
        cosine = LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * share)) / 2
        rate = recipe.rate * min((progress.step + 1) / WARM_UP_STEPS, cosine)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums, kl, waited = [0.0, 0.0, 0.0], 0.0, 0.0
        for _ in range(recipe.batches):
            began = monotonic()
            length, samples = made.next(share)
            waited += monotonic() - began
            losses = retrieval_loss(self.base, self.lora, recipe.theta, samples, self._generator)
            ((losses[0] + LM_WEIGHT * losses[1]) / recipe.batches).backward()
            sums = [total + value.item() / recipe.batches for total, value in zip(sums, losses)]
            made.lengths.took(length, monotonic() - began)
        for _ in range(recipe.chat_batches if self._chats is not None else 0):
            assert self._chats is not None
            part, _ = divergence(self.base, self.lora, self._thetas, next(self._chats))
            (recipe.chat_weight * part.mean() / recipe.chat_batches).backward()
            kl += part.mean().item() / recipe.chat_batches
        norm = float(torch.nn.utils.clip_grad_norm_(self.lora.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.made += recipe.batches
        answers, text, exact = sums
        self._log(length=length, rate=rate, answers=answers, text=text, exact=exact, kl=kl, norm=norm, waited=waited)

    @property
    def _thetas(self) -> tuple[float, float]:
        return self.base.config.rope.theta, self.recipe.theta

    def _test(self) -> None:
        self._log(**held_out_divergence(self.base, self.lora, self._thetas, self.test))

    def _log(self, **values: float) -> None:
        entry = {"step": self.progress.step, "seconds": round(self.progress.seconds, 1)}
        entry |= {name: round(value, 6) for name, value in values.items()}
        self.progress.log.append(entry)
        print(" ".join(f"{name} {value:.4g}" for name, value in entry.items()), flush=True)

    def _save(self) -> None:
        """The adapter, the log, and the state; each replaces the last at once."""
        out = self.recipe.out
        self.lora.save(out, self.recipe.model)
        (out / "log.json").write_text(
            "[\n" + ",\n".join(json.dumps(entry) for entry in self.progress.log) + "\n]\n", encoding="utf-8"
        )
        state = {
            "lora": self.lora.pairs,
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
        torch.save(state, self._state.with_suffix(".new"))
        os.replace(self._state.with_suffix(".new"), self._state)

    def _resume(self) -> None:
        state = torch.load(self._state, map_location=self.base.embedding.device, weights_only=True)
        with torch.no_grad():
            for name, pair in self.lora.pairs.items():
                for matrix, stored in zip(pair, state["lora"][name]):
                    matrix.copy_(stored)
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])


def held_out(chats: Iterable[Chat], tokenizer: Tokenizer) -> list[tuple[bool, Tokens]]:
    """The chats to test with: whether their answers were chosen greedily, and their tokens."""
    return [(chat.greedy, chat.tokens(tokenizer)) for chat in chats if chat.held_out]


@torch.no_grad()
def held_out_divergence(
    base: Base, lora: Lora, thetas: tuple[float, float], chats: Iterable[tuple[bool, Tokens]]
) -> dict[str, float]:
    """KL(base || adapter) on chats (``held_out``), at least one: mean over tokens, in nats, of all answers, of those
    that were chosen greedily, and of those that were drawn."""
    by_length = sorted(chats, key=lambda pair: len(pair[1].ids))
    sums = {True: [0.0, 0], False: [0.0, 0]}
    of = iter(by_length)
    for batch in in_order([tokens for _, tokens in by_length], TEST_TOKENS):
        parts, counts = divergence(base, lora, thetas, batch)
        for part in parts.split(counts):
            greedy, _ = next(of)
            sums[greedy][0] += part.sum().item()
            sums[greedy][1] += len(part)
    total, count = (sum(pair) for pair in zip(*sums.values()))
    means = {greedy: value / max(number, 1) for greedy, (value, number) in sums.items()}
    return {"held_out_kl": total / count, "held_out_kl_greedy": means[True], "held_out_kl_drawn": means[False]}

"""Prompts that fit a length by the model's own tokeniser: filled with units of text, or cut in the middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.wording import counted

# A prompt this full is not filled further. Steps aim for a point between it and 1: each costs a tokenisation.
FULL = 0.97


@dataclass(frozen=True)
class Question:
    """A prompt before its frame is added.

    Attributes:
        text: what the user says.
        answer_prefix: how the answer begins.
        references: what the metric compares the answer with.
    """

    text: str
    answer_prefix: str
    references: tuple[str, ...]


class TooShortError(ValueError):
    """Not even the shortest prompt fits the length."""


class PromptFitter:
    """Prompts for one task at one length.

    Args:
        tokenizer: measures the prompts.
        length: tokens of prompt and answer.
        max_new_tokens: limit for the answer.
        chat: in the tokeniser's chat template; the beginning of the answer comes after the assistant's header.

    Raises ValueError if the answer alone is as long as ``length``, or for a chat without a template.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, max_new_tokens: int, chat: bool = False) -> None:
        self.budget = length - max_new_tokens
        if self.budget <= 0:
            raise TooShortError(f"a length of {length} leaves no prompt beside {max_new_tokens} new tokens")
        if chat and not tokenizer.has_chat_template:
            raise ValueError("this model has no chat template; ask for plain prompts")
        self._tokenizer, self._chat = tokenizer, chat
        self._start = 32  # units to try first: as in the last prompt

    def frame(self, text: str, answer_prefix: str = "") -> str:
        """The prompt as the model sees it."""
        if not self._chat:
            return text + answer_prefix
        prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
        if self._tokenizer.encode("")[:1] == [self._tokenizer.bos_token_id]:  # encode() adds it itself
            prompt = prompt.removeprefix(self._tokenizer.special_tokens["bos_token"])
        return prompt + answer_prefix

    def count(self, prompt: str) -> int:
        """Tokens of a framed prompt."""
        return len(self._tokenizer.encode(prompt))

    def fill(self, build: Callable[[int], Question], least: int = 0, most: int | None = None) -> tuple[str, Question]:
        """The prompt of ``build(units)`` with as many units as fit, and that question.

        ``build`` gets at least ``least`` and at most ``most`` units; tokens grow about linearly with them. A prompt is
        usually tokenised twice: the slope is measured, and the number of units starts from the last prompt's.
        Raises TooShortError where ``least`` units do not fit.
        """
        question = build(least)
        prompt = self.frame(question.text, question.answer_prefix)
        tokens = shortest = self.count(prompt)
        if tokens > self.budget:
            raise TooShortError(f"the shortest prompt has {counted(tokens, 'token')}, the length leaves {self.budget}")
        fits, fails, units, steps = least, most + 1 if most is not None else None, max(self._start, least + 1), 0
        while tokens < FULL * self.budget and (fails is None or fails - fits > 1):
            units = max(units, fits + 1) if fails is None else min(max(units, fits + 1), fails - 1)
            tried = build(units)
            text = self.frame(tried.text, tried.answer_prefix)
            tried_tokens = self.count(text)
            if tried_tokens > self.budget:
                fails = units
            else:
                fits, question, prompt, tokens = units, tried, text, tried_tokens
            per_unit = max(tried_tokens - shortest, 1) / (units - least)
            units = least + int(((1 + FULL) / 2 * self.budget - shortest) / per_unit)
            steps += 1
            if steps > 4 and fails is not None:  # uneven units: bisect
                units = (fits + fails) // 2
        self._start = fits
        return prompt, question

    def cut(self, text: str) -> str:
        """The framed prompt of ``text``, its middle left out if it is too long (as in LongBench and InfiniteBench)."""
        prompt = self.frame(text)
        excess = self.count(prompt) - self.budget
        if excess <= 0:
            return prompt
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        keep = len(ids)
        while excess > 0:
            # Tokens at the seam may merge differently once it is text again: hence the loop.
            keep -= excess
            if keep < 2:
                raise TooShortError(f"a prompt of {self.budget} tokens is all frame")
            decode = self._tokenizer.decode
            prompt = self.frame(decode(ids[: keep // 2]) + decode(ids[-(keep // 2) :]))
            excess = self.count(prompt) - self.budget
        return prompt

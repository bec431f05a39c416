"""Fits prompts to a length in tokens of the model's own tokenizer: fills prompts with units of text, or cuts out their
middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shadowkv.eval.records.predictions import Sample
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.wording import counted

# A prompt that fills this share of its budget (the tokens that the answer leaves) is full enough. Each try costs a
# tokenization, so tries aim at the middle between this share and 1.
FULL = 0.97


@dataclass(frozen=True)
class Question:
    """A prompt before ``PromptFitter.frame`` puts it into the model's format.

    Attributes:
        text: the user's message.
        answer_prefix: beginning of the answer. The framed prompt ends with it.
        references: texts that the metric compares the answer with.
        history: earlier turns of the conversation: what the user asked, and what the assistant answered.
    """

    text: str
    answer_prefix: str
    references: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()


class TooShortError(ValueError):
    """Raised if not even the shortest prompt fits the length."""


class PromptFitter:
    """Makes prompts for one task at one length.

    Args:
        tokenizer: measures the prompts.
        length: maximum tokens of prompt and answer together.
        max_new_tokens: limit for the answer.
        chat: whether to use the tokenizer's chat template. The beginning of the answer then follows the assistant's
            header.

    Raises ValueError if ``max_new_tokens`` leaves no token for the prompt, or if ``chat`` is set and the tokenizer has
    no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, max_new_tokens: int, chat: bool = False) -> None:
        self.length, self.max_new_tokens, self.budget = length, max_new_tokens, length - max_new_tokens
        if self.budget <= 0:
            raise TooShortError(f"a length of {length} leaves no prompt beside {max_new_tokens} new tokens")
        if chat and not tokenizer.has_chat_template:
            raise ValueError("this model has no chat template; ask for plain prompts")
        self._tokenizer, self._chat = tokenizer, chat
        self._start = 32  # number of units that the next ``fill`` tries first

    def frame(self, text: str, answer_prefix: str = "", history: Sequence[tuple[str, str]] = ()) -> str:
        """Returns the prompt as the model sees it. Without a chat template, turns of a history begin with ``User:`` and
        ``Assistant:``."""
        if not self._chat and not history:
            return text + answer_prefix
        turns = (*history, (text, answer_prefix))
        if not self._chat:
            return "\n\n".join(f"User:\n{asked}\n\nAssistant:\n{answer}" for asked, answer in turns)
        roles = [(role, content) for turn in turns for role, content in zip(("user", "assistant"), turn)]
        messages = [{"role": role, "content": content} for role, content in roles[:-1]]  # the last one follows below
        prompt = self._tokenizer.apply_chat_template(messages)
        if self._tokenizer.encode("")[:1] == [self._tokenizer.bos_token_id]:  # encode() adds this token
            prompt = prompt.removeprefix(self._tokenizer.special_tokens["bos_token"])
        return prompt + answer_prefix

    def count(self, prompt: str) -> int:
        """Returns the number of tokens of a framed prompt."""
        return len(self._tokenizer.encode(prompt))

    def fill(self, build: Callable[[int], Question], least: int = 0, most: int | None = None) -> tuple[str, Question]:
        """Returns the prompt with as many units of text as fit, and its question. ``build(units)`` makes the question
        with a number of units.

        ``build`` is called with ``least`` to ``most`` units. The number of tokens must grow about linearly with the
        number of units. The search starts at the number of units that the prompt of the last call had, and measures the
        tokens per unit. So it usually tokenizes only two prompts. Raises TooShortError if ``least`` units do not fit.
        """
        question = build(least)
        prompt = self.frame(question.text, question.answer_prefix, question.history)
        tokens = shortest = self.count(prompt)
        if tokens > self.budget:
            raise TooShortError(f"the shortest prompt has {counted(tokens, 'token')}, the length leaves {self.budget}")
        fits, fails, units, steps = least, most + 1 if most is not None else None, max(self._start, least + 1), 0
        while tokens < FULL * self.budget and (fails is None or fails - fits > 1):
            units = max(units, fits + 1) if fails is None else min(max(units, fits + 1), fails - 1)
            tried = build(units)
            text = self.frame(tried.text, tried.answer_prefix, tried.history)
            tried_tokens = self.count(text)
            if tried_tokens > self.budget:
                fails = units
            else:
                fits, question, prompt, tokens = units, tried, text, tried_tokens
            per_unit = max(tried_tokens - shortest, 1) / (units - least)
            units = least + int(((1 + FULL) / 2 * self.budget - shortest) / per_unit)
            steps += 1
            if steps > 4 and fails is not None:  # the units are uneven, so bisect
                units = (fits + fails) // 2
        self._start = fits
        return prompt, question

    def sample(
        self,
        task: str,
        id: str,
        metric: str,
        build: Callable[[int], Question],
        least: int = 0,
        most: int | None = None,
    ) -> Sample:
        """Returns the prompt of ``fill`` as a sample. If ``fill`` raises TooShortError, the task and the length are
        added to the message."""
        try:
            prompt, question = self.fill(build, least, most)
        except TooShortError as error:
            raise TooShortError(f"{task} at length {self.length}: {error}") from error
        return Sample(task, id, (prompt,), (question.references,), self.max_new_tokens, metric, self.length)

    def cut(self, text: str) -> str:
        """Returns the framed prompt of ``text``. If it is too long, the middle of ``text`` is cut out, as in LongBench
        and InfiniteBench."""
        prompt = self.frame(text)
        excess = self.count(prompt) - self.budget
        if excess <= 0:
            return prompt
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        keep = len(ids)
        while excess > 0:
            # Where the two halves meet, the text may be tokenized differently than before, so tokens are counted again.
            keep -= excess
            if keep < 2:
                raise TooShortError(f"a prompt of {self.budget} tokens has no room for text beside the template")
            decode = self._tokenizer.decode
            prompt = self.frame(decode(ids[: keep // 2]) + decode(ids[-(keep // 2) :]))
            excess = self.count(prompt) - self.budget
        return prompt

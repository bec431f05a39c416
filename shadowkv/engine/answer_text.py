"""Detokenizes an answer up to its stop string. ``LLM`` and ``process/client.py`` use it; the engine itself knows only
tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import astuple, replace

from shadowkv.engine.outputs import TextOutput, TokenOutput
from shadowkv.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shadowkv.models.tokenization.tokenizer import DecodeStream, Tokenizer

Value = TypeVar("Value")


class Detokenizer:
    """Text of one request, up to its stop string.

    Text that could be the start of a stop string is held back until further text shows that it is not. With
    ``include_stop`` the stop string is part of the text.
    """

    def __init__(self, stream: DecodeStream, stop: tuple[str, ...], include_stop: bool = False) -> None:
        self._stream, self._stop, self._include_stop = stream, stop, include_stop
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        return self.stop_string is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens. Sets ``stop_string`` if the text now has a complete stop string. Returns the new text without
        the held-back part."""
        text = self._stream.push(token_ids)
        return self._release(text) if self._stop else text

    def finish(self) -> str:
        """Returns the held-back rest of the text, which is empty after a stop string. Call it when generation has
        ended."""
        if self.stopped:
            return ""
        text = self._release(self._stream.flush())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        text = self._held + text
        ends = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            place, self.stop_string = min(ends)
            self._held = ""
            return text[: place + len(self.stop_string)] if self._include_stop else text[:place]
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of ``stop``."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if stop.startswith(text[-length:]):
                return length
        return 0


class AnswerText:
    """Turns the token outputs of one request into text outputs.

    Attributes:
        ended: whether the answer has ended, with its last token or with a stop string. If a stop string ended it, the
            caller must tell the engine.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._include_stop, self._stop_token_ids = params.include_stop_str_in_output, frozenset(params.stop_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer.stream(params.skip_special_tokens), params.stop, params.include_stop_str_in_output
        )
        # With stop strings, outputs are read one by one, because the answer ends with the token that completes a stop
        # string.
        self._at_once = not params.stop
        self.ended = False

    def read(self, outputs: Sequence[TokenOutput]) -> TextOutput:
        """Returns the text output of one or more token outputs, given in order. It must not be called after the answer
        has ended."""
        if self._at_once and len(outputs) > 1:
            outputs = [_joined(outputs)]
        text = ""
        read: list[TokenOutput] = []
        for last in outputs:
            read.append(last)
            added, reason = self._push(last)
            text += added
            if self.ended:
                break
        if len(read) > 1:
            last = _joined(read)
        stop_reason = self._stop_reason(last) if self.ended else None
        whole = TextOutput(*[*astuple(last), text, self._detokenizer.stop_string, stop_reason])
        whole.finish_reason = reason
        return whole

    def _push(self, output: TokenOutput) -> tuple[str, str | None]:
        """Returns the text that an output adds, and the answer's finish reason."""
        reason, text = output.finish_reason, self._detokenizer
        without_end = output.end_token and not self._include_stop
        tokens = output.token_ids[:-1] if without_end else output.token_ids
        added = text.push(tokens) if tokens else ""
        if text.stopped:
            reason = "stop"
        elif reason is not None and reason != "error":
            added += text.finish()  # this can also complete a stop string
        self.ended = reason is not None
        return added, reason

    def _stop_reason(self, output: TokenOutput) -> str | int | None:
        if self._detokenizer.stop_string is not None:
            return self._detokenizer.stop_string
        if output.finish_reason == "repetition":
            return "repetition_detected"
        last = output.token_ids[-1] if output.end_token else None
        return last if last in self._stop_token_ids else None


def _joined(outputs: Sequence[TokenOutput]) -> TokenOutput:
    last = outputs[-1]
    logprobs, selections = last.logprobs, last.selections
    return replace(
        last,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=None if logprobs is None else [step for output in outputs for step in output.logprobs or ()],
        prompt_logprobs=_first(output.prompt_logprobs for output in outputs),
        selections=None if selections is None else [step for output in outputs for step in output.selections or ()],
        prefilled=_first(output.prefilled for output in reversed(outputs)),
    )


def _first(values: Iterable[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)

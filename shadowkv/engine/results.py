"""The return values of ``LLM``: a prompt with its answers, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from shadowkv.engine.outputs import TextOutput, TokenLogprobs, TokenSelections
from shadowkv.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at one position.

    Attributes:
        rank: 1 for the most likely token; None for a chosen token that is not among the reported alternatives.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: the answer's number among the prompt's ``n``.
        token_ids: all generated tokens, with the end token.
        logprobs: for each generated token, log-probabilities by token id: the chosen token first, then the most likely
            ones. None if not requested.
        cumulative_logprob: sum of the chosen tokens' log-probabilities; None if not requested.
        finish_reason: ``stop``, ``length`` or ``repetition``; None while the answer is incomplete.
        stop_reason: the stop string or stop token that ended the answer, or ``repetition_detected``; else None.
        selections: for each token, the tokens that it attended to, if requested; None for the first token, which the
            prefill chose.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    selections: list[TokenSelections | None] = field(default_factory=list)

    def add(self, output: TextOutput, tokenizer: Tokenizer) -> None:
        """Appends an output to the answer."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.selections += output.selections or []
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + [by_token(step, tokenizer) for step in output.logprobs]
            self.cumulative_logprob = sum((step.logprob for step in output.logprobs), self.cumulative_logprob or 0.0)


@dataclass
class RequestOutput:
    """A prompt and its answers. In a stream, the new part of one answer.

    Attributes:
        prompt: the prompt's text; None if it was given as token ids.
        prompt_logprobs: for each token of the prompt, log-probabilities as in ``CompletionOutput.logprobs``; the first
            entry is None. The whole list is None if not requested.
        outputs: the ``n`` answers; in a stream the new part of one answer.
        finished: whether all ``n`` answers are complete.
        num_cached_tokens: prompt tokens that the prefix cache had, for the first of the ``n`` answers.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0

    def add(self, index: int, output: TextOutput, tokenizer: Tokenizer) -> None:
        """Appends an output to the answer ``index``."""
        self.outputs[index].add(output, tokenizer)
        self.finished = all(answer.finish_reason is not None for answer in self.outputs)
        if index == 0:
            self.num_cached_tokens = output.cached_tokens
            if output.prompt_logprobs is not None:
                steps = output.prompt_logprobs
                self.prompt_logprobs = [None if step is None else by_token(step, tokenizer) for step in steps]


def by_token(step: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Log-probabilities at one position by token id: the chosen token first, then the others, most likely first."""
    likeliest = sorted(step.top.items(), key=lambda entry: -entry[1])
    ranks = {token: number for number, (token, _) in enumerate(likeliest, 1)}
    values = {step.token_id: step.logprob, **dict(likeliest)}
    return {
        token: Logprob(value, ranks.get(token), tokenizer.decode([token], skip_special_tokens=False))
        for token, value in values.items()
    }

"""What ``LLM`` returns: a prompt with its answers, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from shadowkv.engine.outputs import TextOutput, TokenLogprobs, TokenSelections
from shadowkv.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at one place.

    Attributes:
        rank: 1 for the most likely token; None for a chosen one that is not among the reported most likely ones.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: its number among the prompt's ``n``.
        token_ids: all that were generated, with the token that ended it.
        logprobs: by token id, for each generated token: the chosen one's first, then those of the most likely ones;
            None where they were not requested.
        cumulative_logprob: sum over the chosen tokens; None where they were not requested.
        finish_reason: ``stop``, ``length`` or ``repetition``; None while there is more to come.
        stop_reason: the request's stop string or stop token that ended it, or ``repetition_detected``; None for
            anything else.
        selections: what each token attended to, if requested; None for the first, which prefill chose.
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
        """Adds what came next."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.selections += output.selections or []
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + [by_token(step, tokenizer) for step in output.logprobs]
            self.cumulative_logprob = sum((step.logprob for step in output.logprobs), self.cumulative_logprob or 0.0)


@dataclass
class RequestOutput:
    """A prompt and its answers, or of a stream what was added to one of them.

    Attributes:
        prompt: its text; None where it was given as token ids.
        prompt_logprobs: as ``CompletionOutput.logprobs``, for each token of the prompt, None for the first; None where
            they were not requested.
        outputs: ``n`` of them; of a stream one, with nothing but what is new.
        finished: whether all ``n`` answers are complete.
        num_cached_tokens: of the prompt, those that were not computed again; with ``n`` the first answer's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0

    def add(self, index: int, output: TextOutput, tokenizer: Tokenizer) -> None:
        """Adds what came next of an answer."""
        self.outputs[index].add(output, tokenizer)
        self.finished = all(answer.finish_reason is not None for answer in self.outputs)
        if index == 0:
            self.num_cached_tokens = output.cached_tokens
            if output.prompt_logprobs is not None:
                steps = output.prompt_logprobs
                self.prompt_logprobs = [None if step is None else by_token(step, tokenizer) for step in steps]


def by_token(step: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Log-probabilities at one place by token id, the chosen token's first, then the others' from the most likely."""
    likeliest = sorted(step.top.items(), key=lambda entry: -entry[1])
    ranks = {token: number for number, (token, _) in enumerate(likeliest, 1)}
    values = {step.token_id: step.logprob, **dict(likeliest)}
    return {
        token: Logprob(value, ranks.get(token), tokenizer.decode([token], skip_special_tokens=False))
        for token, value in values.items()
    }

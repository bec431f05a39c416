"""How the tokens of one request are chosen and when it stops; names and defaults as in vLLM and the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    Attributes:
        max_tokens: tokens to generate at the most; None means the server's default.
        temperature: 0 is greedy.
        top_p, top_k, min_p: candidates kept: smallest set of mass ``top_p``, the ``top_k`` likeliest (0 is all), those
            at least ``min_p`` times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen before; 1 is off.
        stop: strings that end the text and are not part of it.
        stop_token_ids: tokens that end the text, beside the model's own.
        ignore_eos: go on after the model's end tokens.
        seed: makes sampling repeatable, whatever else is in the batch.
        logprobs: alternatives to report per token, 0 the chosen one alone; None is off.

    Raises:
        ValueError: a value is out of range; the message lists every one.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        bad = [
            text
            for broken, text in (
                (
                    self.max_tokens is not None and self.max_tokens < 1,
                    f"max_tokens={self.max_tokens} must be at least 1",
                ),
                (not 0 <= self.temperature <= 100, f"temperature={self.temperature} must be between 0 and 100"),
                (not 0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]"),
                (self.top_k < -1, f"top_k={self.top_k} must be at least 1, or 0 or -1 for all"),
                (not 0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]"),
                (
                    not 0 < self.repetition_penalty <= 100,
                    f"repetition_penalty={self.repetition_penalty} must be in (0, 100]",
                ),
                (
                    self.logprobs is not None and not 0 <= self.logprobs <= 20,
                    f"logprobs={self.logprobs} must be 0 to 20",
                ),
                (any(not text for text in self.stop), "stop must not hold an empty string"),
            )
            if broken
        ]
        if bad:
            raise ValueError("; ".join(bad))

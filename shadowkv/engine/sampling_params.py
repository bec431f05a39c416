"""How the tokens of one request are chosen and when it stops; names and defaults as in vLLM and the OpenAI API."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from shadowkv.field_types import wrong_types


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    Attributes:
        n: answers to a prompt, of which ``LLM`` asks the engine for each by itself; those of a seeded request have the
            seeds of ``choice_seed``.
        max_tokens: most tokens to generate; None means the engine's default (``default_max_tokens``), 0 only scores the
            prompt.
        min_tokens: tokens before which no end token is chosen.
        temperature: 0 is greedy.
        top_p, top_k, min_p: candidates kept: smallest set of mass ``top_p``, the ``top_k`` most likely (0 is all),
            those at least ``min_p`` times as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen before; 1 is off.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens generated before, once, and once per
            occurrence.
        logit_bias: added to the logits, by token id.
        stop: strings that end the text and are not part of it; a single one, and a list, become a tuple.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: go on after the model's end tokens.
        seed: of all random numbers of the request, whatever else is in the batch: those that choose its tokens, and
            those that sample attention's tokens; None is a random one, or 0 where decoding is greedy.
            ``docs/design/server.md`` says what is repeatable.
        json_schema: JSON schema (as JSON text) that the output must follow; ``{}`` is any JSON.
        grammar: other rules that the output must follow, as ``grammar_text`` writes them.
        json_one_line: with a schema, no white space but one space after each comma and colon, as ``json.dumps`` writes.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: alternatives to report per token, 0 is only the chosen one; None is off.
        prompt_logprobs: the same for the prompt's tokens.
        return_selections: whether to report what each token attended to (``CompletionOutput.selections``). On a GPU,
            steps of a batch with such a request are not CUDA graphs, which takes longer.
        return_progress: whether to report, while the prompt is computed, how much of it is
            (``TextOutput.prefilled``).
        cache_prompt: whether its prefixes are looked up in the prefix cache, and it is kept there.
        cache_salt: prompts with other salts share nothing with this one.

    Raises:
        TypeError: a value is of another type; the message lists every one.
        ValueError: a value is out of range; the message lists every one.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    json_schema: str | None = None
    grammar: str | None = None
    json_one_line: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_selections: bool = False
    return_progress: bool = False
    cache_prompt: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        # A text is a sequence of texts, too, of one letter each.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if wrong := wrong_types(self):
            raise TypeError("; ".join(wrong))
        if not all(_is_number(token, Integral) for token in self.stop_token_ids):
            raise TypeError(f"stop_token_ids={self.stop_token_ids!r:.100} must be token ids, whole numbers")
        if not all(_is_number(token, Integral) and _is_number(bias, Real) for token, bias in self.logit_bias.items()):
            raise TypeError(f"logit_bias={self.logit_bias!r:.100} must have token ids as keys, and numbers as values")
        least = 1 if self.prompt_logprobs is None else 0
        bad = [
            f"{name}={getattr(self, name)} must be {rule}"
            for name, fine, rule in (
                ("n", self.n >= 1, "at least 1"),
                ("max_tokens", self.max_tokens is None or self.max_tokens >= least, f"at least {least}"),
                (
                    "min_tokens",
                    0 <= self.min_tokens <= (self.min_tokens if self.max_tokens is None else self.max_tokens),
                    "between 0 and max_tokens",
                ),
                ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
                ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
                ("top_k", -1 <= self.top_k < 2**31, "at least 1, or 0 or -1 for all"),
                ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
                ("repetition_penalty", 0 < self.repetition_penalty <= 100, "in (0, 100]"),
                ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
                ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
                ("logit_bias", all(-100 <= bias <= 100 for bias in self.logit_bias.values()), "between -100 and 100"),
                ("grammar", self.grammar is None or self.json_schema is None, "left out with json_schema"),
                ("stop", all(isinstance(text, str) and text for text in self.stop), "strings, none of them empty"),
                ("cache_salt", self.cache_salt != "", "a string that is not empty"),
                ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "0 to 20"),
                ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "0 to 20"),
            )
            if not fine
        ]
        if bad:
            raise ValueError("; ".join(bad))

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and candidates affects the logits."""
        return bool(
            self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.rules is not None
        )

    @property
    def rules(self) -> str | None:
        """What the output must follow: a JSON schema or a grammar."""
        return self.json_schema if self.grammar is None else self.grammar


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one of a request's ``n`` choices: the first has the request's own, so that it repeats the answer of n=1.

    The others' are hashes of both numbers, in [0, 2^63): sums would be the seeds of other requests.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

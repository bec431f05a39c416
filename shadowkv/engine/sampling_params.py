"""Sampling and stop parameters of one request. Names and defaults are those of vLLM and the OpenAI API."""

from __future__ import annotations

import hashlib
import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from shadowkv.field_types import wrong_types
from shadowkv.grammar_text import choice_text, grammar_text

MAX_PATTERN_SIZE = 4_096
"""Maximum number of tokens of a pattern in ``repetition_detection``. It is limited because each step compares the
newest token with this many tokens."""

MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum number of entries of ``logprob_token_ids``, as in vLLM."""

SEQUENCES = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids", "predicted_token_ids")
"""Parameters that accept a list and store it as a tuple."""


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Ends an answer that repeats itself, as in vLLM: when its last tokens are ``min_count`` repeats of a pattern of
    ``min_pattern_size`` to ``max_pattern_size`` tokens.

    Attributes:
        max_pattern_size: 0 turns the detection off.
        min_pattern_size: 0 means 1.

    Raises ValueError for values out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if wrong := wrong_types(self):
            raise TypeError("; ".join(wrong))
        if not 0 <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            raise ValueError(f"max_pattern_size={self.max_pattern_size} must be between 0 and {MAX_PATTERN_SIZE}")
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            reason = f"between 0 and max_pattern_size, which is {self.max_pattern_size}"
            raise ValueError(f"min_pattern_size={self.min_pattern_size} must be {reason}")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(f"min_count={self.min_count} must be at least 2: a pattern that comes once is no repeat")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format that an answer must follow, with vLLM's names. Exactly one of the first six must be set.

    Attributes:
        json: a JSON schema, as an object or as its text.
        regex: a regular expression that the whole answer matches.
        choice: the possible answers.
        grammar: a grammar in GBNF, the kind of EBNF that vLLM accepts. Its start rule is ``root``.
        json_object: True for any JSON object.
        structural_tag: a structural tag of XGrammar, as an object or as its text.
        disable_any_whitespace: whether JSON has no white space except one space after each comma and colon.

    Raises ValueError if none or several of the formats are set.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        if wrong := wrong_types(self):
            raise TypeError("; ".join(wrong))
        kinds = [field.name for field in fields(self) if field.name != "disable_any_whitespace"]
        given = [name for name in kinds if getattr(self, name)]
        if len(given) != 1:
            reason = f"and {' and '.join(given)} are given" if given else "and none is given"
            raise ValueError(f"structured_outputs needs one of {', '.join(kinds)}, {reason}")

    @property
    def rules(self) -> str:
        """The format as a value of ``SamplingParams.json_schema`` or ``SamplingParams.grammar``."""
        if self.choice is not None:
            return choice_text(self.choice)
        if self.regex is not None:
            return grammar_text("regex", self.regex)
        if self.grammar is not None:
            return grammar_text("grammar", self.grammar)
        if self.structural_tag is not None:
            return grammar_text("structural_tag", _json_text(self.structural_tag))
        return '{"type": "object"}' if self.json is None else _json_text(self.json)


def _json_text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else json_module.dumps(value)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    Attributes:
        n: number of answers. ``LLM`` makes a request for each. If there is a ``seed``, ``choice_seed`` derives the
            requests' seeds from it.
        max_tokens: maximum number of tokens to generate. None is the engine's default (``default_max_tokens``), 0 only
            scores the prompt.
        min_tokens: no end token is chosen before this many tokens.
        temperature: 0 is greedy.
        top_p: samples from the smallest set of most likely tokens with this probability.
        top_k: samples from the ``top_k`` most likely tokens; 0 and -1 mean all.
        min_p: samples from tokens at least ``min_p`` times as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and the answer; 1 is
            off.
        presence_penalty: subtracted once from the logits of tokens generated before.
        frequency_penalty: subtracted from the logits of tokens generated before, once per occurrence.
        logit_bias: added to the logits, by token id.
        allowed_token_ids: the only tokens that can be chosen; None means all.
        bad_words: words that are not generated: a word's last token is not chosen directly after its other tokens.
        thinking_token_budget: maximum number of tokens of thoughts, between ``<think>`` and ``</think>``. At the limit
            ``</think>`` is forced. None and -1 are no limit.
        repetition_detection: ends an answer that repeats itself, with ``finish_reason`` ``repetition``.
        stop: strings that end the text. The text includes them only with ``include_stop_str_in_output``. A string or a
            list becomes a tuple.
        stop_token_ids: tokens that end the text, besides the model's own.
        include_stop_str_in_output: whether the string or token that ends the text is part of it.
        ignore_eos: whether to go on after the model's end tokens.
        seed: seed of all random numbers of the request: those that sample its tokens, and those that sample the tokens
            to attend to. They do not depend on the rest of the batch. None is a random seed, or 0 for greedy decoding.
            ``docs/design/server.md`` says what is repeatable.
        json_schema: JSON schema (as JSON text) that the output must follow; ``{}`` is any JSON.
        grammar: another grammar that the output must follow, as ``grammar_text`` writes it.
        structured_outputs: alternative to ``json_schema`` and ``grammar``, with vLLM's names.
        json_one_line: with a schema, no white space except one space after each comma and colon, as ``json.dumps``
            writes.
        skip_special_tokens: whether to leave special tokens out of the text.
        logprobs: number of alternatives to report per token: 0 for the chosen token alone, -1 for the whole vocabulary,
            None for no log-probabilities. The engine's ``max_logprobs`` limits it.
        prompt_logprobs: number of alternatives to report per prompt token; values are as for ``logprobs``.
        logprob_token_ids: tokens to report beside the chosen one, instead of the most likely ones.
        predicted_token_ids: the expected tokens of the answer, which are also used to make drafts (OpenAI's
            ``prediction``). They do not change the answer. Without ``speculative_config`` they have no effect.
        return_selections: whether to report the tokens that each token attended to (``CompletionOutput.selections``).
            On a GPU, steps of a batch with such a request run without CUDA graphs, which is slower.
        return_progress: whether to report the progress of the prefill (``TextOutput.prefilled``).
        cache_prompt: whether to use the prefix cache for this request: to search it, and to keep the sequence there.
        cache_salt: requests with different salts share no cached prefix.

    Raises:
        TypeError: values have a wrong type. The message lists all of them.
        ValueError: values are out of range. The message lists all of them.
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
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    json_schema: str | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    json_one_line: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    predicted_token_ids: tuple[int, ...] = ()
    return_selections: bool = False
    return_progress: bool = False
    cache_prompt: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        # A string alone would be read as a sequence of its characters.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name in SEQUENCES:
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        if wrong := wrong_types(self):
            raise TypeError("; ".join(wrong))
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "predicted_token_ids"):
            if not all(_is_number(token, Integral) for token in getattr(self, name) or ()):
                raise TypeError(f"{name}={getattr(self, name)!r:.100} must be token ids, whole numbers")
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", len(self.logprob_token_ids))
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
                (
                    "structured_outputs",
                    self.structured_outputs is None or (self.json_schema is None and self.grammar is None),
                    "left out with json_schema and grammar",
                ),
                ("allowed_token_ids", self.allowed_token_ids != (), "at least one token id, or left out for all"),
                ("bad_words", all(_is_text(text) for text in self.bad_words), "strings, none of them empty"),
                (
                    "thinking_token_budget",
                    self.thinking_token_budget is None or self.thinking_token_budget >= 0,
                    "at least 0, or -1 for no limit",
                ),
                ("stop", all(isinstance(text, str) and text for text in self.stop), "strings, none of them empty"),
                ("cache_salt", self.cache_salt != "", "a string that is not empty"),
                ("logprobs", self.logprobs is None or self.logprobs >= -1, "at least 0, or -1 for all"),
                (
                    "prompt_logprobs",
                    self.prompt_logprobs is None or self.prompt_logprobs >= -1,
                    "at least 0, or -1 for all",
                ),
                (
                    "logprob_token_ids",
                    0 < len(self.logprob_token_ids or (0,)) <= MAX_LOGPROB_TOKEN_IDS,
                    f"1 to {MAX_LOGPROB_TOKEN_IDS} token ids",
                ),
            )
            if not fine
        ]
        if bad:
            raise ValueError("; ".join(bad))

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature, top_p, top_k and min_p changes the logits."""
        return bool(
            self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.thinking_token_budget is not None
            or self.rules is not None
        )

    @property
    def rules(self) -> str | None:
        """The JSON schema or grammar that the output must follow; None without one."""
        if self.structured_outputs is not None:
            return self.structured_outputs.rules
        return self.json_schema if self.grammar is None else self.grammar

    @property
    def one_line(self) -> bool:
        """Whether JSON output has no white space except one space after each comma and colon."""
        return self.json_one_line or (
            self.structured_outputs is not None and self.structured_outputs.disable_any_whitespace
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of one of a request's ``n`` choices. The first choice has the request's seed, as with n=1.

    The seeds of the other choices are hashes of both numbers, in [0, 2^63), because a sum could equal the seed of
    another request.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

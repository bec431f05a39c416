"""``SpeculativeConfig``: the settings of ``--speculative-config``, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from numbers import Real
from typing import Any

from shadowkv.field_types import wrong_json_types

BY_THE_MODEL = ("sparse", "mtp")
"""Methods with which all sequences of a step draft together."""

METHODS = ("ngram", "suffix", *BY_THE_MODEL)
MAX_SPECULATIVE_TOKENS = 63
"""Maximum number of drafted tokens of a step. With the newest token these are 64 tokens: one page, for which every
cache has room."""

SUFFIX_TOKENS = 24
"""Default of ``num_speculative_tokens`` for ``suffix``, as in vLLM."""

SPARSE_TOKENS = 6
"""Default of ``num_speculative_tokens`` for ``sparse``."""

HEAD_TOKENS = 1
"""Default of ``num_speculative_tokens`` for ``mtp``: draft heads are trained to predict one token. vLLM has the same
default: the number of draft layers in the files, which is 1."""

DEFAULT_TOKENS = {"suffix": SUFFIX_TOKENS, "sparse": SPARSE_TOKENS, "mtp": HEAD_TOKENS}

LOOKUP_SIZE = 5
"""Default of ``prompt_lookup_min`` and ``prompt_lookup_max``, as in vLLM."""

REJECTION_SAMPLE_METHODS = ("standard", "synthetic")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted.

    Attributes:
        method: ``ngram`` drafts what follows the first occurrence of the newest n-gram (vLLM's prompt lookup).
            ``suffix`` drafts what most often follows the longest match (SuffixDecoding, arXiv:2411.04975). ``sparse``
            drafts with the model itself, in steps that attend to few tokens (MagicDec, arXiv:2408.11049). ``mtp``
            drafts with a layer of the checkpoint (``DraftHead``).
        num_speculative_tokens: maximum number of drafted tokens of a sequence in a step. It must be set for ``ngram``.
        prompt_lookup_min, prompt_lookup_max: shortest and longest n-gram to look up, in tokens; only for ``ngram``. If
            one is None, it has the value of the other. If both are None, both are 5.
        rejection_sample_method: ``standard`` accepts a drafted token if the model chooses it. ``synthetic`` accepts
            drafted tokens at random (``accepted_at_random``), for measurements of speed: answers are not the model's.
        synthetic_acceptance_rates: for ``synthetic``, the probability at each place of a draft that this token and all
            before it are accepted, as in vLLM. There are ``num_speculative_tokens`` of them.

    Raises ValueError for invalid values. The message lists all of them.
    """

    method: str
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if bad := self._contradictions():
            raise ValueError("; ".join(bad))
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", DEFAULT_TOKENS[self.method])
        if self.method == "ngram":
            least, most = self.prompt_lookup_min, self.prompt_lookup_max
            object.__setattr__(self, "prompt_lookup_min", least or most or LOOKUP_SIZE)
            object.__setattr__(self, "prompt_lookup_max", most or least or LOOKUP_SIZE)

    def _contradictions(self) -> list[str]:
        bad, count, least, most = [], self.num_speculative_tokens, self.prompt_lookup_min, self.prompt_lookup_max
        if self.method not in METHODS:
            bad.append(f"method={self.method!r} is not one of {', '.join(METHODS)}")
        if count is None and self.method == "ngram":
            bad.append("method='ngram' needs num_speculative_tokens, the number of tokens to draft")
        if count is not None and not 1 <= count <= MAX_SPECULATIVE_TOKENS:
            bad.append(f"num_speculative_tokens={count} must be between 1 and {MAX_SPECULATIVE_TOKENS}")
        sizes = {"prompt_lookup_min": least, "prompt_lookup_max": most}
        for name, size in sizes.items():
            if size is not None and self.method != "ngram":
                bad.append(f"{name}={size} has no meaning with method={self.method!r}; it is for method='ngram'")
            elif size is not None and size < 1:
                bad.append(f"{name}={size} must be at least 1")
        if least is not None and most is not None and least > most:
            bad.append(f"prompt_lookup_min={least} must be at most prompt_lookup_max, which is {most}")
        return bad + self._wrong_rates()

    def _wrong_rates(self) -> list[str]:
        method, rates = self.rejection_sample_method, self.synthetic_acceptance_rates
        if method not in REJECTION_SAMPLE_METHODS:
            return [f"rejection_sample_method={method!r} is not one of {', '.join(REJECTION_SAMPLE_METHODS)}"]
        count = self.num_speculative_tokens or DEFAULT_TOKENS.get(self.method)
        wanted = f"a probability for each of the {count} tokens of a draft, such as 0.8, 0.64, 0.512 for 3 tokens"
        if rates is None:
            missing = f"rejection_sample_method='synthetic' needs synthetic_acceptance_rates: {wanted}"
            return [missing] if method == "synthetic" else []
        given = f"synthetic_acceptance_rates={rates!r:.100}"
        if method != "synthetic":
            return [f"{given} has no meaning with rejection_sample_method={method!r}; it is for 'synthetic'"]
        if not all(isinstance(rate, Real) and 0 <= rate <= 1 for rate in rates):
            return [f"{given} must be numbers from 0 to 1"]
        if any(rate > before for before, rate in pairwise(rates)):
            return [f"{given} must not increase: each is the probability that a token and all before it are accepted"]
        if count is not None and len(rates) != count:
            return [f"{given} has {len(rates)} numbers, and must have {wanted}"]
        return []

    @property
    def conditional_rates(self) -> tuple[float, ...] | None:
        """The probability at each place of a draft that this token is accepted if all before it are; None unless
        ``rejection_sample_method`` is ``synthetic``."""
        if (rates := self.synthetic_acceptance_rates) is None:
            return None
        return tuple(rate / before if before else 0.0 for before, rate in zip((1.0, *rates), rates, strict=False))

    @property
    def with_head(self) -> bool:
        """Whether a layer of the checkpoint drafts tokens."""
        return self.method == "mtp"

    @property
    def by_the_model(self) -> bool:
        """Whether weights of the model draft. All sequences of a step then draft together."""
        return self.method in BY_THE_MODEL

    def drafted_rows(self, batch: int) -> int:
        """Maximum number of rows for drafted tokens in a decode step of ``batch`` sequences: as many as one sequence
        can draft, or as all can draft if all draft together."""
        return (self.num_speculative_tokens or 0) * (batch if self.by_the_model else 1)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Makes the config from the object of ``--speculative-config``. Raises ValueError for unknown names, a missing
        method, and invalid values."""
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in values if name not in names]:
            raise ValueError(f"{', '.join(map(repr, unknown))} is not one of {', '.join(names)}")
        if "method" not in values:
            raise ValueError(f"method is missing; it is one of {', '.join(METHODS)}")
        if wrong := wrong_json_types(cls, values):
            raise ValueError("; ".join(wrong))
        return cls(**values)

"""Output that follows a JSON schema: tokens that would break it are masked (XGrammar, arXiv:2411.15100)."""

from __future__ import annotations

import json
import re
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shadowkv.engine.request import RequestError

if TYPE_CHECKING:
    import xgrammar

    from shadowkv.models.tokenizer import Tokenizer

ANY_JSON: dict[str, Any] = {}
"""The schema that any JSON object or value satisfies."""

MAX_SCHEMA_CHARS = 2**17
MAX_SCHEMA_DEPTH = 200
"""Compile time grows with the square of both (half a second here, 15 seconds at 900 levels), cannot be cut short, and
a chain of 20,000 references overflows the compiler's stack."""

CACHE_BYTES = 2**29
"""Compiled grammars that are kept."""

LOG_PREFIX = re.compile(r"^.*(Check failed: (\(.*?\) is false: )?|\.(cc|h):\d+: )", re.DOTALL)
"""Time, source file and condition before what the compiler says."""

MAX_REASON_CHARS = 300
MAX_QUOTED_CHARS = 80


class Constraint:
    """Where one request stands in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        import xgrammar

        self._apply = xgrammar.apply_token_bitmask_inplace
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of tokens that may not come next to -inf, in place."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        self._apply(logits.unsqueeze(0), self._mask.to(logits.device))

    def accept(self, token: int) -> bool:
        """Takes the chosen token; False if it may not come next, as any where the grammar has no way on."""
        return bool(self._matcher.accept_token(token))

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_terminated())


class GrammarCompiler:
    """Compiles schemas for one model's vocabulary. May be used from any thread; a compilation lets the others run."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, sorted(stop_ids)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._lock = threading.Lock()

    def compile(self, schema: str) -> xgrammar.CompiledGrammar:
        """The grammar of a JSON schema (as JSON text); the compiler keeps it, so that the next time is quick.

        Raises RequestError where xgrammar is not installed, cannot follow the schema, or nothing follows it.
        """
        try:
            anything = _check(schema)
            with self._lock:
                compiler = self._compiler = self._compiler or self._build()
            return compiler.compile_builtin_json_grammar() if anything else compiler.compile_json_schema(schema)
        except ImportError as error:
            message = "JSON output needs xgrammar: install shadowkv[json] on the server"
            raise RequestError(message, "response_format") from error
        except (RuntimeError, ValueError) as error:  # RecursionError is one
            reason = LOG_PREFIX.sub("", str(error)).strip()[:MAX_REASON_CHARS]
            raise RequestError(f"the JSON schema cannot be followed: {reason}", "response_format") from error

    def constraint(self, schema: str) -> Constraint:
        """A fresh start in the grammar of ``schema``; raises RequestError as ``compile`` does."""
        return Constraint(self.compile(schema), self._vocab_size)

    def _build(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        vocabulary = [""] * self._vocab_size
        for text, token in self._tokenizer.vocabulary().items():
            if token < self._vocab_size:
                vocabulary[token] = text
        kind = xgrammar.VocabType.BYTE_LEVEL if self._tokenizer.is_byte_level else xgrammar.VocabType.BYTE_FALLBACK
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_type=kind, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids
        )
        threads = max(1, torch.get_num_threads())
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)


@lru_cache(maxsize=64)
def _check(schema: str) -> bool:
    """Raises ValueError or RecursionError for a schema that is too large or that nothing follows; whether all does."""
    if len(schema) > MAX_SCHEMA_CHARS:
        raise ValueError(f"it has {len(schema)} characters, {MAX_SCHEMA_CHARS} are supported")
    rules = json.loads(schema)
    references: dict[str, None] = {}
    level, depth = [rules], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        references |= {one["$ref"]: None for one in level if isinstance(one, dict) and isinstance(one.get("$ref"), str)}
        level = [child for one in level for child in _children(one)]
    for reference in references:
        if reference != "#" and not reference.startswith("#/"):  # the compiler would let anything through
            raise ValueError(f"$ref {reference[:MAX_QUOTED_CHARS]!r} must be '#' or begin with '#/'")
    if not _has_answer(rules, _answerable(rules, list(references))):
        raise ValueError("no finite JSON follows it: it requires itself again and again, or one of no alternatives")
    return bool(rules == ANY_JSON)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _answerable(rules: Any, references: list[str]) -> set[str]:
    """The references that some finite JSON follows: those that hold given the ones found before, until none is new."""
    found: set[str] = set()
    before = -1
    while before < len(found):
        before = len(found)
        for reference in references:
            if reference not in found and _has_answer(_resolve(rules, reference), found):
                found.add(reference)
        references.reverse()  # chains are written down in either order
    return found


def _has_answer(rules: Any, answerable: set[str]) -> bool:
    """Whether some finite JSON follows ``rules``; what cannot be told counts as yes."""
    if not isinstance(rules, dict):
        return rules is not False
    if "$ref" in rules:
        return not isinstance(rules["$ref"], str) or rules["$ref"] in answerable
    if "const" in rules or "enum" in rules:
        return True
    for key in ("anyOf", "oneOf"):
        if isinstance(rules.get(key), list):
            return any(_has_answer(one, answerable) for one in rules[key])
    kind, properties, required = (rules.get(key) for key in ("type", "properties", "required"))
    if kind in ("object", None) and isinstance(properties, dict) and isinstance(required, list):
        return all(_has_answer(properties[name], answerable) for name in properties if name in required)
    if kind == "array" and rules.get("minItems") and "prefixItems" not in rules:
        return _has_answer(rules.get("items", True), answerable)
    return True


def _resolve(rules: Any, reference: str) -> Any:
    """What ``#/path`` points at; True, any JSON, for what is not found: that is for the compiler to refuse."""
    for name in reference[1:].split("/")[1:]:
        if not isinstance(rules, dict) or name not in rules:
            return True
        rules = rules[name]
    return rules

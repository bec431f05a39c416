"""A model's vocabulary for the grammar compiler, and the compilation itself. Grammar processes use both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shadowkv.engine.structured.json_schema import compiler_reason, parse_schema, with_prefix_items
from shadowkv.grammar_text import choice_grammar, grammar_kind

if TYPE_CHECKING:
    import xgrammar

    from shadowkv.models.tokenization.tokenizer import Tokenizer

CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens.

    Attributes:
        texts: text of each token id; "" for an id without a token.
        is_byte_level: whether texts are written in GPT-2's byte-level alphabet.
        stop_ids: tokens that end an answer.
    """

    texts: list[str]
    is_byte_level: bool
    stop_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, stop_ids: frozenset[int]) -> Vocabulary:
        """The vocabulary of a tokenizer, for a model with ``size`` logits."""
        texts = [""] * size
        for text, token in tokenizer.vocabulary().items():
            if token < size:
                texts[token] = text
        return cls(texts, tokenizer.is_byte_level, sorted(stop_ids))

    def info(self) -> xgrammar.TokenizerInfo:
        """The vocabulary in XGrammar's form. Raises ImportError without xgrammar."""
        import xgrammar

        kind = xgrammar.VocabType.BYTE_LEVEL if self.is_byte_level else xgrammar.VocabType.BYTE_FALLBACK
        return xgrammar.TokenizerInfo(
            self.texts, vocab_type=kind, vocab_size=len(self.texts), stop_token_ids=self.stop_ids
        )

    def without_control_characters(self) -> bytes:
        """Returns a bit for each token: 1 if it has no control characters except line ends, or if it ends an answer.

        Line ends are white space in JSON. XGrammar accepts control characters in strings of limited length, where JSON
        does not allow them unescaped.
        """
        bits = np.zeros(-(-len(self.texts) // 32) * 32, bool)
        bits[: len(self.texts)] = [CONTROL.search(token) is None for token in self.info().decoded_vocab]
        bits[self.stop_ids] = True
        return np.packbits(bits, bitorder="little").tobytes()


def compile_schema(info: xgrammar.TokenizerInfo, schema: str, one_line: bool) -> xgrammar.CompiledGrammar:
    """Compiles a JSON schema or another grammar (``grammar_text``).

    Raises ValueError with the compiler's reason if it refuses the grammar, MemoryError if memory is too small.
    """
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=1)  # its cache serves a grammar's repeated parts
    try:
        if (other := grammar_kind(schema)) is not None:
            kind, rules = other
            if kind == "regex":
                return compiler.compile_regex(rules)
            if kind == "structural_tag":
                return compiler.compile_structural_tag(rules)
            return compiler.compile_grammar(choice_grammar(rules) if kind == "choice" else rules)
        if parse_schema(schema) == {}:  # any JSON
            return compiler.compile_builtin_json_grammar()
        return compiler.compile_json_schema(with_prefix_items(schema), any_whitespace=not one_line)
    except (RuntimeError, ValueError) as error:  # includes RecursionError
        if "bad_alloc" in str(error):
            raise MemoryError from error
        raise ValueError(compiler_reason(error)) from error

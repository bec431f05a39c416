"""A model's vocabulary as the grammar compiler takes it, and what that compiles with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowkv.engine.structured.grammar_text import choice_grammar, grammar_kind
from shadowkv.engine.structured.json_schema import check_schema, compiler_reason

if TYPE_CHECKING:
    import xgrammar

    from shadowkv.models.tokenization.tokenizer import Tokenizer

CACHE_BYTES = 2**28
"""Size of the parts of grammars that the compiler keeps: others have the same ones."""


@dataclass(frozen=True)
class Vocabulary:
    """Texts of the tokens by id, "" where there is none; how they are written; tokens that end an answer."""

    texts: list[str]
    is_byte_level: bool
    stop_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, stop_ids: frozenset[int]) -> Vocabulary:
        """A tokenizer's, for a model with ``size`` logits."""
        texts = [""] * size
        for text, token in tokenizer.vocabulary().items():
            if token < size:
                texts[token] = text
        return cls(texts, tokenizer.is_byte_level, sorted(stop_ids))

    def info(self) -> xgrammar.TokenizerInfo:
        """The same for the compiler; raises ImportError without xgrammar."""
        import xgrammar

        kind = xgrammar.VocabType.BYTE_LEVEL if self.is_byte_level else xgrammar.VocabType.BYTE_FALLBACK
        return xgrammar.TokenizerInfo(
            self.texts, vocab_type=kind, vocab_size=len(self.texts), stop_token_ids=self.stop_ids
        )


def new_compiler(info: xgrammar.TokenizerInfo, threads: int) -> xgrammar.GrammarCompiler:
    """A compiler that works with so many threads."""
    import xgrammar

    return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)


def compile_schema(compiler: xgrammar.GrammarCompiler, schema: str, one_line: bool) -> xgrammar.CompiledGrammar:
    """The grammar of a JSON schema, or of other rules (``grammar_text``); raises ValueError with the compiler's reason
    where it cannot be followed."""
    try:
        if (other := grammar_kind(schema)) is not None:
            kind, rules = other
            if kind == "regex":
                return compiler.compile_regex(rules)
            if kind == "structural_tag":
                return compiler.compile_structural_tag(rules)
            return compiler.compile_grammar(choice_grammar(rules) if kind == "choice" else rules)
        if check_schema(schema).anything:
            return compiler.compile_builtin_json_grammar()
        return compiler.compile_json_schema(schema, any_whitespace=not one_line)
    except (RuntimeError, ValueError) as error:  # includes RecursionError
        raise ValueError(compiler_reason(error)) from error

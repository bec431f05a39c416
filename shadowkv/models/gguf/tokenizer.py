"""Tokenizer of a GGUF file, rebuilt from its metadata: byte-level BPE (``gpt2``) or SentencePiece BPE (``llama``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from shadowkv.models.checkpoints.files import OTHER_MODEL, ModelFileError, naming
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.models.tokenization.tokenizer_files import library_errors

_CONTROL, _USER_DEFINED = 3, 4
_MAX_PIECE_CHARACTERS = 1024
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    # Digits are split first: "\n\n5" is a blank line and a digit, which GPT-2's own rule would split differently.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> str:
    return _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + _TAIL


def _words_with_marks() -> str:
    """A pattern for words that contain combining marks."""
    return _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _TAIL.replace(r"\p{L}", r"\p{L}\p{M}", 1)


def _cased_words() -> str:
    """A pattern for words. A word also ends before an upper-case letter, and includes a contraction such as 've."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = [f"{before}{upper}{first}{lower}{last}{_CONTRACTIONS}?" for first, last in ("*+", "+*")]
    return "|".join(words) + r"|\p{N}{1,3}" + _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)


def _split(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only])

    return build


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": _split(_words(r"\p{N}{1,3}")),
    "llama3": _split(_words(r"\p{N}{1,3}")),
    "llama-v3": _split(_words(r"\p{N}{1,3}")),
    "qwen2": _split(_words(r"\p{N}")),
    "qwen35": _split(_words_with_marks()),
    "gpt-4o": _split(_cased_words()),
}
"""Pre-tokenizers of byte-level vocabularies, by ``tokenizer.ggml.pre``."""


def tokenizer_from_gguf(file: GGUFFile, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
    """The file's tokenizer; raises ModelFileError for unsupported kinds and invalid tokenizers.

    If the file has an embedding, there must be a token for each row of the embedding.
    """
    kind = file.get("tokenizer.ggml.model", str)
    if kind not in _BUILDERS:
        reason = f"GGUF tokenizer {kind!r} is not supported; supported: {', '.join(_BUILDERS)}"
        raise ModelFileError(file.path, reason, OTHER_MODEL)
    embedding = "token_embd.weight"
    rows = file.shape(embedding)[0] if embedding in file.names else None
    tokens = file.list_of("tokenizer.ggml.tokens", str, length=rows)
    types = [1] * len(tokens)
    if file.value("tokenizer.ggml.token_type") is not None:
        types = file.list_of("tokenizer.ggml.token_type", int, length=len(tokens))
    added = {
        added_type: [
            AddedToken(token, normalized=False, special=added_type == _CONTROL)
            for token, token_type in zip(tokens, types)
            if token_type == added_type
        ]
        for added_type in (_CONTROL, _USER_DEFINED)
    }
    with naming(file.path), library_errors("the tokeniser"):
        backend = _BUILDERS[kind](file, tokens)
        backend.add_special_tokens(added[_CONTROL])
        backend.add_tokens(added[_USER_DEFINED])
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: _token_id(file, name, tokens) for role, name in roles.items()}
    adds_bos = file.get("tokenizer.ggml.add_bos_token", bool)
    if adds_bos is None:
        # Default: SentencePiece models start with BOS; byte-level ones do not, except Llama 3.
        adds_bos = kind == "llama" or _is_llama3(file)
    with naming(file.path):
        return Tokenizer(
            backend,
            special_tokens={role: tokens[token] for role, token in ids.items() if token is not None},
            eos_token_ids=eos_token_ids,
            chat_template=file.get("tokenizer.chat_template", str),
            add_bos=adds_bos,
            add_eos=bool(file.get("tokenizer.ggml.add_eos_token", bool)),
        )


def _token_id(file: GGUFFile, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token = file.get(key, int)
    if token is not None and not 0 <= token < len(tokens):
        raise ModelFileError(file.path, f"{key}={token} is not in the vocabulary of {len(tokens)} tokens")
    return token


def _is_llama3(file: GGUFFile) -> bool:
    return file.get("tokenizer.ggml.pre", str) in ("llama-bpe", "llama3", "llama-v3")


def _byte_level(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str) or "default"
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    merges = []
    for merge in file.list_of("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=_is_llama3(file)))
    if pre in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = file.list_of("tokenizer.ggml.scores", float, length=len(tokens))
    if any(math.isnan(score) for score in scores):
        raise ValueError("tokenizer.ggml.scores has NaN")
    # The length of tokens is limited because merges are derived from every split of a token into two.
    if max(map(len, tokens)) > _MAX_PIECE_CHARACTERS:
        raise ValueError(f"tokenizer.ggml.tokens has a token of more than {_MAX_PIECE_CHARACTERS} characters")
    unknown = _token_id(file, "unknown", tokens) or 0
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(tokens, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    if file.architecture == "phi3" and prefix:
        # Phi-3 adds a space before every piece of text between special tokens, even if the piece begins with one.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules of a SentencePiece BPE vocabulary, best first.

    SentencePiece merges the neighbours that form the token with the highest score. The equivalent rules are all ways to
    split a token into two tokens, ordered by the token's score.
    """
    known = {token: index for index, token in enumerate(tokens)}
    rules = []
    for token, score in zip(tokens, scores):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                rules.append((-score, known[left], known[right], left, right))
    return [(left, right) for *_, left, right in sorted(rules)]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}

"""What is said of a text before it is tokenised holds for all: no fewer tokens than that, and in pieces the same."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from shadowkv.models.gguf.tokenizer import PRE_TOKENIZERS, merges_from_scores
from shadowkv.models.loader import LoadedModel
from shadowkv.models.tokenization.text_encoder import TextEncoder, TokenizerPanic
from shadowkv.models.tokenization.text_form import BYTE_ALPHABET, NFC_SHRINKS, WORD_CHARS, TextForm

BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = [
    "the",
    "lighthouse",
    "don't",
    "WE'LL",
    "naïve",
    "中文，字。",
    "12345",
    "e\u0301",
    "\u212a",
    "a(b)",
    "x=1;",
    "한글",
]
SPACES = [
    " ",
    "  ",
    " " * 9,
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
    " \n ",
    "\u200b",
    "\x1c",
    "\x04",
    " \x04 ",
    "\U00040000",
    "KK",
]
TOKENS = ["<|im_end|>", "<s>", "<mask>", "user name", "[PAD]", "fi", "K"]
TEXTS = st.lists(
    st.sampled_from([*WORDS, *SPACES, *TOKENS, "'", "'s", "😀", "=" * 70]) | st.text(max_size=4), max_size=60
).map("".join)


def of_bytes(
    split: Any,
    *added: AddedToken,
    normalizer: Any = None,
    merged: tuple[str, ...] = (),
    lacking: bytes = b"",
    **options: Any,
) -> tokenizers.Tokenizer:
    """A byte-level BPE with a token for each of some words and for runs of blanks, and all their beginnings."""
    texts = (*WORDS, *merged, *(f" {word}" for word in WORDS), " " * 16, "\n\n", "=" * 64)
    words = ["".join(BYTE_ALPHABET[byte] for byte in text.encode()) for text in texts]
    letters = [letter for byte, letter in enumerate(BYTE_ALPHABET) if byte not in lacking]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    merges = []
    for word in words:
        if not {*word} <= {*letters}:
            continue
        for end in range(1, len(word)):
            if word[: end + 1] not in vocabulary:
                merges.append((word[:end], word[end]))
                vocabulary[word[: end + 1]] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    backend.normalizer, backend.pre_tokenizer = normalizer, split
    backend.add_tokens([*added])
    return backend


def of_sentencepiece(normalizer: Any, split: Any, *added: AddedToken, merged: tuple[str, ...] = ()) -> Any:
    """A BPE with byte fallback, whose words begin with blanks."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*(f"▁{word}" for word in WORDS), *WORDS, "▁" * 16, "\n\n", *merged]
    starts = (word[:end] for word in words for end in range(1, len(word) + 1))
    tokens = [*dict.fromkeys(["<unk>", *bytes_, "▁", *(letter for word in words for letter in word), *starts])]
    merges = merges_from_scores(tokens, [float(-index) for index in range(len(tokens))])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    if split is not None:
        backend.pre_tokenizer = split
    backend.add_tokens([*added])
    return backend


def split_by(*patterns: str, behavior: str = "isolated") -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior=behavior) for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, BYTES_ONLY])


def added(text: str, **options: Any) -> AddedToken:
    return AddedToken(text, **{"normalized": False, **options})


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BLANKS = normalizers.Replace(" ", "▁")
MIDDLE = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
KNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{name: lambda build=build: of_bytes(build()) for name, build in PRE_TOKENIZERS.items()},
    "special tokens": lambda: of_bytes(GPT2, added("<|im_end|>"), added("<s>")),
    "tokens with blanks": lambda: of_bytes(GPT2, added("user name"), added("e,"), added("K")),
    "tokens that strip": lambda: of_bytes(GPT2, added("<mask>", lstrip=True), added("fi", rstrip=True, lstrip=True)),
    "composed": lambda: of_bytes(GPT2, added("K", normalized=True), normalizer=normalizers.NFC()),
    "bytes that are dropped": lambda: of_bytes(GPT2, lacking=b"\x04\xf1\xff\xc3"),
    "bytes that are one token": lambda: of_bytes(GPT2, lacking=b"\x04\xf1", unk_token="the", fuse_unk=True),
    "composed, controls that are dropped": lambda: of_bytes(GPT2, normalizer=normalizers.NFC(), lacking=b"\x04\xf1"),
    "composed, letters that are dropped": lambda: of_bytes(GPT2, normalizer=normalizers.NFC(), lacking=b"K"),
    "not split, bytes that are dropped": lambda: of_bytes(BYTES_ONLY, lacking=b"\x04"),
    "composed tokens that strip": lambda: of_bytes(
        GPT2, added("K", normalized=True, rstrip=True), normalizer=normalizers.NFC()
    ),
    "a single word": lambda: of_bytes(GPT2, added("fi", single_word=True), added("(b)", single_word=True)),
    "not split": lambda: of_bytes(BYTES_ONLY),
    "not split, tokens of several words": lambda: of_bytes(BYTES_ONLY, merged=("the lighthouse",)),
    "split in parts": lambda: of_bytes(split_by(r"\p{N}{1,3}")),
    "split in parts, tokens of several words": lambda: of_bytes(split_by(r"\p{N}{1,3}"), merged=("the lighthouse",)),
    "split twice": lambda: of_bytes(split_by(r"\p{N}", MIDDLE)),
    "a prefix": lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "sentencepiece": lambda: of_sentencepiece(BLANKS, None, added("<s>")),
    "sentencepiece, tokens that strip": lambda: of_sentencepiece(BLANKS, None, added("fi", rstrip=True)),
    "sentencepiece, tokens of several words": lambda: of_sentencepiece(BLANKS, None, merged=("the▁lighthouse",)),
    "sentencepiece, split": lambda: of_sentencepiece(BLANKS, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace": lambda: of_sentencepiece(
        None, pre_tokenizers.Metaspace(split=False, prepend_scheme="first"), added("<mask>", lstrip=True), added("<s>")
    ),
    "metaspace, split": lambda: of_sentencepiece(None, pre_tokenizers.Metaspace(), added("<s>")),
    "a prepended blank": lambda: of_sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), BLANKS]), None, added("<s>", rstrip=True)
    ),
}
UNKNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "a blank is removed": lambda: of_bytes(split_by(" ", behavior="removed")),
    "lines": lambda: of_bytes(split_by(r"[^\n]*\n|[^\n]+")),
    "lines, and words": lambda: of_bytes(split_by(rf"[^\n]+|{MIDDLE}"), merged=("the lighthouse",)),
    "stripped": lambda: of_bytes(GPT2, normalizer=normalizers.Strip()),
    "replaced": lambda: of_bytes(GPT2, normalizer=normalizers.Replace("the", "")),
    "sentencepiece, stripped": lambda: of_sentencepiece(normalizers.Sequence([normalizers.Strip(), BLANKS]), None),
    "words": lambda: tokenizers.Tokenizer(models.WordLevel({"the": 0, "<unk>": 1}, unk_token="<unk>")),
    "a lacking alphabet": lambda: tokenizers.Tokenizer(models.BPE(vocab={"t": 0}, merges=[])),
    "merged at random": lambda: of_bytes(GPT2, dropout=0.5),
    "suffixes": lambda: of_bytes(GPT2, end_of_word_suffix="</w>"),
}


@pytest.fixture(scope="module")
def built() -> Callable[[str], TextEncoder]:
    kept: dict[str, TextEncoder] = {}

    def encoder(name: str) -> TextEncoder:
        if name not in kept:
            kept[name] = TextEncoder((KNOWN | UNKNOWN)[name]())
        return kept[name]

    return encoder


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.models.tokenization.text_form.PIECE_CHARS", 3)
    monkeypatch.setattr("shadowkv.models.tokenization.text_encoder.PIECE_CHARS", 3)


def ids_of(backend: tokenizers.Tokenizer, text: str, special: bool = False) -> list[int]:
    return list(backend.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
@given(text=TEXTS)
def test_there_are_no_fewer_tokens_than_said(built: Callable[[str], TextEncoder], name: str, text: str) -> None:
    encoder = built(name)
    if name != "merged at random":
        assert encoder.form.least_tokens(text) <= len(ids_of(encoder.backend, text))


EXTREMES = (
    *(" " * 5000 + token + " " * 5000 for token in ("<mask>", "fi", "K", "\u212a")),
    *(
        text * 2000
        for text in ("\x04", "\U00040000", "\u212a", "K", "e\u0301", "\u1112\u1161\u11ab", "=" * 64, " ", "the")
    ),
)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_nor_where_most_of_a_text_comes_to_nothing(built: Callable[[str], TextEncoder], name: str) -> None:
    encoder = built(name)
    for text in EXTREMES:
        assert encoder.form.least_tokens(text) <= len(ids_of(encoder.backend, text))


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
@given(text=TEXTS)
def test_in_pieces_are_the_same_tokens(built: Callable[[str], TextEncoder], name: str, text: str) -> None:
    encoder = built(name)
    if name != "merged at random":
        assert "".join(encoder.form.pieces(text)) == text
        assert encoder.encode(text, add_special_tokens=False) == ids_of(encoder.backend, text)


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_what_is_not_known_nothing_is_said(built: Callable[[str], TextEncoder], name: str) -> None:
    form = built(name).form
    assert form.place is None
    assert list(form.pieces("the " * 2**18)) == ["the " * 2**18]
    assert form.least_tokens("the " * 1000) == 0 or "lines" in name  # they leave nothing out


UNCUT = {"not split, tokens of several words", "split in parts, tokens of several words"}
UNCUT |= {"sentencepiece, tokens of several words", "a single word", "a prefix", "a prepended blank"}
UNCUT |= {"not split, bytes that are dropped"}
UNBOUND = {"composed tokens that strip", "composed, letters that are dropped"}


@pytest.mark.parametrize("name", KNOWN)
def test_of_what_is_known_something_is_said(built: Callable[[str], TextEncoder], name: str) -> None:
    form, text = built(name).form, "the lighthouse " * 10_000
    assert (len([*form.pieces(text)]) > 1) == (name not in UNCUT)
    assert (form.least_tokens(text) > 100) == (name not in UNBOUND)


def test_the_real_model(smollm2: LoadedModel) -> None:
    encoder = TextEncoder(smollm2.tokenizer.backend)
    assert encoder.form.longest == 81
    mixed = "The lighthouse stood\n\n on the rock, 1234 m (don't!) — 中文。\t{'a': [1, 2]}\r\n  x" + "=" * 90
    for text in (mixed * 5_000, "a" * 100_000 + " b" * 100_000, "中文，字。" * 60_000, " " * 200_000, "😀" * 70_000):
        ids = encoder.encode(text, add_special_tokens=False)
        assert ids == ids_of(encoder.backend, text)
        assert len(text) / 81 <= encoder.form.least_tokens(text) <= len(ids)
    assert encoder.form.least_tokens("é" * 81) == 2  # bytes are counted


def test_special_tokens_come_once(short_pieces: None) -> None:
    backend = of_bytes(GPT2, added("<s>"), added("</s>"))
    ids = {text: backend.token_to_id(text) for text in ("<s>", "</s>")}
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[*ids.items()])
    text = "the lighthouse <s> the lighthouse"
    assert TextEncoder(backend).encode(text, add_special_tokens=True) == ids_of(backend, text, special=True)
    assert TextEncoder(backend).encode(text, add_special_tokens=False) == ids_of(backend, text)


def test_a_single_word_that_is_too_long() -> None:
    encoder = TextEncoder(of_bytes(GPT2))
    with pytest.raises(ValueError, match="characters 131074 to 589826 are one word"):
        encoder.encode("the, " * 14_000 + "a" * WORD_CHARS * 2, add_special_tokens=False)
    assert encoder.encode("a" * WORD_CHARS, add_special_tokens=False)


@pytest.mark.parametrize("text", ["\ud800", "a " * 50_000 + "\udfff"])
def test_a_surrogate_is_refused_as_ever(text: str) -> None:
    encoder = TextEncoder(of_bytes(GPT2))
    assert encoder.form.least_tokens(text) >= 1
    with pytest.raises(TypeError):
        encoder.encode(text, add_special_tokens=False)


def test_nfc_shrinks_no_text_to_less() -> None:
    for number in range(sys.maxunicode + 1):
        letter = chr(number)
        if not unicodedata.is_normalized("NFC", letter):
            assert len(unicodedata.normalize("NFC", letter).encode()) * NFC_SHRINKS >= len(letter.encode())
        elif not 0xD800 <= number <= 0xDFFF:  # what it may have been made of, each part from the longest that gives it
            parts = unicodedata.normalize("NFD", letter)
            assert sum(map(_longest_source, parts)) <= len(letter.encode()) * NFC_SHRINKS


def _longest_source(letter: str) -> int:
    return SOURCES.get(letter, len(letter.encode()))


SOURCES: dict[str, int] = {}
for _number in range(sys.maxunicode + 1):
    if len(_composed := unicodedata.normalize("NFC", chr(_number))) == 1 and not 0xD800 <= _number <= 0xDFFF:
        SOURCES[_composed] = max(SOURCES.get(_composed, 0), len(chr(_number).encode()))


def test_a_pattern_that_never_ends_is_an_error() -> None:
    backend = of_bytes(split_by("(a+)+$|(a|aa)+b"))
    with pytest.raises(TokenizerPanic, match="panicked"):
        TextEncoder(backend).encode("a" * 60 + "c", add_special_tokens=False)
    assert TextForm.of(backend).place is None


def test_special_tokens_are_around_long_texts_whatever_letters_the_tokeniser_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shadowkv.models.tokenization.text_form.PIECE_CHARS", 8)
    monkeypatch.setattr("shadowkv.models.tokenization.text_encoder.PIECE_CHARS", 8)
    backend = tokenizers.Tokenizer(models.BPE(vocab={"A": 0, "C": 1, "G": 2, "T": 3, "<s>": 4}, merges=[]))
    backend.add_special_tokens(["<s>"])
    template = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 4)])
    backend.post_processor = template
    encoder = TextEncoder(backend)
    assert encoder.encode("ACGT" * 10, add_special_tokens=True) == [4, *[0, 1, 2, 3] * 10, 4]
    assert encoder.encode("ACGT" * 10, add_special_tokens=False) == [0, 1, 2, 3] * 10
    assert encoder.encode("x" * 40, add_special_tokens=True) == backend.encode("x" * 40).ids == [4, 4]

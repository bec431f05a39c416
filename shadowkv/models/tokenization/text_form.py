"""What follows from a tokeniser's files about any text, before it is tokenised: a least number of tokens, and places
where it may be cut without changing any of them.

Of a kind of tokeniser that is not known here nothing follows: a text may then have no token at all, and is one piece.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from shadowkv.models.tokenization.byte_alphabet import BYTE_ALPHABET

PIECE_CHARS = 2**16
"""Characters after which a text is cut at the next place: tokenising takes some 100 bytes for each."""

WORD_CHARS = 2**19
"""Longest piece, where there is no such place: half a second and 50 MiB."""

NFC_SHRINKS = 4
"""NFC makes no text shorter than a quarter of its bytes (at worst U+0390, two bytes, of seven)."""

NFC_KEEPS = frozenset((*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)))
"""Bytes of which a text's NFC has as many as the text: control characters, and what begins no assigned character."""

LETTERS = "A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣"
"""Some that are letters in all versions of Unicode, whichever the library has."""

PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~，。、！？；：'
"""Signs before which a letter's word ends; an apostrophe may go on with it."""

METASPACE = "\u2581"
"""What SentencePiece writes for a blank."""

BYTE_BLANK, BYTE_SPACES = BYTE_ALPHABET[ord(" ")], "".join(BYTE_ALPHABET[ord(space)] for space in " \t\n\v\f\r")
"""What byte-level vocabularies write for a blank, and for all white space of ASCII."""


def _cased_words() -> Iterator[str]:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    for first, last in (("*", "+"), ("+", "*"), ("*+", "+"), ("+*", "*"), ("+", "*+")):
        for contraction in ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"):
            yield rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{first}{lower}{last}{contraction}"


WORDS = frozenset((r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?\p{L}+", *_cased_words()))
SIGNS = frozenset((r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"))
OTHERS = frozenset(
    ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
    + (r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+")
)
"""Alternatives of the patterns that GPT-2, Llama 3, Qwen, GLM, gpt-oss and others split text by, in three groups.

Each matches runs of a kind of characters. None goes on with a blank behind another character, nor with one of
``PUNCTUATION`` behind a letter, none depends on whether the text goes on there, and none looks back. So a text that is
cut there is split as the whole.
"""


@dataclass(frozen=True)
class TextForm:
    """What is known of all texts of a tokeniser.

    Attributes:
        longest: most bytes, or characters, of a text that a token stands for; None if that is not known.
        is_in_bytes: which of both.
        is_composed: whether these are counted in the text's NFC.
        dropped: bytes that may come to no token.
        stripping: tokens that take the white space beside them along, of any length.
        place: matches a character and the next one where a text may be cut between them; None if it never may.
    """

    longest: int | None = None
    is_in_bytes: bool = True
    is_composed: bool = False
    dropped: bytes = b""
    stripping: tuple[str, ...] = ()
    place: re.Pattern[str] | None = None

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TextForm:
        """What is known of the texts of a tokeniser."""
        model, added = backend.model, [*backend.get_added_tokens_decoder().values()]
        cuts_texts = backend.truncation or backend.padding
        if cuts_texts or not isinstance(model, tokenizers.models.BPE) or model.dropout:
            return cls()
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return cls()
        vocabulary = backend.get_vocab(with_added_tokens=False)
        steps = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
        if steps[1] and steps[1][-1]["type"] == "ByteLevel":
            form = _of_bytes(*steps, added, vocabulary)
        elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            form = _of_sentencepiece(*steps, added, vocabulary)
        else:  # all characters that are not in it may become one token, or none
            return cls()
        strips = [token for token in added if token.lstrip or token.rstrip]
        if any(token.normalized for token in strips):  # where one is depends on the normaliser
            form = replace(form, longest=None)
        return replace(form, stripping=tuple(token.content for token in strips))

    def least_tokens(self, text: str) -> int:
        """A number of tokens than which the text has no fewer."""
        if self.longest is None or any(token in text for token in self.stripping):
            return 0
        size = len(text)
        if self.is_in_bytes:
            size = len(text.encode(errors="surrogatepass").translate(None, self.dropped))
            if self.is_composed and not text.isascii():
                size = -(-size // NFC_SHRINKS)
        return -(-size // self.longest)

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces whose tokens, one after the other, are those of the whole.

        Raises ValueError where one of more than ``WORD_CHARS`` cannot be cut.
        """
        start = 0
        while self.place is not None and len(text) - start > PIECE_CHARS:
            found = self.place.search(text, start + PIECE_CHARS - 1, start + WORD_CHARS + 1)
            if found is None and len(text) - start <= WORD_CHARS:
                break
            if found is None:
                one = f"characters {start + PIECE_CHARS} to {start + WORD_CHARS} are one word, or blanks alone"
                raise ValueError(f"{one}: that is too much at once for this model's tokeniser; break it up")
            yield text[start : found.start() + 1]
            start = found.start() + 1
        yield text[start:]


def _of_bytes(
    normalizers: list[dict[str, Any]], splits: list[dict[str, Any]], added: list[Any], vocabulary: dict[str, int]
) -> TextForm:
    if normalizers not in ([], [{"type": "NFC"}]):
        return TextForm()
    longest = max(*map(len, vocabulary), *(len(token.content.encode()) for token in added), 1)
    dropped = bytes(byte for byte, letter in enumerate(BYTE_ALPHABET) if letter not in vocabulary)
    is_counted = all(map(_drops_nothing, splits)) and not (normalizers and {*dropped} - NFC_KEEPS)
    form = TextForm(longest if is_counted else None, is_composed=bool(normalizers), dropped=dropped)
    if not all(map(_is_known, splits)):
        return form
    whole = [*(token.content for token in added), *(f"{token.content} " for token in added if token.rstrip)]
    if any(map(_splits_words, splits)):
        return replace(form, place=_place(added, whole, PUNCTUATION))
    # What is not split may be cut where no token has these two characters.
    crossing = re.compile(f"[^{BYTE_SPACES}]{BYTE_BLANK}")
    return form if dropped or any(map(crossing.search, vocabulary)) else replace(form, place=_place(added, whole, ""))


def _of_sentencepiece(
    normalizers: list[dict[str, Any]], splits: list[dict[str, Any]], added: list[Any], vocabulary: dict[str, int]
) -> TextForm:
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
    first = {"type": "Prepend", "prepend": METASPACE}
    on_blanks = [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]
    by_metaspace = [split.get("replacement") for split in splits] == [METASPACE]
    if normalizers not in ([], [blanks], [first, blanks]) or not (not splits or splits == on_blanks or by_metaspace):
        return TextForm()
    longest = max(*map(len, vocabulary), *(len(token.content) for token in added), 1)
    form = TextForm(longest, is_in_bytes=False)
    if first in normalizers or not (normalizers or by_metaspace) or METASPACE not in vocabulary:
        return form  # each piece would begin with a blank, or has none
    whole = [*(token.content for token in added), *(f"{token.content} " for token in added if token.rstrip)]
    return replace(form, place=_place(added, [*whole, *(text.replace(METASPACE, " ") for text in vocabulary)], ""))


def _steps(component: Any) -> list[dict[str, Any]]:
    """What a normaliser or pre-tokeniser does one after the other, as its file has it."""
    if component is None:
        return []
    stated = json.loads(component.__getstate__())
    return list(stated.get("normalizers") or stated.get("pretokenizers") or [stated])


def _drops_nothing(split: dict[str, Any]) -> bool:
    return split["type"] in ("ByteLevel", "Digits") or (split["type"] == "Split" and split["behavior"] != "Removed")


def _is_known(split: dict[str, Any]) -> bool:
    """Whether a text that is cut at a place is split as the whole."""
    if split["type"] == "ByteLevel":
        return not split["add_prefix_space"]
    if split["type"] == "Digits":
        return True
    return split["type"] == "Split" and set(_alternatives(split)) <= WORDS | SIGNS | OTHERS


def _splits_words(split: dict[str, Any]) -> bool:
    """Whether a known split never has the characters around a place in one word."""
    if split["type"] == "ByteLevel":
        return bool(split["use_regex"])
    alternatives = set(_alternatives(split))
    return bool(alternatives & WORDS and alternatives & SIGNS)


def _alternatives(split: dict[str, Any]) -> list[str]:
    pattern = split.get("pattern", {}).get("Regex")
    if pattern is None or split["behavior"] != "Isolated" or split["invert"]:
        return [""]
    # Up to a bar that is neither in brackets nor in parentheses; these are not nested in what is known.
    return re.findall(r"(?:\\.|\[(?:\\.|[^\]])*\]|\((?:\\.|\[[^\]]*\]|[^)])*\)|[^|])+", pattern)


def _place(added: Iterable[Any], whole: Iterable[str], signs: str) -> re.Pattern[str] | None:
    """Matches two characters between which no text of ``whole`` is ever cut, the second one a blank or a sign."""
    if any(token.single_word for token in added):  # whether it is one depends on what is beside it
        return None
    texts = {form for text in whole for form in (text, unicodedata.normalize("NFC", text))}
    ends = {match[0] for text in texts for match in re.findall(r"\S ", text)}
    kept = [sign for sign in signs if not any(re.search(f"[{LETTERS}]{re.escape(sign)}", text) for text in texts)]
    blank = f"[^\\s{re.escape(''.join(sorted(ends)))}] "
    return re.compile(f"{blank}|[{LETTERS}][{re.escape(''.join(kept))}]" if kept else blank)

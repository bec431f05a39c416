"""Derives properties of texts from a tokenizer's files, without tokenizing: a lower bound on the number of tokens, and
places where a text can be cut without changing any token.

For an unknown kind of tokenizer nothing can be derived: the lower bound is 0, and a text is one piece.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

PIECE_CHARS = 2**16
"""Number of characters after which a text is cut at the next possible place. Texts are cut because tokenizing takes
about 100 bytes of memory per character."""

WORD_CHARS = 2**19
"""Maximum length of a piece; a text that cannot be cut within it is refused. Tokenizing such a piece takes half a
second and 50 MiB."""

NFC_SHRINKS = 4
"""NFC shortens no text to less than a quarter of its bytes (the worst case is U+0390: a text of seven bytes can become
this character, which has two bytes)."""

NFC_KEEPS = frozenset((*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)))
"""NFC does not change how often these bytes occur in a text: control characters, and bytes with which no assigned
character begins."""

LETTERS = "A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣"
"""Characters that are letters in every version of Unicode, so also in the version that the tokenizers library uses."""

PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~，。、！？；：'
"""Characters before which a word ends; an apostrophe is not among them, since a word can continue after it."""

METASPACE = "\u2581"
"""SentencePiece's character for a blank."""


def _alphabet() -> tuple[str, ...]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, shifted = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + shifted))
            shifted += 1
    return tuple(characters)


BYTE_ALPHABET = _alphabet()
"""The alphabet of byte-level BPE (GPT-2's convention): a printable character for each byte. Non-printing bytes,
including the space, get characters from U+0100 on."""

BYTE_BLANK, BYTE_SPACES = BYTE_ALPHABET[ord(" ")], "".join(BYTE_ALPHABET[ord(space)] for space in " \t\n\v\f\r")
"""Byte-level vocabularies' characters for a blank, and for all ASCII white space."""


def _cased_words() -> Iterator[str]:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    for first, last in (("*", "+"), ("+", "*"), ("*+", "+"), ("+*", "*"), ("+", "*+")):
        for contraction in ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"):
            yield rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{first}{lower}{last}{contraction}"


WORDS = frozenset((r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?\p{L}+", *_cased_words()))
SIGNS = frozenset(
    (r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*")
    + (r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",)
)
OTHERS = frozenset(
    ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
    + (r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+")
)
"""Alternatives of the patterns by which GPT-2, Llama 3, Qwen, GLM, gpt-oss and others split texts, in three groups.

Each alternative matches characters of one kind. No match contains a blank that follows another character, or one of
``PUNCTUATION`` that follows a letter. So a text can be cut before such a blank or punctuation mark. The two pieces are
split as the whole text would be, because no alternative looks back or depends on whether the text continues.
"""


@dataclass(frozen=True)
class TextForm:
    """What is known of every text that a tokenizer is given.

    Attributes:
        longest: maximum number of bytes, or characters, of text that one token stands for; None if unknown.
        is_in_bytes: whether ``longest`` is in bytes.
        is_composed: whether the tokenizer first normalises the text to NFC, so that the bytes of the NFC form count.
        dropped: bytes of a text for which there may be no token.
        stripping: tokens that also absorb the white space beside them, of any length.
        place: matches two characters between which a text can be cut; None if no such characters are known.
    """

    longest: int | None = None
    is_in_bytes: bool = True
    is_composed: bool = False
    dropped: bytes = b""
    stripping: tuple[str, ...] = ()
    place: re.Pattern[str] | None = None

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TextForm:
        """The properties of a tokenizer's texts."""
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
        else:  # several unknown characters can become one token, or none
            return cls()
        strips = [token for token in added if token.lstrip or token.rstrip]
        if any(token.normalized for token in strips):  # these match in the normalised text, which is unknown here
            form = replace(form, longest=None)
        return replace(form, stripping=tuple(token.content for token in strips))

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text."""
        if self.longest is None or any(token in text for token in self.stripping):
            return 0
        size = len(text)
        if self.is_in_bytes:
            size = len(text.encode(errors="surrogatepass").translate(None, self.dropped))
            if self.is_composed and not text.isascii():
                size = -(-size // NFC_SHRINKS)
        return -(-size // self.longest)

    def pieces(self, text: str) -> Iterator[str]:
        """Pieces of the text whose tokens, joined, are the tokens of the whole text.

        Raises ValueError if a piece would exceed ``WORD_CHARS``.
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
    # If the pre-tokenizer does not split words, a text can be cut between two characters that are never neighbours in a
    # token.
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
        return form  # a blank would be added or removed at the beginning of each piece
    whole = [*(token.content for token in added), *(f"{token.content} " for token in added if token.rstrip)]
    return replace(form, place=_place(added, [*whole, *(text.replace(METASPACE, " ") for text in vocabulary)], ""))


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in the form that tokenizer.json has."""
    if component is None:
        return []
    stated = json.loads(component.__getstate__())
    return list(stated.get("normalizers") or stated.get("pretokenizers") or [stated])


def _drops_nothing(split: dict[str, Any]) -> bool:
    return split["type"] in ("ByteLevel", "Digits") or (split["type"] == "Split" and split["behavior"] != "Removed")


def _is_known(split: dict[str, Any]) -> bool:
    """Whether cutting a text at ``TextForm.place`` and splitting each piece gives the same result as splitting the
    whole text."""
    if split["type"] == "ByteLevel":
        return not split["add_prefix_space"]
    if split["type"] == "Digits":
        return True
    return split["type"] == "Split" and set(_alternatives(split)) <= WORDS | SIGNS | OTHERS


def _splits_words(split: dict[str, Any]) -> bool:
    """Whether a known split always separates the two characters that ``TextForm.place`` matches."""
    if split["type"] == "ByteLevel":
        return bool(split["use_regex"])
    alternatives = set(_alternatives(split))
    return bool(alternatives & WORDS and alternatives & SIGNS)


def _alternatives(split: dict[str, Any]) -> list[str]:
    pattern = split.get("pattern", {}).get("Regex")
    if pattern is None or split["behavior"] != "Isolated" or split["invert"]:
        return [""]
    # Splits at bars outside brackets and parentheses, which known patterns do not nest.
    return re.findall(r"(?:\\.|\[(?:\\.|[^\]])*\]|\((?:\\.|\[[^\]]*\]|[^)])*\)|[^|])+", pattern)


def _place(added: Iterable[Any], whole: Iterable[str], signs: str) -> re.Pattern[str] | None:
    """Returns a pattern for two characters between which a text can be cut without cutting any text of ``whole``. The
    second character is a blank or one of ``signs``. Returns None if some added token must be a single word."""
    if any(token.single_word for token in added):  # characters beside such a text decide whether it is a token
        return None
    texts = {form for text in whole for form in (text, unicodedata.normalize("NFC", text))}
    ends = {match[0] for text in texts for match in re.findall(r"\S ", text)}
    kept = [sign for sign in signs if not any(re.search(f"[{LETTERS}]{re.escape(sign)}", text) for text in texts)]
    blank = f"[^\\s{re.escape(''.join(sorted(ends)))}] "
    return re.compile(f"{blank}|[{LETTERS}][{re.escape(''.join(kept))}]" if kept else blank)

"""Encodes chat prompts so that only the template's special tokens are special; special tokens in messages are plain
text.

This corresponds to ``split_special_tokens`` in transformers, and to llama.cpp without ``parse_special``. Added tokens
that are not special (``<think>``, ``<tool_call>``) are recognised everywhere: they belong to the content of messages,
not to the structure of the conversation, and earlier messages of the assistant contain them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import tokenizers

from shadowkv.models.tokenization.text_encoder import TextEncoder

OWN_FIELDS = frozenset(("role", "type"))
"""Fields of messages and content parts. Their values get no marks: each is one of a few words, and templates compare
the value with these words."""

CALLS = "tool_calls"
"""Field of messages that has JSON with arbitrary keys and with words that templates look up. The JSON of tools has such
keys and words, too."""


class ChatEncoder:
    """Distinguishes the template's special tokens from those in the messages' texts.

    If a text contains a special token's string, a mark is put after the string's first character before rendering. The
    mark is a random number, which survives whatever a template does to texts (trimming, escaping, JSON). In the
    rendered prompt, strings that are still intact are the template's own.

    Args:
        texts: the encoder of prompts that are not chats. It recognises special tokens in their texts.
    """

    def __init__(self, texts: TextEncoder) -> None:
        self._plain = texts
        added = texts.backend.get_added_tokens_decoder()
        self._special = [token.content for token in added.values() if token.special]
        self._beginnings = {text[:size] for text in self._special for size in range(1, len(text))}
        self._ends = {text[size:] for text in self._special for size in range(1, len(text))}
        self._longest = max(map(len, self._special), default=0)
        self._mark = f"{secrets.randbelow(10**30):030}"
        longest_first = sorted(self._special, key=len, reverse=True)
        # A mark after an intact string means that at least its last character belongs to a message.
        self._whole = re.compile(f"({'|'.join(map(re.escape, longest_first))})(?!{self._mark})")

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[Any], list[Any] | None] | None:
        """The messages and tools with marks in their texts; None if no text needs a mark."""
        if not self._special:
            return None
        marked = [self._with_marks(message) for message in messages]
        marked_tools = None if tools is None else [self._json_with_marks(tool) for tool in tools]
        same = marked == list(messages) and (tools is None or marked_tools == list(tools))
        return None if same else (marked, marked_tools)

    def encode(self, rendered: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of the prompt ``rendered`` from marked messages. ``add_special_tokens`` is as in
        ``TextEncoder.encode``."""
        texts, names = self._renamed
        text = self.without_marks(self._whole.sub(lambda match: names[match.group()], rendered))
        return texts.encode(text, add_special_tokens)

    def without_marks(self, text: str) -> str:
        """Removes the marks from a text."""
        return text.replace(self._mark, "")

    def prepare(self) -> None:
        """Builds in advance what the first prompt with marks, or the first long prompt, would wait for."""
        _ = self._plain.form, self._renamed[0].form

    @cached_property
    def _renamed(self) -> tuple[TextEncoder, dict[str, str]]:
        """Returns a text encoder in which special tokens have other names, and a map from special tokens to these
        names. No message can contain the names."""
        secret = secrets.token_hex(16)
        names = {text: f"\ue000{secret}:{number}\ue001" for number, text in enumerate(self._special)}
        source = msgspec.json.decode(self._plain.backend.to_str())  # with 150,000 tokens, a second faster than json
        for token in source["added_tokens"]:
            if token["special"]:
                token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
        model = source["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if "merges" in model:  # merges made from scores can result in special tokens
            model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        return TextEncoder(tokenizers.Tokenizer.from_buffer(msgspec.json.encode(source))), names

    def _with_marks(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text_with_marks(value)
        if isinstance(value, Mapping):
            return {
                key: part
                if key in OWN_FIELDS
                else self._json_with_marks(part)
                if key == CALLS
                else self._with_marks(part)
                for key, part in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._with_marks(part) for part in value]
        return value

    def _json_with_marks(self, value: Any) -> Any:
        """Adds marks to all texts and keys except single words. Templates use such words as keys. For example, they
        look up the names in ``required`` in ``properties``."""
        if isinstance(value, str):
            is_word = value.isidentifier() and not any(special in value for special in self._special)
            return value if is_word else self._text_with_marks(value)
        if isinstance(value, Mapping):
            return {self._json_with_marks(key): self._json_with_marks(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._json_with_marks(part) for part in value]
        return value

    def _text_with_marks(self, text: str) -> str:
        places = sorted(self._firsts(text))
        ends = [*places, len(text)]
        pieces = (text[begin + 1 : end + 1] for begin, end in zip(places, ends[1:]))
        return self._mark.join((text[: ends[0] + 1], *pieces)) if places else text

    def _firsts(self, text: str) -> set[int]:
        """Positions in a text where special tokens' strings begin. The strings can be whole, or cut off at an end of
        the text: surrounding text could complete them."""
        places = set()
        for special in self._special:
            place = text.find(special)
            while place >= 0:
                places.add(place)
                place = text.find(special, place + 1)
        core = text.strip()  # most templates strip texts
        begin = text.find(core)
        if core:
            sizes = range(1, min(self._longest, len(core) + 1))
            inside = len(core) < self._longest and any(core in special for special in self._special)
            if inside or any(core[:size] in self._ends for size in sizes):
                places.add(begin)
            places |= {begin + len(core) - size for size in sizes if core[-size:] in self._beginnings}
        return places

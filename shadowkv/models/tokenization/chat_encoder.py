"""Chat prompts in which only the template's special tokens are special: those written in messages are plain text.

As with ``split_special_tokens`` of transformers and without ``parse_special`` of llama.cpp, tokens that were added
without being special (``<think>``, ``<tool_call>``) are recognised everywhere: they carry meaning rather than the
structure of the conversation, and an assistant's earlier turns contain them.
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
"""Fields of messages and of parts of their content whose value is one of a few words that templates compare with."""

CALLS = "tool_calls"
"""Field of messages: JSON like that of tools, with arbitrary keys, and words that templates look up."""


class ChatEncoder:
    """Distinguishes the special tokens of a template from those in the messages' texts.

    A text that contains a special token's string gets a mark after the string's first character before it is rendered:
    unguessable digits, which survive whatever a template does to texts (trimming, escaping, JSON). In the rendered
    prompt the strings that are still intact are the template's own.

    Args:
        texts: encodes other texts, in which special tokens are recognised.
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
        # After an intact string, the mark says that its last character, if not all of it, belongs to a message.
        self._whole = re.compile(f"({'|'.join(map(re.escape, longest_first))})(?!{self._mark})")

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[Any], list[Any] | None] | None:
        """The messages and tools with marks in their texts; None if they need none."""
        if not self._special:
            return None
        marked = [self._with_marks(message) for message in messages]
        marked_tools = None if tools is None else [self._json_with_marks(tool) for tool in tools]
        same = marked == list(messages) and (tools is None or marked_tools == list(tools))
        return None if same else (marked, marked_tools)

    def encode(self, rendered: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a prompt rendered from marked messages; ``add_special_tokens`` as for a text."""
        texts, names = self._renamed
        text = self.without_marks(self._whole.sub(lambda match: names[match.group()], rendered))
        return texts.encode(text, add_special_tokens)

    def without_marks(self, text: str) -> str:
        """Turns a text about marked messages into one about the original messages."""
        return text.replace(self._mark, "")

    def prepare(self) -> None:
        """Does in advance what the first prompt with marks, or the first long one, would wait for."""
        _ = self._plain.form, self._renamed[0].form

    @cached_property
    def _renamed(self) -> tuple[TextEncoder, dict[str, str]]:
        """The same with its special tokens renamed to what no message can contain; and those names."""
        secret = secrets.token_hex(16)
        names = {text: f"\ue000{secret}:{number}\ue001" for number, text in enumerate(self._special)}
        source = msgspec.json.decode(self._plain.backend.to_str())  # a second faster than json, of 150,000 tokens
        for token in source["added_tokens"]:
            if token["special"]:
                token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
        model = source["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if "merges" in model:  # those made from scores may lead to special tokens
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
        """Adds marks to all texts and keys except those that are a single word: templates look these up, for example in
        ``properties`` by what ``required`` has."""
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
        """Where special tokens' strings begin in a text: whole ones, and those that surrounding text may complete."""
        places = set()
        for special in self._special:
            place = text.find(special)
            while place >= 0:
                places.add(place)
                place = text.find(special, place + 1)
        core = text.strip()  # as most templates strip it
        begin = text.find(core)
        if core:
            sizes = range(1, min(self._longest, len(core) + 1))
            inside = len(core) < self._longest and any(core in special for special in self._special)
            if inside or any(core[:size] in self._ends for size in sizes):
                places.add(begin)
            places |= {begin + len(core) - size for size in sizes if core[-size:] in self._beginnings}
        return places

"""``Tokenizer``: converts between text and token ids with the tokenizers library, makes chat prompts, and decodes
incrementally."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import tokenizers

from shadowkv.models.tokenization.chat_encoder import ChatEncoder
from shadowkv.models.tokenization.chat_template import ChatTemplate
from shadowkv.models.tokenization.text_encoder import TextEncoder, panics_as_errors

_REPLACEMENT = "\ufffd"
_MAX_HELD = 32
"""Maximum number of held-back tokens. Only invalid UTF-8 or tokens without text reach the maximum, because a character
has at most 4 bytes."""

END_OF_CONTENT = f"End{secrets.token_hex(16)}"
"""A random text, which no message contains. It is appended to the message that the model continues, and marks the end
of this message's content in the prompt."""

HARMONY_ENDS = ("<|call|>", "<|return|>")
"""Tokens that each end an answer of gpt-oss; its files may name only one of them."""

LONG_TOKENS = 1_000
"""Decoding more tokens than this releases the interpreter's lock. For fewer, waiting to get the lock back takes longer
than decoding."""


class DecodeStream:
    """Incremental detokenizer of one sequence. The text that it returns never ends in the middle of a character.

    A token's text depends on its neighbours (a leading space, the bytes of one character). A token is therefore decoded
    together with the latest emitted tokens, and held back while the text ends in an incomplete character.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that the tokens complete, possibly empty."""
        self._held += token_ids
        text = self._new_text()
        if text.endswith(_REPLACEMENT):
            if len(token_ids) > 1:  # only the last few belong to the incomplete character
                del self._held[-len(token_ids) :]
                return "".join(self.push([token]) for token in token_ids)
            if len(self._held) < _MAX_HELD:
                return ""
        return self._emit(text)

    def flush(self) -> str:
        """The held-back text at the end of the sequence, with incomplete characters replaced."""
        return self._emit(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _emit(self, text: str) -> str:
        if text:
            self._context, self._held = self._held, []
        elif len(self._held) >= _MAX_HELD:
            self._held = []  # tokens without text, such as skipped special ones
        return text


logger = logging.getLogger(__name__)

TEMPLATES = 8
"""Number of compiled chat templates to cache: the model's, and those of requests. Requests of a batch share a
template."""


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizers library's tokenizer.
        special_tokens: ``bos_token``, ``eos_token`` and the like -> their text; the chat template gets them.
        eos_token_ids: tokens that end a generation, besides ``eos_token``.
        chat_template: Jinja source, or None if the model has none.
        add_bos, add_eos: whether to add the BOS or EOS token to encoded text. If both are None, the backend's
            post-processor decides.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.bos_token_id: int | None = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos_token_ids: set[int] = set(eos_token_ids) | ({eos} if eos is not None else set())
        harmony = [token for text in HARMONY_ENDS if (token := backend.token_to_id(text)) is not None]
        if len(harmony) == len(HARMONY_ENDS):
            self.eos_token_ids |= set(harmony)
        self._texts = TextEncoder(backend)
        self.chat_encoder = ChatEncoder(self._texts)
        self._compiled = lru_cache(TEMPLATES)(self._compile)
        self.use_template(chat_template)
        self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        self._suffix = [eos] if add_eos and eos is not None else []
        self._own_frame = add_bos is not None or add_eos is not None

    def use_template(self, source: str | None) -> None:
        """Sets another chat template; raises ValueError if it is not valid."""
        self._template = None if source is None else self._compiled(source)
        self.chat_template = source

    def _compile(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.chat_encoder.without_marks)  # errors can quote a message

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a model's embedding can be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Every token, as the vocabulary writes it -> its id."""
        return self.backend.get_vocab(with_added_tokens=True)

    def spelling(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it, which is not always text: " a" may be "Ġa" or "▁a"; empty for an
        unknown id."""
        return [self.backend.id_to_token(token) or "" for token in ids]

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are bytes in GPT-2's alphabet, rather than SentencePiece's text with byte fallback."""
        return '"type":"ByteLevel"' in json.dumps(json.loads(self.backend.to_str())["decoder"], separators=(",", ":"))

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` works without a ``chat_template``."""
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text are recognised. Chat prompts go through
        ``encode_chat``."""
        return self._framed(self._texts.encode, text, add_special_tokens)

    def _framed(self, encode: Callable[[str, bool], list[int]], text: str, add_special_tokens: bool) -> list[int]:
        if add_special_tokens and self._own_frame:
            return [*self._prefix, *encode(text, False), *self._suffix]
        return encode(text, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, without tokenizing; 0 if unknown."""
        return self._texts.form.least_tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; incomplete characters become U+FFFD."""
        with panics_as_errors():
            if len(ids) <= LONG_TOKENS:
                return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            # decode() holds the interpreter's lock, 0.1 s at 100K tokens.
            return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        """A new incremental detokenizer."""
        return DecodeStream(lambda ids: self.decode(ids, skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Prompt text of a conversation, from ``chat_template`` if given, else from the model's template; ``kwargs``
        (``tools``, …) are passed to the template.

        Raises ValueError if there is no template, or if it is not valid or refuses the messages.
        """
        template = self._template if chat_template is None else self._compiled(chat_template)
        if template is None:
            raise ValueError("this model has no chat template; send it a plain prompt")
        variables = {**self.special_tokens, "add_generation_prompt": add_generation_prompt, "tools": None, **kwargs}
        return template.render(messages, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        parse_special: bool = False,
        add_special_tokens: bool = False,
        check: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation's prompt. ``check`` gets the prompt's text before it is encoded, and raises an
        error to refuse it.

        With ``continue_final_message`` the prompt ends where the content of the last message ends, so that the model
        continues it; raises ValueError if the template drops that content.

        Special tokens written out in the texts of messages and tools are plain text, unless ``parse_special`` is set;
        in ``kwargs`` they are recognised. ``kwargs`` and further ValueErrors are as for ``apply_chat_template``.
        """
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{END_OF_CONTENT}"}]
        marked = None if parse_special else self.chat_encoder.marked(messages, tools)
        messages, tools = (messages, tools) if marked is None else marked
        text = self.apply_chat_template(messages, add_generation_prompt, tools=tools, **kwargs)
        if continue_final_message:
            text, found, _ = text.rpartition(END_OF_CONTENT)
            if not found:
                raise ValueError("the chat template leaves the last message out, so that it cannot be continued")
        if check is not None:
            check(text if marked is None else self.chat_encoder.without_marks(text))
        return self._framed(
            self._texts.encode if marked is None else self.chat_encoder.encode, text, add_special_tokens
        )

    def _id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.backend.token_to_id(text)

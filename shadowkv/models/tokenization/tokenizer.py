"""Tokenizer: text <-> token ids and chat prompts, over the tokenizers library."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import tokenizers

from shadowkv.models.files import ModelFileError, is_there, naming, read_json, read_text
from shadowkv.models.tokenization.chat_encoder import ChatEncoder
from shadowkv.models.tokenization.chat_template import ChatTemplate
from shadowkv.models.tokenization.decode_stream import DecodeStream

logger = logging.getLogger(__name__)

MAX_NAMED, MAX_QUOTED = 5, 40
"""Most tokens that a warning names, and most characters of each."""

LONG_TOKENS = 1_000
"""Decoding fewer takes less time than waiting for another thread's turn."""


class Tokenizer:
    """A model's tokeniser.

    Args:
        backend: the tokenizers library's tokeniser.
        special_tokens: ``bos_token``, ``eos_token`` and the like -> their text; the chat template sees them.
        eos_token_ids: tokens that end a generation, besides ``eos_token``.
        chat_template: Jinja source, or None where the model has none.
        add_bos, add_eos: add that token to encoded text; None leaves it to the backend's own post-processor.
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
        self.chat_template = chat_template
        self.chat_encoder = ChatEncoder(backend)
        without_marks = self.chat_encoder.without_marks  # errors may quote a message
        self._template = None if chat_template is None else ChatTemplate(chat_template, without_marks)
        self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        self._suffix = [eos] if add_eos and eos is not None else []
        self._own_frame = add_bos is not None or add_eos is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it knows; a model's embedding may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Every token as the tokeniser writes it -> its id."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are bytes in GPT-2's alphabet rather than SentencePiece's text with byte fallback."""
        return '"type":"ByteLevel"' in json.dumps(json.loads(self.backend.to_str())["decoder"], separators=(",", ":"))

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` works."""
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text are recognised; chat prompts, which have their own, go
        through ``encode_chat``."""
        return self._framed(self._ids, text, add_special_tokens)

    def _framed(self, encode: Callable[[str, bool], list[int]], text: str, add_special_tokens: bool) -> list[int]:
        if add_special_tokens and self._own_frame:
            return [*self._prefix, *encode(text, False), *self._suffix]
        return encode(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # encode() holds the interpreter's lock for the whole text, 0.2 s at 100K tokens; batches release it. The fast
        # one takes half the time and memory: it does not track which characters a token has.
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; incomplete characters come out as U+FFFD."""
        if len(ids) <= LONG_TOKENS:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        # decode() holds the interpreter's lock, 0.1 s at 100K tokens.
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        """A new incremental detokeniser."""
        return DecodeStream(lambda ids: self.decode(ids, skip_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Prompt text of a conversation; ``kwargs`` (``tools``, …) are passed to the template.

        Raises ValueError if the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise ValueError("this model has no chat template; send it a plain prompt")
        variables = {**self.special_tokens, "add_generation_prompt": add_generation_prompt, "tools": None, **kwargs}
        return self._template.render(messages, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_special: bool = False,
        add_special_tokens: bool = False,
        check: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation's prompt, whose text ``check`` may refuse before it is encoded.

        Special tokens written out in the texts of messages and tools are plain text unless ``parse_special`` is set; in
        ``kwargs`` (as for ``apply_chat_template``, which says what raises ValueError) they are recognised.
        """
        marked = None if parse_special else self.chat_encoder.marked(messages, tools)
        messages, tools = (messages, tools) if marked is None else marked
        text = self.apply_chat_template(messages, add_generation_prompt, tools=tools, **kwargs)
        if check is not None:
            check(text if marked is None else self.chat_encoder.without_marks(text))
        return self._framed(self._ids if marked is None else self.chat_encoder.encode, text, add_special_tokens)

    def _id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.backend.token_to_id(text)


def tokenizer_from_directory(
    directory: Path, eos_token_ids: Iterable[int] = (), vocab_size: int | None = None
) -> Tokenizer:
    """The tokeniser of a Hugging Face directory.

    Args:
        directory: holds ``tokenizer.json``, and optionally the other files that transformers writes for a tokeniser.
        eos_token_ids: tokens that end a generation, besides the tokeniser's own.
        vocab_size: rows of the model's embedding, if known: no token may have a larger id, except those added to the
            vocabulary, for which some fine-tunes have no row.

    Raises FileNotFoundError without a tokenizer.json, ModelFileError for files that cannot be used.
    """
    file = directory / "tokenizer.json"
    if not is_there(file):
        raise FileNotFoundError(f"{directory} has no tokenizer.json; save the model's fast tokenizer there")
    text = read_text(file)
    with naming(file), library_errors("the tokeniser"):
        backend = tokenizers.Tokenizer.from_str(text)
        vocabulary = backend.get_vocab(with_added_tokens=False)
        added = {token: text.content for token, text in backend.get_added_tokens_decoder().items()}
    largest = max(vocabulary.values(), default=0)
    if vocab_size is not None and largest >= vocab_size:
        reason = f"it has a token with id {largest}, beyond the model's vocabulary of {vocab_size}"
        raise ModelFileError(file, reason, "use the model's own tokenizer.json")
    beyond = [text for token, text in added.items() if vocab_size is not None and token >= vocab_size]
    if beyond:
        some = ", ".join(repr(text[:MAX_QUOTED]) for text in beyond[:MAX_NAMED])
        logger.warning(
            "%s: %d added tokens are beyond the model's vocabulary of %d, prompts with them are refused: %s%s",
            *(file, len(beyond), vocab_size, some, ", …" if len(beyond) > MAX_NAMED else ""),
        )
    config_file = directory / "tokenizer_config.json"
    config, special = _read_stated(config_file), _special_tokens(directory, config_file)
    for key in ("add_bos_token", "add_eos_token"):
        if config.get(key) is not None and not isinstance(config[key], bool):
            raise ModelFileError(config_file, f"{key}={config[key]!r} is not true or false")
    template_file, template = _template(directory, config_file, config.get("chat_template"))
    with naming(template_file):
        return Tokenizer(
            backend,
            special_tokens=special,
            eos_token_ids=eos_token_ids,
            chat_template=template,
            add_bos=config.get("add_bos_token"),
            add_eos=config.get("add_eos_token"),
        )


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns the errors of the tokenizers library, which have no type of their own, into ValueError.

    For an unexpected file it panics: it then writes to the process's stderr, which is held back until the end.
    """
    with TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:  # refusals are plain Exceptions; a panic is not, and its type cannot be imported
            panicked = type(error).__name__ == "PanicException"
            if type(error) is not Exception and not panicked:
                raise
            raise ValueError(f"{what} is refused by the tokenizers library: {error}") from error
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if not panicked:
                written.seek(0)
                os.write(2, written.read())


def _special_tokens(directory: Path, config_file: Path) -> dict[str, str]:
    special = {}
    for file in (directory / "special_tokens_map.json", config_file):  # the latter takes precedence
        stated = _read_stated(file)
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = stated.get(role)
            if isinstance(value, dict):
                value = value.get("content", value)
            if value is not None and not isinstance(value, str):
                raise ModelFileError(
                    file, f"{role}={str(value)[:60]} is no text, nor an object with one as its content"
                )
            if value is not None:
                special[role] = value
            elif role in stated:
                special.pop(role, None)
    return special


def _template(directory: Path, config_file: Path, stated: Any) -> tuple[Path, str | None]:
    """The file that the template is in, and its source."""
    file = directory / "chat_template.jinja"
    if is_there(file):
        return file, read_text(file)
    if isinstance(stated, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in stated):
            raise ModelFileError(config_file, "chat_template is a list of other things than named templates")
        stated = {entry["name"]: entry.get("template", ...) for entry in stated}.get("default")
    if stated is not None and not isinstance(stated, str):
        raise ModelFileError(config_file, "chat_template is neither a text nor a list of named templates")
    return config_file, stated


def _read_stated(file: Path) -> dict[str, Any]:
    return read_json(file) if is_there(file) else {}

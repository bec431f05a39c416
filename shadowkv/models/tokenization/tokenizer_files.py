"""Loads the tokenizer of a Hugging Face directory; also makes a byte tokenizer for models without one (dummy
weights)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shadowkv.models.checkpoints.files import ModelFileError, is_there, naming, read_json, read_text
from shadowkv.models.tokenization.text_encoder import is_panic
from shadowkv.models.tokenization.text_form import BYTE_ALPHABET
from shadowkv.models.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_NAMED, MAX_QUOTED = 5, 40
"""Maximum number of tokens in a warning, and of characters of each."""

MAX_TIMES = 64
"""Maximum factor by which replacements can lengthen a text. Those of real models add at most a blank."""

_BYTES_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_from_directory(
    directory: Path, eos_token_ids: Iterable[int] = (), vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    Args:
        directory: holds ``tokenizer.json``, and optionally the other files that transformers writes for a tokenizer.
        eos_token_ids: tokens that end a generation, besides the tokenizer's own.
        vocab_size: rows of the model's embedding; None if unknown. Ids of tokens must be smaller. Added tokens are an
            exception, because some fine-tunes have no rows for them.

    Raises FileNotFoundError without a tokenizer.json, and ModelFileError for files that cannot be used.
    """
    file = directory / "tokenizer.json"
    if not is_there(file):
        raise FileNotFoundError(f"{directory} has no tokenizer.json; save the model's fast tokenizer there")
    text = read_text(file)
    with naming(file), library_errors("the tokeniser"):
        backend = tokenizers.Tokenizer.from_str(text)
        vocabulary = backend.get_vocab(with_added_tokens=False)
        added = {token: text.content for token, text in backend.get_added_tokens_decoder().items()}
    _check_growth(file, msgspec.json.decode(text))
    largest = max(vocabulary.values(), default=0)
    if vocab_size is not None and largest >= vocab_size:
        reason = f"it has a token with id {largest}, beyond the model's vocabulary of {vocab_size}"
        raise ModelFileError(file, reason, "use the model's own tokenizer.json")
    beyond = [text for token, text in added.items() if vocab_size is not None and token >= vocab_size]
    if beyond:
        some = ", ".join(repr(text[:MAX_QUOTED]) for text in beyond[:MAX_NAMED])
        logger.warning(
            "%s: %d added tokens are beyond the model's vocabulary of %d; prompts with them are refused: %s%s",
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


def _check_growth(file: Path, stated: dict[str, Any]) -> None:
    """Raises ModelFileError if replacements could lengthen a short text until it takes all memory."""
    for name in ("normalizer", "decoder"):
        times = _growth(stated.get(name))
        if times > MAX_TIMES:
            reason = f"its {name} can make a text {times:.0f} times as long; the limit is {MAX_TIMES} times"
            raise ModelFileError(file, reason, "use the model's own tokenizer.json")


def _growth(step: dict[str, Any] | None) -> float:
    """The factor by which replacements of a normalizer or decoder can lengthen a text."""
    if step is None:
        return 1.0
    if step["type"] == "Sequence":
        return math.prod(map(_growth, step.get("normalizers") or step.get("decoders") or ()))
    if step["type"] == "Prepend":
        return 1.0 + len(step["prepend"])
    if step["type"] != "Replace":
        return 1.0
    pattern, content = step["pattern"].get("String"), len(step["content"])
    # A regular expression can match empty text, between any two characters.
    return 1.0 + content if pattern is None else max(1.0, content / max(1, len(pattern)))


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """A context that turns errors of the tokenizers library, which have no specific type, into ValueError.

    The library panics on an unexpected file and writes to the process's stderr. That output is dropped; any other
    output to stderr is held back until the end of the context.
    """
    with TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:  # the library's errors are plain Exceptions; a panic's type cannot be imported
            panicked = is_panic(error)
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
    for file in (directory / "special_tokens_map.json", config_file):  # the second file takes precedence
        stated = _read_stated(file)
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = stated.get(role)
            if isinstance(value, dict):
                value = value.get("content", value)
            if value is not None and not isinstance(value, str):
                raise ModelFileError(
                    file, f"{role}={str(value)[:60]} is neither a text nor an object with a text as its content"
                )
            if value is not None:
                special[role] = value
            elif role in stated:
                special.pop(role, None)
    return special


def _template(directory: Path, config_file: Path, stated: Any) -> tuple[Path, str | None]:
    """Returns the file of the chat template, and the template's source; the source is None if there is no template. If
    tools have a separate template, the source contains both templates and chooses between them."""
    file = directory / "chat_template.jinja"
    if is_there(file):
        return file, read_text(file)
    if isinstance(stated, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in stated):
            raise ModelFileError(config_file, "chat_template is a list, but not of named templates")
        named = {entry["name"]: entry.get("template", ...) for entry in stated}
        stated, with_tools = named.get("default"), named.get("tool_use")
        if isinstance(stated, str) and isinstance(with_tools, str):  # transformers chooses by these names
            stated = f"{{%- if tools %}}{with_tools}{{%- else %}}{stated}{{%- endif %}}"
    if stated is not None and not isinstance(stated, str):
        raise ModelFileError(config_file, "chat_template is neither a text nor a list of named templates")
    return config_file, stated


def _read_stated(file: Path) -> dict[str, Any]:
    return read_json(file) if is_there(file) else {}


def byte_tokenizer(vocab_size: int, eos_token_ids: Sequence[int]) -> Tokenizer:
    """Makes a tokenizer of ``vocab_size`` tokens. Each of the 256 bytes is a token; if there are fewer tokens, encoding
    drops the other bytes. Ids from 256 on decode to <id>, but ids of eos tokens decode to nothing."""
    vocab = {BYTE_ALPHABET[byte]: byte for byte in range(min(256, vocab_size))}
    vocab |= {f"<{token}>": token for token in range(256, vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    stops = [token for token in eos_token_ids if 256 <= token < vocab_size]
    backend.add_special_tokens([AddedToken(f"<{token}>", normalized=False) for token in stops])
    return Tokenizer(backend, special_tokens={}, eos_token_ids=eos_token_ids, chat_template=_BYTES_TEMPLATE)

"""Cuts prompts from texts, far apart and without overlap, so that their results are independent samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.eval.prompts.texts import CHARACTERS_PER_TOKEN, essays, source_code
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.wording import counted

ESSAYS, CODE, FILES = "essays", "code", "files"
"""Kinds of texts: ``ESSAYS`` and ``CODE`` are known by name; ``FILES`` are the user's."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and their origin: the text's name and the index of the first token in it."""

    name: str
    tokens: list[int]


def read_prompts(sources: Sequence[Path] | None, tokenizer: Tokenizer, count: int, tokens: int) -> list[Prompt]:
    """``count`` prompts of ``tokens`` tokens each from every kind of texts.

    Args:
        sources: files, ``ESSAYS`` (also if None) or ``CODE``.

    Raises ValueError if texts are missing or too short, OSError for a file that cannot be read.
    """
    kinds: dict[str, dict[str, str]] = {}
    for source in sources or [Path(ESSAYS)]:
        if str(source) == ESSAYS:
            kinds[ESSAYS] = {ESSAYS: " ".join(essays().sentences)}
        elif str(source) == CODE:
            kinds[CODE] = {CODE: source_code(CODE, CHARACTERS_PER_TOKEN * count * tokens)}
        else:
            if source.name in (ESSAYS, CODE, *kinds.get(FILES, {})):
                raise ValueError(f"--text {source}: another text has the name {source.name!r}; rename the file")
            kinds.setdefault(FILES, {})[source.name] = source.read_text(encoding="utf-8")
    return [prompt for texts in kinds.values() for prompt in cut_prompts(texts, tokenizer, count, tokens)]


def kind_of(prompt: str) -> str:
    """The kind of text of a prompt's name."""
    text = prompt.rpartition(":")[0]
    return text if text in (ESSAYS, CODE) else FILES


def cut_prompts(texts: Mapping[str, str], tokenizer: Tokenizer, count: int, tokens: int) -> list[Prompt]:
    """``count`` prompts of ``tokens`` tokens each, evenly spread over all non-overlapping ones.

    Raises ValueError if the texts are too short.
    """
    start = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    length = tokens - len(start)
    if length < 1:
        raise ValueError(f"--prompt-tokens {tokens} leaves no room for the text")
    pieces: list[Prompt] = []
    held = 0
    for name, text in texts.items():
        encoded = tokenizer.encode(text, add_special_tokens=False)
        held += len(encoded)
        places = range(0, len(encoded) - length + 1, length)
        pieces += [Prompt(f"{name}:{place}", start + encoded[place : place + length]) for place in places]
    if len(pieces) < count:
        enough = f"enough for {counted(len(pieces), 'prompt')} of --prompt-tokens {tokens}, not for {count}"
        raise ValueError(f"{', '.join(texts)} has {counted(held, 'token')}, {enough}")
    return [pieces[number * len(pieces) // count] for number in range(count)]

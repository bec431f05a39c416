"""Prompts cut from text files at places far apart, none of which overlap: their figures are independent samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """Tokens, and where they are from: file and number of the first token there."""

    name: str
    tokens: list[int]


def cut_prompts(files: Sequence[Path], tokenizer: Tokenizer, count: int, tokens: int) -> list[Prompt]:
    """``count`` prompts of ``tokens`` tokens each, those that a text begins with included.

    Raises ValueError where the files hold fewer, OSError for a file that cannot be read.
    """
    start = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    length = tokens - len(start)
    if length < 1:
        raise ValueError(f"--prompt-tokens {tokens} leaves no room for the text")
    pieces: list[Prompt] = []
    held = 0
    for file in dict.fromkeys(files):
        text = tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
        held += len(text)
        places = range(0, len(text) - length + 1, length)
        pieces += [Prompt(f"{file.name}:{place}", start + text[place : place + length]) for place in places]
    if len(pieces) < count:
        raise ValueError(
            f"--text holds {held} tokens, enough for {len(pieces)} prompts of --prompt-tokens {tokens}, not for {count}"
        )
    return [pieces[number * len(pieces) // count] for number in range(count)]

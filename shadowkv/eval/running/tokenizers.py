"""The tokeniser of a model without its weights, to measure prompts for a server."""

from __future__ import annotations

from shadowkv.models.gguf.config import config_from_gguf
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.sources import resolve
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.models.tokenization.tokenizer_files import tokenizer_from_directory


def load_tokenizer(source: str) -> Tokenizer:
    """The tokeniser of a catalogue name, directory, .gguf file or hub id.

    Raises OSError or ValueError as ``load_model`` does.
    """
    path = resolve(source, weights=True)
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        return tokenizer_from_gguf(file, config_from_gguf(file).eos_token_ids)
    return tokenizer_from_directory(path)

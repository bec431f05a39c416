"""Models: configs, weights and tokenizers of the supported families, from the catalogue, a directory, a GGUF file or
the hub."""

from __future__ import annotations

from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.loader import LoadedModel, load_config, load_model
from shadowkv.models.tokenization.tokenizer import DecodeStream, Tokenizer

__all__ = ["DecodeStream", "Decoder", "LoadedModel", "ModelConfig", "Tokenizer", "load_config", "load_model"]

"""Caches for ``model.generate`` of transformers: any policy, driven by the model's own forward passes."""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("shadowkv.hf needs transformers 5 or later: pip install 'shadowkv[hf]'") from error

from shadowkv.hf.cache import ShadowKVCache

__all__ = ["ShadowKVCache"]

"""Caches for ``model.generate`` of transformers: any policy, driven by the model's own forward passes."""

try:
    from shadowkv.hf.cache import ShadowKVCache
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ImportError("shadowkv.hf needs transformers 5 or later: pip install 'shadowkv-engine[hf]'") from error

__all__ = ["ShadowKVCache"]

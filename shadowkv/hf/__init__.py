"""``ShadowKVCache`` for ``model.generate`` of transformers: a cache with any policy, driven by the model's own forward
passes."""

from shadowkv.installation import adding

try:
    from shadowkv.hf.shadowkv_cache import ShadowKVCache
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ImportError(f"shadowkv.hf needs transformers 5 or later: {adding('hf')}") from error

__all__ = ["ShadowKVCache"]

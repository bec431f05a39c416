"""``ShadowKVCache``, and the attention function that a model with such a cache calls.

In each layer, transformers passes keys and values to ``Cache.update``, and calls the attention function with the
result. The attention function appends to the cache and attends, as the engine's attention layers do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from shadowkv.hf.sequence_batch import SequenceBatch
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.models.registry import config_from_hf

ATTENTION = "shadowkv"
"""The ``attn_implementation`` of a model that attends with a ``ShadowKVCache``."""


class ShadowKVCache(Cache):
    """A batch of sequences in a ``KVCache``, for ``model.generate(..., past_key_values=ShadowKVCache(model, ...))``.

    The prompts of a batch go through the model in one forward pass or a few, with or without padding on either side.
    Every later pass decodes one token per sequence. A cache that is passed again with more tokens continues its
    sequences.

    An engine with the same policy generates the same tokens, if the policy sets ``dense_below`` and ``prefill``. If it
    does not, an engine chooses them, whereas this cache compresses as early as it can and uses dense prefill.

    Unsupported operations raise NotImplementedError: forgetting tokens (assisted generation), copying or reordering
    sequences (beam search).

    Args:
        model: a model of a supported family, on one device, with ``attn_implementation="shadowkv"``.
        kv: the policy: a preset's name, optionally with fields (``turbo:dense_below=4096``), or a ``KVSpec``.
        max_model_len: maximum tokens of a sequence, prompt and answer. The first forward pass, which determines the
            batch size, allocates memory for sequences of this length.

    Raises ValueError if the model has another ``attn_implementation``, if the model or the policy is not supported, or
    if ``max_model_len`` exceeds what the model supports.
    """

    def __init__(self, model: PreTrainedModel, kv: str | KVSpec = "turbo", *, max_model_len: int) -> None:
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != ATTENTION:
            raise ValueError(
                f"the model attends by {config._attn_implementation!r}, which does not use a ShadowKVCache: call "
                f"model.set_attn_implementation({ATTENTION!r}) first"
            )
        ours = config_from_hf(config.to_dict(), max_model_len).with_limits(max_model_len)
        if any(kind.rope is not None for kind in ours.layer_kinds):
            raise ValueError(f"{ours.architecture} models have layers with a separate RoPE: use an engine for them")
        if any(kind.state for kind in ours.layer_kinds):
            raise ValueError(f"{ours.architecture} models have layers with a recurrent state: use an engine for them")
        if ours.shape.indexed:
            raise ValueError(f"{ours.architecture} models have layers with an indexer: use an engine for them")
        spec, rotary = resolve(preset(kv), ours.shape), model.get_decoder().rotary_emb
        self.batch = SequenceBatch(spec, ours, max_model_len, rotary)
        super().__init__(layers=[_Layer(self.batch, number) for number in range(ours.num_layers)])

    @property
    def kv_cache(self) -> KVCache | None:
        """The cache that holds the sequences; None before the first forward pass."""
        return self.batch.cache


@dataclass(frozen=True)
class _NewKeys:
    """The result of ``Cache.update`` for keys. It is not a tensor, so that no other attention function mistakes it for
    keys."""

    batch: SequenceBatch
    layer: int
    keys: Tensor


class _Layer(CacheLayerMixin):
    """A layer of the cache for transformers; all layers share one batch."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, batch: SequenceBatch, number: int) -> None:
        super().__init__()
        self.batch, self.number = batch, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the attention function allocates memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        return _NewKeys(self.batch, self.number, key_states), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.batch.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.batch.columns

    def get_max_length(self) -> int:
        return self.batch.max_model_len

    def reset(self) -> None:
        self.batch.reset()

    def crop(self, tokens_to_remove: int) -> None:
        _refuse("forget tokens", "generate without an assistant")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        _refuse("reorder sequences", "use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse("repeat sequences", "repeat the prompts (num_return_sequences does)")

    def batch_select_indices(self, indices: Tensor) -> None:
        _refuse("drop sequences", "continue all of them, or start with a new cache")


def _refuse(what: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"a ShadowKVCache cannot {what}: {instead}")


@torch.no_grad()
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | _NewKeys,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls. It takes queries [B, H_q, T, d], rotated by RoPE, and values [B,
    H, T, d], and returns [B, T, H_q, d] (letters as in ``sequence_batch.py``). ``s_aux`` [H_q] are a layer's sinks
    (gpt-oss): a learned score per query head that takes part in the softmax. None if the layer has none."""
    if not isinstance(key, _NewKeys):
        raise ValueError(
            f"attn_implementation={ATTENTION!r} needs a ShadowKVCache: pass past_key_values=ShadowKVCache(model, ...)"
        )
    if query.requires_grad:
        raise ValueError("a ShadowKVCache has no gradients: call the model under torch.no_grad(), as generate does")
    sinks = None if s_aux is None else s_aux.float()
    return key.batch.attend(key.layer, query, key.keys, value, attention_mask, position_ids, sinks), None


def _mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Returns the attention mask [B, tokens] unchanged. The mask only has to mark padding, because the cache's
    attention is always causal."""
    return attention_mask


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)

"""A batch of sequences in a ``KVCache``, driven by forward passes of transformers' models, layer by layer.

transformers applies RoPE before it calls the cache, while KVCache takes queries and keys before RoPE. RoPE is therefore
undone here, with the model's own cos and sin. The model computes the angles in float32, and rounds cos and sin to its
dtype. KVCache then applies RoPE with its own, more precise tables.

Shapes: B sequences, T new tokens per sequence (including padding), H kv heads, H_q query heads, and d dimensions of a
head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, KVSpec
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.ops.apply_rope.reference import rope_by


@dataclass(frozen=True)
class Step:
    """A forward pass: its batch and its calls of the cache.

    Attributes:
        blocks: the batches that attention layers see, each with its slice of the new tokens.
        shape: B and T.
        rows: int64 [n], indices of the n tokens among B * T that are not padding; None if none is padding.
        cos, sin: float32 [n, 1, dim / 2]; rotating by them undoes RoPE in the n tokens. dim is the number of rotated
            dimensions.
        finish_layer: called after each layer's attention, with the layer's number.
        end: called after the last layer.
    """

    blocks: list[tuple[Batch, slice]]
    shape: tuple[int, int]
    rows: Tensor | None
    cos: Tensor
    sin: Tensor
    finish_layer: Callable[[int], None]
    end: Callable[[], None]


class SequenceBatch:
    """The sequences of a ``ShadowKVCache``, and the current forward pass.

    Attributes:
        columns: tokens of each row so far, including padding, as transformers counts them.
    """

    def __init__(self, spec: KVSpec, config: ModelConfig, max_model_len: int, rotary: torch.nn.Module) -> None:
        self.spec, self.config, self.max_model_len, self.rotary = spec, config, max_model_len, rotary
        self.cache: KVCache | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets all sequences and frees their memory."""
        if self.cache is not None:  # a forward pass may have been interrupted
            self.cache.leave_prefill()
        self.cache = None
        self.sequences: list[CachedSequence] = []
        self.columns = 0
        self.step: Step | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        position_ids: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Appends keys and values of a layer's new tokens, and attends. ``q`` and ``k`` are already rotated by RoPE.

        Returns the attention's output, [B, T, H_q, d], which is 0 for padding.

        Args:
            q: queries, [B, H_q, T, d].
            k, v: keys and values, [B, H, T, d].
            mask: bool [B, ``self.columns`` + T], False for padding; None without padding.
            position_ids: int64 [B or 1, T], the positions by which the model's RoPE rotated ``q`` and ``k``.
            sinks: float32 [H_q], the layer's sinks as in ``KVCache.start``; None if it has none.
        """
        if layer == 0:
            if self.step is not None:
                raise RuntimeError("an earlier forward pass was interrupted: call reset() on the cache and start again")
            self.step = self._begin(k, mask, position_ids)
        cache, step = self.cache, self.step
        assert cache is not None and step is not None, "layers are called in order"
        q, k, v = (_rows(x.transpose(1, 2), step.rows) for x in (q, k, v))
        q, k = (rope_by(x, step.cos, step.sin, cache.place(layer)[0].store.rotary) for x in (q, k))
        parts = []
        for block, part in step.blocks:
            cache.append(layer, k[part], v[part], block)
            parts.append(cache.start(layer, q[part], block, sinks)())
        attended = torch.cat(parts)
        step.finish_layer(layer)
        rows, columns = step.shape
        if layer + 1 == self.config.num_layers:
            step.end()
            self.columns += columns
            self.step = None
        if step.rows is not None:
            padded = attended.new_zeros(rows * columns, *attended.shape[1:])
            attended = padded.index_copy(0, step.rows, attended)
        return attended.unflatten(0, (rows, columns))

    def _begin(self, k: Tensor, mask: Tensor | None, position_ids: Tensor) -> Step:
        rows, _, columns, _ = k.shape
        if not self.sequences:
            self.cache = self._open(rows, k.dtype, k.device)
        cache = self.cache
        assert cache is not None, "a batch with sequences has a cache"
        if k.device != cache.device:
            raise ValueError(f"keys are on {k.device}, the cache is on {cache.device}: put the model on one device")
        if self.sequences and len(self.sequences) != rows:
            held = len(self.sequences)
            raise ValueError(f"the cache holds {held} sequences, but the batch has {rows}; reset() empties the cache")
        blocks: list[tuple[Batch, slice]]
        if self.sequences and columns == 1:
            self._check_lengths([1] * rows)
            there, plan = None, cache.plan_decode(self.sequences)
            blocks = [(cache.decode_batch(plan), slice(None))]
            ends: tuple[Any, Any] = (lambda layer: None), (lambda: cache.end_decode(plan))
        else:
            there = _new_tokens(mask, rows, columns, self.columns)
            counts = [columns] * rows if there is None else there.sum(1).tolist()
            prefill = cache.prefill_batch(self._admit(cache, counts))
            size = BLOCK_TOKENS[cache.device.type]
            starts = range(0, prefill.num_tokens, size)
            spans = [slice(start, min(start + size, prefill.num_tokens)) for start in starts]
            blocks = [(prefill.block(span.start, span.stop), span) for span in spans]
            ends = (lambda layer: cache.finish_prefill(layer, prefill)), (lambda: cache.end_prefill(prefill))
        new = None if there is None else there.flatten().nonzero().squeeze(1)
        return Step(blocks, (rows, columns), new, *self._inverse_rope(k, position_ids, rows, new), *ends)

    def _admit(self, cache: KVCache, counts: list[int]) -> list[tuple[CachedSequence, int]]:
        """Makes room for ``counts`` more tokens in the sequences; returns each sequence with its count."""
        if 0 in counts:
            raise ValueError(f"row {counts.index(0)} of the batch has only padding: each row needs at least one token")
        self._check_lengths(counts)
        if not self.sequences:
            self.sequences = [cache.allocate(count, self.max_model_len) for count in counts]
        else:
            for sequence, count in zip(self.sequences, counts, strict=True):
                cache.extend(sequence, sequence.length + count, self.max_model_len)
        return list(zip(self.sequences, counts, strict=True))

    def _inverse_rope(self, k: Tensor, position_ids: Tensor, rows: int, new: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns ``Step.cos`` and ``Step.sin``, which undo the model's RoPE of the new tokens. They are the model's
        cos and -sin divided by cos² + sin². This sum is not 1, because of rounding and RoPE's attention factor."""
        half = self.config.rope.dim // 2
        cos, sin = (x[..., :half].float() for x in self.rotary(k, position_ids))
        square = cos * cos + sin * sin
        cos, sin = (_rows((x / square).expand(rows, -1, -1), new).unsqueeze(1) for x in (cos, -sin))
        return cos, sin

    def _check_lengths(self, new: list[int]) -> None:
        lengths = [sequence.length for sequence in self.sequences] or [0] * len(new)
        longest = max(length + count for length, count in zip(lengths, new, strict=True))
        if longest > self.max_model_len:
            raise ValueError(f"a sequence reaches {longest} tokens, more than max_model_len={self.max_model_len}")

    def _open(self, rows: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A cache with room for ``rows`` sequences of any number of turns."""
        # A CPU reads the device and host tiers equally fast, so copies into a fetch buffer would only take time.
        fetch_buffer = FETCH_BUFFER if device.type == "cuda" else 0.0
        layout = Layout(self.spec, self.config.shape, dtype, self.max_model_len, fetch_buffer)
        need = layout.most_demand(self.max_model_len)
        outliers = MAX_SEGMENTS * -(-self.spec.outlier_pages // layout.main.exact_per_block)
        return KVCache(
            layout,
            self.config.rope,
            # A cache has a state per slot and enough spare states for all segments of one sequence. The slots beyond
            # ``rows`` only provide states for the segments of the other sequences.
            slots=rows + (rows - 1) * (MAX_SEGMENTS - 1) if layout.learns else rows,
            memory=Blocks({kind: rows * need[kind] for kind in layout.paged}) + Blocks(device=rows * outliers),
            ops=choose_ops(layout, self.config.rope, device),
            device=device,
        )


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Returns the tokens of ``x`` [B, T, ...] at the indices ``rows`` [n], as [n, ...]. None means all tokens."""
    packed = x.flatten(0, 1)
    return packed if rows is None else packed[rows]


def _new_tokens(mask: Tensor | None, rows: int, columns: int, before: int) -> Tensor | None:
    """Which of the new tokens are not padding, bool [B, T]; None if no token is padding."""
    if mask is None:
        return None
    if mask.shape != (rows, before + columns):
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}: a ShadowKVCache needs (batch, tokens), here "
            f"({rows}, {before + columns})"
        )
    there = mask[:, before:].bool()
    return None if there.all() else there

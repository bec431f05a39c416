"""What is left free for a prefill grows as what one takes: measured for prompts of two lengths, on the CPU.

Attention is left out, as references of its ops hold scores of all keys, and so are float32 copies that only references
make: of a few pages at a time, these do not grow with a prompt.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from allocations import peak_bytes

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.startup import sizing
from shadowkv.engine.startup.sizing import prefill_bytes, storing_bytes
from shadowkv.eval.running.caches import prefill
from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.compression import pages as compression
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.parts import keys_low_rank
from shadowkv.kvcache.parts import prefill as sparse_prefill
from shadowkv.kvcache.parts import rows as part_rows
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill import prefill_batch as batches
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.filling import fill_dummy
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.low_rank_basis import reference as basis
from shadowkv.ops.quantize_rows import reference as rows

BLOCK, CACHED, LENGTHS = 256, 600, (4096, 8192)
ROPE = RopeConfig(head_dim=32)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is done piece by piece is done in smaller ones, so that short prompts show what grows."""
    for kind in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, kind, BLOCK)
    for module in (sizing, batches):
        monkeypatch.setattr(module, "TOKENS_AT_ONCE", 1024)
    for module in (keys_low_rank, basis):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 256)
    for module in (part_rows, rows):
        monkeypatch.setattr(module, "CODED_AT_ONCE", 4)
    monkeypatch.setattr(compression, "COMPRESSED_AT_ONCE", 4)
    monkeypatch.setattr(sparse_prefill, "MIN_QUERIES", 1024)
    for module in (sizing, sparse_prefill):
        monkeypatch.setattr(module, "SPARSE_FROM", 1024)


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = ModelConfig(
        architecture="llama", num_layers=3, hidden_size=256, intermediate_size=512, num_query_heads=8, num_kv_heads=2,
        head_dim=32, vocab_size=64, max_position=max(LENGTHS), rms_norm_eps=1e-5, rope=ROPE,
    )  # fmt: skip
    decoder = Decoder(config, torch.float32, "cpu")
    fill_dummy(decoder)
    return decoder


def taken_and_left(model: Decoder, kv: str, cached: int, scored: bool, tokens: int) -> tuple[int, int]:
    """Bytes that a prompt takes whose first ``cached`` tokens are there, and those that the engine leaves free."""
    layout = Layout(preset(kv, prefill="sparse"), model.config.shape, torch.float32, tokens)
    ops, memory = choose_ops(layout, ROPE, "cpu"), Blocks(device=4 * tokens // PAGE, host=2 * tokens // PAGE)
    cache = KVCache(layout, ROPE, slots=1, memory=memory, ops=ops)
    model.use(ops)
    cache.ops.attend_blocks = lambda q, *_: (torch.empty_like(q), q.new_zeros(q.shape[:2]))
    causal, partial = lambda q, *_: torch.empty_like(q), cache.ops.attend_blocks
    cache.ops.dense_attention = replace(cache.ops.dense_attention, causal=causal, partial=partial)
    cache.ops.find_outliers = lambda keys, _, count, sink: torch.arange(sink, sink + count).expand(keys.shape[1], -1)
    nothing = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1, 1)
    cache.ops.select_blocks = lambda *_: nothing
    prompt, start = [i % 64 for i in range(tokens)], cached or tokens
    sequence = cache.allocate(start, start)
    if cached:
        prefill(model, cache, [(sequence, prompt[:cached])])
        cache.extend(sequence, tokens, tokens)
    taken = peak_bytes(lambda: prefill(model, cache, [(sequence, prompt[cached:])], scored))
    return taken, prefill_bytes(model.config, tokens, torch.float32) + storing_bytes(layout)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("cached", [0, CACHED])
@pytest.mark.parametrize("kv", ["full", "turbo", "shadowkv"])
def test_what_is_left_for_a_prefill_is_what_it_takes(
    model: Decoder, small_pieces: None, kv: str, cached: int, scored: bool
) -> None:
    """A prompt, and all of one but its start as a later turn, which takes the most."""
    (taken, left), (more, more_left) = (taken_and_left(model, kv, cached, scored, tokens) for tokens in LENGTHS)
    assert taken <= left <= 2 * taken
    assert more <= more_left <= 2 * more
    assert more - taken <= more_left - left <= 1.5 * (more - taken)

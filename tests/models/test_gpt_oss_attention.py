"""The attention of gpt-oss as transformers computes it: sinks, biases, every second layer with a window, YaRN."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.shape import FULL, LayerKind
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.configs.rope import rope_from_hf
from shadowkv.models.decoder import Decoder
from shadowkv.models.sharding import Shard

HF = GptOssConfig(
    num_hidden_layers=2,
    vocab_size=32,
    hidden_size=96,
    intermediate_size=48,
    head_dim=32,
    num_attention_heads=8,
    num_key_value_heads=2,
    sliding_window=128,
    max_position_embeddings=4096,
    attn_implementation="eager",
)
CONFIG = ModelConfig(
    architecture="gpt_oss",
    vocab_size=32,
    hidden_size=96,
    intermediate_size=48,
    num_layers=2,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    max_position=4096,
    rope=rope_from_hf(HF.to_dict(), 32, max_model_len=None),
    qkv_bias=True,
    attention_out_bias=True,
    sinks=True,
    layer_kinds=(LayerKind(128), FULL),
)
TOKENS, STEPS = 500, 200


@torch.no_grad()
def theirs(attention: GptOssAttention, x: torch.Tensor) -> torch.Tensor:
    count = len(x)
    mask = torch.ones(count, count, dtype=torch.bool).triu(1)
    if attention.sliding_window is not None:
        mask |= torch.ones_like(mask).tril(-attention.sliding_window)
    added = torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
    position = GptOssRotaryEmbedding(HF)(x[None], torch.arange(count)[None])
    return attention(x[None], position, added[None, None])[0][0]


@pytest.mark.parametrize("kv", ["full", "turbo:keys=low-rank,values=dense,rank=64,budget=1.0,dense_below=0"])
def test_prompts_in_blocks_and_steps(kv: str) -> None:
    assert HF.layer_types == ["sliding_attention", "full_attention"]
    assert CONFIG.rope.scaling == "yarn" and not CONFIG.rope.truncate
    torch.manual_seed(0)
    model, wanted, inputs = Decoder(CONFIG, torch.float32, "cpu"), [], torch.randn(2, TOKENS + STEPS, 96)
    for number, layer in enumerate(model.layers):
        oracle = GptOssAttention(HF, number).eval()
        with torch.no_grad():
            for parameter in oracle.parameters():
                parameter.normal_(0, 1.5 if parameter is oracle.sinks else 0.1)
        wanted.append(theirs(oracle, inputs[number]))
        joined = (oracle.q_proj, oracle.k_proj, oracle.v_proj)
        layer.attention.qkv.weight.copy_(torch.cat([one.weight for one in joined]))
        layer.attention.qkv.bias.copy_(torch.cat([one.bias for one in joined]))
        layer.attention.out.weight.copy_(oracle.o_proj.weight)
        layer.attention.out.bias.copy_(oracle.o_proj.bias)
        layer.attention.sinks.copy_(oracle.sinks)
    layout = Layout(preset(kv), CONFIG.shape, torch.float32, 1024)
    ops = choose_ops(layout, CONFIG.rope, "cpu", model.called_ops)
    cache = KVCache(layout, CONFIG.rope, slots=1, memory=Blocks(dict.fromkeys(layout.paged, 64)), ops=ops)
    sequence = cache.allocate(TOKENS, 1024)
    batch, got = cache.prefill_batch([(sequence, TOKENS)]), [[], []]
    spans = [(start, min(start + 150, TOKENS)) for start in range(0, TOKENS, 150)]
    blocks = [batch.block(*span) for span in spans]
    for number, layer in enumerate(model.layers):
        for block, (start, stop) in zip(blocks, spans, strict=True):
            got[number].append(layer.attention.start(inputs[number, start:stop], cache, block)())
        cache.finish_prefill(number, batch)
    cache.end_prefill(batch)
    for token in range(TOKENS, TOKENS + STEPS):
        plan = cache.plan_decode([sequence])
        step = cache.decode_batch(plan)
        for number, layer in enumerate(model.layers):
            got[number].append(layer.attention.start(inputs[number, token : token + 1], cache, step)())
        cache.end_decode(plan)
    if kv != "full":
        assert sequence.compressed > 0
    for number in range(2):
        torch.testing.assert_close(torch.cat(got[number]), wanted[number], atol=1e-4, rtol=0)


def test_a_rank_has_the_sinks_of_its_query_heads() -> None:
    parts = [Shard(CONFIG, rank, 3).cut("layers.1.attention.sinks") for rank in range(3)]
    assert [part.rows for part in parts] == [((0, 2),), ((2, 4),), ((4, 8),)]

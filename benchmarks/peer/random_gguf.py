"""Writes a GGUF file with the shapes of a hybrid Qwen3.5 model and random weights, to compare engines with it.

Matrices have random codes of Q4_K, the embedding of Q6_K, as in files named Q4_K_M. The tokenizer is that of another
GGUF file, with further tokens up to the model's vocabulary:

    python -m benchmarks.peer.random_gguf --tokenizer qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --out random.gguf
    python -m benchmarks.peer.llama_cpp --llama-python /tmp/llama/bin/python --model random.gguf --out hybrid.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np

from shadowkv.models.sources import resolve

MODELS = "qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b"
"""The dense hybrids of the catalogue."""

NORMAL = 1
"""Type of the further tokens. llama.cpp sends nothing for a token of type unused."""

Blocks = np.ndarray[Any, Any]


def random_blocks(rng: np.random.Generator, rows: int, columns: int, form: gguf.GGMLQuantizationType) -> Blocks:
    """Returns random blocks of a matrix, uint8 [rows, bytes of a row], of Q4_K or Q6_K. The numbers that they stand for
    have a standard deviation of about 1 / sqrt(columns)."""
    values, size = gguf.GGML_QUANT_SIZES[form]
    blocks = rng.integers(0, 256, (rows, columns // values, size), np.uint8)
    spread = columns**-0.5
    # Q4_K: a number is d s q - m t with s and t of 6 bits and q of 4. Q6_K: d s q with s of 8 bits and q of 6, signed.
    scales = (spread / 180, spread / 24) if form == gguf.GGMLQuantizationType.Q4_K else (spread / 1400,)
    start = 0 if form == gguf.GGMLQuantizationType.Q4_K else size - 2
    blocks[..., start : start + 2 * len(scales)] = np.array(scales, np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def layer_shapes(config: Any, layer: int) -> Iterator[tuple[str, int, int]]:
    """Yields the name, rows and columns of each matrix of a layer, as llama.cpp's converter names them."""
    hidden = config.hidden_size
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    if is_full(config, layer):
        heads, of_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        yield from (("attn_q", 2 * heads, hidden), ("attn_k", of_kv, hidden), ("attn_v", of_kv, hidden))
        yield "attn_output", hidden, heads
    else:
        yield from (("attn_qkv", 2 * keys + values, hidden), ("attn_gate", values, hidden), ("ssm_out", hidden, values))
    inner = config.intermediate_size
    yield from (("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner))


def is_full(config: Any, layer: int) -> bool:
    """Whether a layer has full attention."""
    return (layer + 1) % 4 == 0


def numbers(config: Any, layer: int, rng: np.random.Generator) -> Iterator[tuple[str, Blocks]]:
    """Yields the name and the numbers, float32, of each small tensor of a layer."""
    one = np.ones(config.hidden_size, np.float32)
    yield from (("attn_norm.weight", one), ("post_attention_norm.weight", one))
    if is_full(config, layer):
        one = np.ones(config.head_dim, np.float32)
        yield from (("attn_q_norm.weight", one), ("attn_k_norm.weight", one))
        return
    heads = config.linear_num_value_heads
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + heads * config.linear_value_head_dim
    normal = rng.standard_normal
    yield "ssm_conv1d.weight", normal((channels, config.linear_conv_kernel_dim), np.float32) / 2
    for name in ("ssm_alpha.weight", "ssm_beta.weight"):
        yield name, normal((heads, config.hidden_size), np.float32) * np.float32(config.hidden_size**-0.5)
    yield "ssm_a", -np.exp(rng.uniform(-6, 0, heads)).astype(np.float32)  # states forget after 1 to 400 tokens
    yield "ssm_dt.bias", normal(heads, np.float32)
    yield "ssm_norm.weight", np.ones(config.linear_value_head_dim, np.float32)


def write(config: Any, tokenizer: gguf.GGUFReader, path: Path, seed: int) -> None:
    """Writes the file."""
    rng, writer = np.random.default_rng(seed), gguf.GGUFWriter(path, "qwen35")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(10_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_uint32("qwen35.ssm.conv_kernel", config.linear_conv_kernel_dim)
    writer.add_uint32("qwen35.ssm.state_size", config.linear_key_head_dim)
    writer.add_uint32("qwen35.ssm.group_count", config.linear_num_key_heads)
    writer.add_uint32("qwen35.ssm.time_step_rank", config.linear_num_value_heads)
    writer.add_uint32("qwen35.ssm.inner_size", config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32("qwen35.full_attention_interval", 4)

    fields = {name: field.contents() for name, field in tokenizer.fields.items() if name.startswith("tokenizer.ggml.")}
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    further = [f"[unused{number}]" for number in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list(tokens + further)
    writer.add_token_types(types + [NORMAL] * len(further))
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(False)

    def add(name: str, rows: int, columns: int, form: gguf.GGMLQuantizationType) -> None:
        writer.add_tensor(f"{name}.weight", random_blocks(rng, rows, columns, form), raw_dtype=form)

    add("token_embd", config.vocab_size, config.hidden_size, gguf.GGMLQuantizationType.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(config.hidden_size, np.float32))
    for layer in range(config.num_hidden_layers):
        for name, rows, columns in layer_shapes(config, layer):
            add(f"blk.{layer}.{name}", rows, columns, gguf.GGMLQuantizationType.Q4_K)
        for name, tensor in numbers(config, layer, rng):
            writer.add_tensor(f"blk.{layer}.{name}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peer.random_gguf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="(default: %(default)s)")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="GGUF file with a tokenizer of as many tokens or fewer"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    args = parser.parse_args(argv)
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    try:
        tokenizer = gguf.GGUFReader(args.tokenizer)
    except (OSError, ValueError) as error:
        parser.error(f"--tokenizer {args.tokenizer} cannot be read as a GGUF file: {error}")
    write(SimpleNamespace(**json.loads(resolve(args.model, weights=False).read_text())), tokenizer, args.out, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())

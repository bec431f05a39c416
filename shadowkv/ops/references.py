"""Collects the references of all ops. ``registry.Ops`` replaces references with faster backends. Type checkers take the
ops' signatures from here."""

from __future__ import annotations

from shadowkv.ops.activation_rows.reference import add_rms_norm, gated_activation, quantize_tokens, rms_norm
from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.attend_blocks.reference import attend_blocks
from shadowkv.ops.attend_coded.reference import attend_coded
from shadowkv.ops.attend_selected.reference import attend_selected
from shadowkv.ops.choose_experts.reference import choose_experts
from shadowkv.ops.chunk_scores.reference import chunk_mean_scores, find_outliers, min_max_scores
from shadowkv.ops.copies.reference import append_block, append_tokens, gather_context, write_rows
from shadowkv.ops.decode_layers.reference import decode_layers
from shadowkv.ops.dense_attention.reference import dense_attention
from shadowkv.ops.expert_rows.reference import sort_by_expert, sum_experts
from shadowkv.ops.fetch_chunks.reference import fetch_chunks
from shadowkv.ops.grouped_matmul.reference import grouped_matmul
from shadowkv.ops.grouped_quantized_matmul.reference import grouped_quantized_matmul
from shadowkv.ops.linear_attention.reference import causal_convolution, gated_delta_rule, ssd
from shadowkv.ops.low_rank_basis.reference import low_rank_basis
from shadowkv.ops.paged_attention.reference import paged_attention
from shadowkv.ops.paged_window_attention.reference import paged_window_attention
from shadowkv.ops.partial_attention.reference import add_sinks, merge_attention
from shadowkv.ops.pooled_scores.reference import pooled_scores
from shadowkv.ops.project_latents.reference import project_latents
from shadowkv.ops.quantize_rows.reference import quantize_rows
from shadowkv.ops.quantized_matmul.reference import dequantize_rows, quantized_matmul
from shadowkv.ops.rebuild_rows.reference import rebuild_rows
from shadowkv.ops.sample_tokens.reference import sample_tokens
from shadowkv.ops.scaled_matmul.reference import scaled_matmul
from shadowkv.ops.select_blocks.reference import select_blocks
from shadowkv.ops.select_by_sketch.reference import select_by_sketch
from shadowkv.ops.select_top_chunks.reference import select_top_chunks
from shadowkv.ops.sign_scores.reference import sign_scores
from shadowkv.ops.sketch_keys.reference import sketch_keys
from shadowkv.ops.sketch_queries.reference import sketch_queries
from shadowkv.ops.whiten_rows.reference import whiten_rows


class References:
    """Every op as an attribute that holds its reference. ``Ops`` puts faster backends in their place."""

    def __init__(self) -> None:
        self.add_rms_norm = add_rms_norm
        self.add_sinks = add_sinks
        self.append_block = append_block
        self.append_tokens = append_tokens
        self.apply_rope = apply_rope
        self.attend_blocks = attend_blocks
        self.attend_coded = attend_coded
        self.attend_selected = attend_selected
        self.causal_convolution = causal_convolution
        self.choose_experts = choose_experts
        self.chunk_mean_scores = chunk_mean_scores
        self.decode_layers = decode_layers
        self.dense_attention = dense_attention
        self.dequantize_rows = dequantize_rows
        self.fetch_chunks = fetch_chunks
        self.find_outliers = find_outliers
        self.gated_activation = gated_activation
        self.gated_delta_rule = gated_delta_rule
        self.gather_context = gather_context
        self.grouped_matmul = grouped_matmul
        self.grouped_quantized_matmul = grouped_quantized_matmul
        self.low_rank_basis = low_rank_basis
        self.merge_attention = merge_attention
        self.min_max_scores = min_max_scores
        self.paged_attention = paged_attention
        self.paged_window_attention = paged_window_attention
        self.pooled_scores = pooled_scores
        self.project_latents = project_latents
        self.quantize_rows = quantize_rows
        self.quantize_tokens = quantize_tokens
        self.quantized_matmul = quantized_matmul
        self.rebuild_rows = rebuild_rows
        self.rms_norm = rms_norm
        self.sample_tokens = sample_tokens
        self.scaled_matmul = scaled_matmul
        self.select_blocks = select_blocks
        self.select_by_sketch = select_by_sketch
        self.select_top_chunks = select_top_chunks
        self.sign_scores = sign_scores
        self.sketch_keys = sketch_keys
        self.sketch_queries = sketch_queries
        self.sort_by_expert = sort_by_expert
        self.ssd = ssd
        self.sum_experts = sum_experts
        self.whiten_rows = whiten_rows
        self.write_rows = write_rows

"""Where each method is: its modules, ops, sources and tests, as a table of docs/structure.md (``structure.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shadowkv.ops.attend_coded.selected import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {
    "cpu": "C++",
    "triton": "Triton",
    "cuda": "CUDA",
    "flashinfer": "FlashInfer",
    "flash": "flash-attn",
    "humming": "Humming",
    "fla": "fla-core",
}
"""Languages of ops' backends besides their references, or whose they are, by the first word of their files' names."""


class Method(NamedTuple):
    """A method, or what several have in common.

    Attributes:
        name: of the method.
        modules: in ``shadowkv``.
        ops: in ``shadowkv/ops``.
        sources: where reading its C++ and CUDA starts, in ``csrc``.
        tests: in ``tests``, which lead to those on GPUs.
        without: pairs of an op and a language whose backend supports none of this method's formats.
    """

    name: str
    modules: tuple[str, ...]
    ops: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[tuple[str, str], ...] = ()


def _parts(*names: str) -> tuple[str, ...]:
    return tuple(f"kvcache/parts/{name}.py" for name in names)


def _codecs(*names: str) -> tuple[str, ...]:
    return tuple(f"kvcache/codecs/{name}.py" for name in names)


def _baselines(*names: str) -> tuple[str, ...]:
    return tuple(f"baselines/{name}.py" for name in names)


METHODS = (
    Method(
        "exact pages (`full`)",
        (*_parts("rows", "index_plain"), "kvcache/decode/decode_attention.py"),
        ("append_block", "append_tokens", "paged_attention", "merge_attention", "write_rows"),
        ("cpu/attention/paged_attention.h", "kernels/paged_attention"),
        ("kvcache/test_exactness.py", "ops/test_attention_ops.py"),
    ),
    Method(
        "dense prefill",
        ("kvcache/prefill/prefill_attention.py", "kvcache/prefill/exact.py"),
        ("dense_attention", "gather_context"),
        (),
        ("ops/test_dense_attention.py", "ops/test_attention_libraries.py", "kvcache/test_packed_prefill.py"),
    ),
    Method(
        "mixtures of experts",
        ("layers/moe.py", "models/checkpoints/experts.py"),
        ("choose_experts", "sort_by_expert", "grouped_matmul", "grouped_quantized_matmul", "sum_experts"),
        (),
        (
            "ops/test_expert_ops.py",
            "ops/test_grouped_matmul.py",
            "ops/test_packed_experts.py",
            "models/test_experts.py",
            "models/test_experts_engine.py",
        ),
    ),
    Method(
        "sliding windows",
        ("kvcache/sequences/layout.py", "kvcache/sequences/pool.py"),
        ("paged_window_attention", "dense_attention"),
        (),
        (
            "kvcache/test_windows.py",
            "ops/test_window_ops.py",
            "ops/test_dense_attention.py",
            "engine/test_layer_kinds.py",
        ),
    ),
    Method(
        "layers with heads of their own, keys of other layers (Gemma 4)",
        ("kvcache/policy/shape.py", "models/families/gemma4.py", "layers/per_layer_inputs.py"),
        (),
        (),
        ("models/test_gemma4.py",),
    ),
    Method(
        "sinks (gpt-oss)",
        ("kvcache/decode/decode_attention.py", "kvcache/prefill/prefill_attention.py"),
        ("add_sinks", "dense_attention"),
        (),
        ("kvcache/test_sinks.py", "ops/test_window_ops.py", "models/test_gpt_oss_attention.py"),
    ),
    Method(
        "sparse prefill",
        _parts("prefill"),
        ("select_blocks", "attend_blocks"),
        ("kernels/score_blocks_sm90", "kernels/attend_blocks_sm90"),
        ("kvcache/test_sparse_prefill.py", "ops/test_prefill_blocks.py"),
    ),
    Method(
        "low-rank keys (ShadowKV)",
        (*_parts("keys_low_rank"), *_codecs("latents")),
        ("low_rank_basis", "whiten_rows", "project_latents", "rebuild_rows"),
        ("kernels/whiten_rows", "kernels/attend_selected/keys.cuh"),
        ("ops/test_storage_ops.py", "ops/test_subspace_iteration.py"),
    ),
    Method(
        "attention to selected chunks",
        ("kvcache/decode/decode_attention.py", "kvcache/inspection.py"),
        ("attend_selected",),
        ("cpu/attention/attend_selected.h", "kernels/attend_selected", "kernels/attend_latents_sm90"),
        ("ops/test_attend_selected.py", "kvcache/test_policies.py"),
    ),
    Method(
        "landmarks and outliers (ShadowKV)",
        _parts("index_chunks"),
        ("chunk_mean_scores", "find_outliers", "select_top_chunks"),
        ("kernels/select_top_chunks",),
        ("ops/test_selection_ops.py", "kvcache/test_fp8_landmarks.py"),
    ),
    Method(
        "bounds of keys (Quest)",
        ("baselines/quest.py",),
        ("min_max_scores", "select_top_chunks"),
        ("kernels/select_top_chunks",),
        ("ops/test_selection_ops.py",),
    ),
    Method(
        "key sketch (`turbo`)",
        _parts("index_sketch"),
        ("whiten_rows", "sketch_keys", "sketch_queries", "sign_scores", "select_by_sketch"),
        ("sketch_rules.h", "cpu/sketch")
        + ("kernels/sketch_queries", "kernels/sign_scores", "kernels/select_by_sketch"),
        ("ops/test_sketch.py", "kvcache/test_sketch_maps.py"),
    ),
    Method(
        "sampled budget (`turbo`)",
        ("ops/sampling.py",),
        ("select_by_sketch",),
        ("cpu/sketch", "kernels/select_by_sketch/weighted_sampling.cuh"),
        ("ops/test_sketch_sampling.py", "kvcache/test_sampled.py"),
    ),
    Method(
        "indexes of other papers, the oracle",
        (*_parts("index_plain", "scores"), *_baselines("streaming_llm", "loki", "infinigen", "triattention", "snapkv")),
        (),
        (),
        ("kvcache/test_policies.py", "baselines/test_triattention.py"),
    ),
    Method(
        "rows of levels (TurboQuant, PolarQuant)",
        (*_parts("rows"), *_codecs("rotated", "lloyd", "tables", "packing"), *_baselines("polarquant")),
        ("quantize_rows", "attend_coded", "rebuild_rows"),
        (
            "codecs.h",
            "cpu/attention/row_codecs.inc.h",
            "kernels/attend_selected/value_codecs.cuh",
            "kernels/attend_coded",
        ),
        (
            "kvcache/test_lloyd_rows.py",
            "ops/test_attend_coded.py",
            "ops/test_coded_pages.py",
            "ops/test_coded_kernel.py",
        ),
    ),
    Method(
        "rows of 8-bit floats",
        _codecs("fp8"),
        ("quantize_rows", "attend_coded", "attend_selected"),
        ("kernels/paged_attention/paged_rows.cuh", "kernels/attend_selected/values.cuh"),
        ("kvcache/test_coded_policies.py", "ops/test_cuda_attend_fp8.py", "ops/test_cuda_attend_selected_fp8.py"),
        (("attend_coded", "C++"), ("attend_selected", "C++")),
    ),
    Method(
        "`tq3_0`",
        _baselines("tq3_0"),
        ("attend_coded",),
        ("kernels/attend_coded/blocks.cuh", "kernels/attend_coded/block_products.cuh"),
        ("baselines/test_tq3_0.py",),
        (("attend_coded", "C++"),),
    ),
    Method("TQ35, TQ25 and QJL", _baselines("qjl"), (), (), ("baselines/test_qjl.py",)),
    Method(
        "KVarN",
        _baselines("kvarn"),
        ("attend_coded",),
        ("kernels/attend_coded/steps.cuh", "kernels/attend_coded/step_products.cuh"),
        ("baselines/test_kvarn.py",),
        (("attend_coded", "C++"),),
    ),
    Method(
        "Shard",
        _baselines("shard", "vq"),
        ("project_latents", "quantize_rows", "attend_coded"),
        ("kernels/attend_mixed_sm90",),
        ("baselines/test_shard.py", "baselines/test_vq.py", "ops/test_cuda_attend_mixed.py"),
        (("attend_coded", "C++"), ("attend_coded", "Triton")),
    ),
    Method(
        "values on the host",
        ("kvcache/decode/fetching.py",),
        ("fetch_chunks",),
        ("kernels/fetch_chunks",),
        ("ops/test_fetch_chunks.py", "kvcache/test_fetching.py"),
    ),
    Method(
        "layers",
        ("layers/decoder_layer.py", "layers/attention.py", "layers/norm.py"),
        ("rms_norm", "add_rms_norm", "gated_activation", "apply_rope"),
        (),
        ("ops/test_triton_ops.py", "ops/test_rope.py", "models/test_families.py"),
    ),
    Method(
        "linear attention (Gated DeltaNet, Mamba-2)",
        ("layers/gated_delta_net.py", "layers/mamba2.py", "kvcache/recurrent/states.py", "ops/recurrence.py"),
        ("causal_convolution", "gated_delta_rule", "ssd"),
        ("cpu/recurrence",),
        ("ops/test_linear_attention.py", "ops/test_gated_delta_rule.py", "ops/test_ssd.py", "models/test_qwen3_5.py"),
        (("causal_convolution", "fla-core"),),
    ),
    Method(
        "native indexers (MiniMax-M3, the Qwen4 preview)",
        (
            *_parts("index_native"),
            "kvcache/decode/native.py",
            "kvcache/decode/pooled.py",
            "kvcache/prefill/native.py",
            "layers/indexer.py",
        ),
        ("chunk_mean_scores", "pooled_scores", "attend_selected", "paged_attention"),
        (),
        ("models/test_minimax_m3.py", "models/test_qwen4_exp.py", "ops/test_pooled_scores.py"),
    ),
    Method(
        "hyper-connections and n-gram embeddings (the Qwen4 preview)",
        ("layers/streams/hyper_connections.py", "layers/streams/n_grams.py", "layers/streams/row_table.py"),
        ("causal_convolution",),
        ("cpu/recurrence",),
        ("models/test_qwen4_exp.py", "models/test_n_gram_tables.py"),
        (("causal_convolution", "fla-core"),),
    ),
    Method(
        "a step's layers in one call, on a CPU",
        ("engine/execution/fused_layers.py",),
        ("decode_layers",),
        ("cpu/decode_layers",),
        ("ops/test_decode_layers.py",),
    ),
    Method(
        "weights in 8 bits",
        ("layers/linear.py",),
        ("quantize_tokens", "scaled_matmul"),
        (),
        ("ops/test_fp8_ops.py", "models/test_fp8.py"),
    ),
    Method(
        "weights as quantized files have them",
        ("layers/quantized_matrix.py", "ops/quantized/groups.py", "ops/quantized/blocks.py"),
        ("quantized_matmul", "dequantize_rows"),
        ("cpu/quantized_matmul",),
        (
            "ops/test_quantized_blocks.py",
            "ops/test_quantized_groups.py",
            "models/test_gguf_blocks.py",
            "models/test_quantized_formats.py",
        ),
        (("dequantize_rows", "Humming"),),
    ),
    Method(
        "speculative decoding",
        ("engine/speculation/speculation.py", "engine/scheduling/drafted_rows.py", "kvcache/decode/planning.py"),
        (),
        (),
        ("engine/test_speculation.py", "engine/test_drafters.py"),
    ),
    Method(
        "drafts by the model itself (`full-speculative`)",
        ("engine/scheduling/sparse_drafts.py", "kvcache/decode/planning.py", "kvcache/parts/index_sketch.py"),
        (),
        (),
        ("engine/test_sparse_drafts.py",),
    ),
    Method(
        "drafts by a layer of the checkpoint (`mtp`)",
        ("models/draft_head.py", "engine/scheduling/head_drafts.py", "engine/execution/head_runner.py"),
        (),
        (),
        ("models/test_draft_heads.py", "models/test_head_drafts.py"),
    ),
    Method(
        "quality meter",
        ("engine/scheduling/quality_meter.py", "kvcache/decode/planning.py"),
        (),
        (),
        ("engine/test_quality_meter.py",),
    ),
    Method(
        "sampling of tokens", ("engine/execution/sampler.py",), ("sample_tokens",), (), ("ops/test_sample_tokens.py",)
    ),
)


def table() -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| method | `shadowkv/` | `shadowkv/ops/` (and a reference each) | `csrc/` | `tests/` |",
        "| --- | --- | --- | --- | --- |",
    ]
    for method in METHODS:
        ops = ", ".join(_with_backends(op, method.without) for op in method.ops)
        columns = (_listed(method.modules), ops)
        lines.append(" | ".join(("| " + method.name, *columns, _listed(method.sources), _listed(method.tests))) + " |")
    return lines


def _listed(paths: tuple[str, ...]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def folder_of(op: str) -> Path:
    """The folder of an op: its own, or the one that it shares with other small ops."""
    ops = ROOT / "shadowkv/ops"
    if (ops / op).exists():
        return ops / op
    return next(
        file.parent for file in ops.glob("*/reference.py") if f"\ndef {op}(" in file.read_text(encoding="utf-8")
    )


def languages_of(op: str) -> list[str]:
    """The languages of an op's backends: of those that have files, and of those that share one."""
    names = {file.stem for file in folder_of(op).glob("*.py")} | {*(BACKENDS if op == "attend_coded" else ())}
    words = {name.partition("_")[0] for name in names}
    return [language for word, language in LANGUAGES.items() if word in words]


def _with_backends(op: str, without: tuple[tuple[str, str], ...]) -> str:
    """An op and the languages of its backends, less those in ``without``."""
    found = [name for name in languages_of(op) if (op, name) not in without]
    return f"`{op}` ({', '.join(found)})" if found else f"`{op}`"

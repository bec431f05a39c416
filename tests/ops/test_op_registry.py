"""The choice of backends."""

import ast
import inspect
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import shadowkv.ops
from shadowkv.engine.execution.fused_layers import FusedLayers
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.ops.attend_coded.selected import BACKENDS as SELECTED
from shadowkv.ops.attend_coded.selected import EveryChunk
from shadowkv.ops.attend_selected import cuda as attend_selected
from shadowkv.ops.attend_selected import cuda_sm90 as attend_selected_sm90
from shadowkv.ops.case import Case
from shadowkv.ops.dense_attention import cuda_sm90 as dense_attention
from shadowkv.ops.extension import Unbuilt
from shadowkv.ops.registry import CALLS, FOLDERS, NAMES, Ops

ROOT = Path(shadowkv.ops.__file__).parent
OPS_OF = {path.parent.name: [path.parent.name] for path in ROOT.glob("*/reference.py")}
OPS_OF |= {folder: [op for op in FOLDERS if FOLDERS[op] == folder] for folder in FOLDERS.values()}
"""The ops of each folder."""
BACKENDS = [path for folder in sorted(OPS_OF) for path in sorted((ROOT / folder).glob("*.py"))]

TURBO = Case(
    ops=frozenset(CALLS) - {"attend_coded", *FusedLayers.calls},
    dtype=torch.bfloat16, head_dim=128, num_query_heads=32, num_kv_heads=8,
    rope_dim=128, chunk=1, rank=160, key_codec=17, value_codec=2, max_pages=2000, max_selected=2000, fetched_bytes=384,
    host_values=True, capability=(9, 0), block_memory=232448,
)  # fmt: skip
"""Llama-3.1-8B on an H200, with values on the host."""
FOR_HOPPER = {"attend_selected", "dense_attention.partial", "dense_attention.causal"}
"""Calls that have a kernel for Hopper besides one for any GPU."""
CALLS_OF_DENSE_ATTENTION = [f"dense_attention.{form}" for form in ("causal", "partial", "packed", "windowed")]
INT4 = replace(TURBO, ops=frozenset(CALLS), key_codec=18, latent_width=96, fetched_bytes=0, host_values=False)
"""``TURBO`` with keys in 8 and 4 bits, and values on the device."""
SHARD = {"key_codec": 19, "value_codec": 13}
"""Formats of the preset ``shard``."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry finds every backend, as on a GPU with everything installed."""
    if attend_selected.missing():  # only the library knows how much memory its kernels need
        monkeypatch.setattr(attend_selected, "_op", lambda *_: lambda *_: 0)
    for path in BACKENDS:
        module = import_module(f"shadowkv.ops.{path.parent.name}.{path.stem}")
        if hasattr(module, "missing"):
            monkeypatch.setattr(module, "missing", lambda: [])


def test_every_folder_is_a_known_op_with_a_reference() -> None:
    assert sorted(op for ops in OPS_OF.values() for op in ops) == sorted(NAMES)
    assert set(Ops("cpu", overrides=dict.fromkeys(NAMES, "reference")).backends.items()) == {
        (name, "reference") for name in CALLS
    }


@pytest.mark.parametrize("device", ["cpu", "cuda", torch.device("cuda", 1)])
def test_every_op_has_a_backend_on_every_device_type(device: torch.device | str) -> None:
    ops = Ops(device)
    assert set(ops.backends) == ops.called == set(CALLS)
    assert all(callable(getattr(ops, name)) for name in NAMES)


def test_what_is_not_built_is_passed_over_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.ops.sign_scores.cuda.missing", lambda: [Unbuilt("not built")])
    monkeypatch.setattr("shadowkv.ops.sketch_queries.cuda.missing", lambda: ["no tensor cores"])
    ops = Ops("cuda")
    assert ops.backends["sign_scores"] == ops.backends["sketch_queries"] == "reference"
    assert ops.reasons["sign_scores"] == ["cuda: not built"]
    assert ops.reasons["sketch_queries"] == ["cuda: no tensor cores"]
    assert ops.unbuilt["sign_scores"] == "not built"
    assert "sketch_queries" not in ops.unbuilt


def test_backends_say_what_they_lack_in_one_way() -> None:
    for path in BACKENDS:
        name = path.parent.name
        module = import_module(f"shadowkv.ops.{name}.{path.stem}")
        assert not hasattr(module, "available"), f"{name}/{path.name}: what it lacks is missing(), a list of reasons"
        assert isinstance(getattr(module, "missing", lambda: [])(), list)


def test_a_gpu_runs_no_reference_of_the_default_policy(built: None) -> None:
    ops = Ops("cuda", TURBO)
    slow = {name for name, backend in ops.backends.items() if backend == "reference"}
    # It calls none of them: its weights are plain, and steps are graphs.
    assert slow == {"dequantize_rows", *FusedLayers.calls}
    assert ops.backends["quantized_matmul"] == "humming"
    assert ops.backends["grouped_matmul"] == "cuda"
    assert [ops.backends[call] for call in CALLS_OF_DENSE_ATTENTION] == ["cuda_sm90"] * 3 + ["triton"]
    assert {name for name, reasons in ops.reasons.items() if reasons} == {"attend_selected"}
    assert ops.backends["attend_selected"] == "cuda"
    assert not ops.synchronising


STORING = {"quantize_rows", "rebuild_rows", "sketch_keys", "whiten_rows", "dense_attention.partial"}
"""Calls of ``turbo`` that run in PyTorch with heads of 512. They store prompts and full pages, or attend to stored
tokens for later turns."""


def test_decode_steps_with_heads_of_512_run_in_kernels(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of Gemma-4-31B."""

    def no_kernel(*_: object) -> int:
        raise RuntimeError("attend_selected_memory, , head dim 512 is not 64, 96, 128 or 256")

    monkeypatch.setattr(attend_selected, "_op", lambda *_: no_kernel)
    heads = {"head_dim": 512, "rope_dim": 512, "num_kv_heads": 4, "rank": 320, "latent_width": 176}
    case = replace(INT4, **heads, ops=TURBO.ops - {"select_blocks", "attend_blocks", "paged_window_attention"})
    ops = Ops("cuda", case, attention_backend="shadowkv")
    slow = {name for name in ops.called if ops.backends[name] == "reference"}
    assert slow == STORING | {"dequantize_rows"}
    assert not ops.synchronising and not ops.needing_lengths


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rank": 32, "latent_width": 32}, None),
        ({"head_dim": 64, "rope_dim": 64}, None),
        ({"chunk": 16}, None),
        ({"dtype": torch.float16}, "torch.float16 is not bfloat16"),
        ({"num_query_heads": 128}, None),
        ({"num_query_heads": 136}, "17 query heads per kv head are more than 16"),
        ({"chunk": 32}, "chunk size 32 is not 1, 2, 4, 8 or 16"),
        ({"head_dim": 256, "rope_dim": 256}, "head dim 256 is not 64 or 128"),
        ({"key_codec": 17}, "codec 17 of keys is not low-rank-int4"),
        ({"key_codec": 5, "centred": True, "rank": 0, "latent_width": 0}, "codec 5 of keys is not low-rank-int4"),
        ({"value_codec": 0}, "codec 0 of values does not have equal steps"),
        ({"rank": 192, "latent_width": 112}, "rank 192 is not 32, 64, 96, 128 or 160"),
        ({"rank": 48, "latent_width": 40}, "rank 48 is not 32, 64, 96, 128 or 160"),
        ({"latent_width": 112}, "latents of 112 bytes do not have 32 dimensions in 8 bits and the others in 4"),
        ({"host_values": True}, "values are on the host"),
        ({"host_values": True, "fetched_bytes": 48}, "values are on the host"),
        ({"rope_dim": 64}, None),
        ({"rope_dim": 40}, "RoPE rotates 40 of 128 dimensions in halves; the kernel needs a multiple of 16 in halves"),
        (
            {"interleaved": True},
            "RoPE rotates 128 of 128 dimensions in neighbours; the kernel needs a multiple of 16 in halves",
        ),
    ],
)
def test_what_the_kernel_for_hopper_does_not_take_goes_on_to_the_next(
    built: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], reason: str | None
) -> None:
    """For selected chunks, and for all where there is no index."""
    monkeypatch.setattr("shadowkv.ops.attend_selected.cuda.supports", lambda case: [])
    ops = Ops("cuda", replace(INT4, **changes))
    assert ops.backends["attend_selected"] == ("cuda" if reason else "cuda_sm90")
    assert len(ops.reasons["attend_selected"]) == (reason is not None)
    assert reason is None or reason in ops.reasons["attend_selected"][0]
    assert (ops.backends["attend_coded"] == "cuda_selected_sm90") == (reason is None)


DECODING = ("sketch_queries", "sign_scores", "select_by_sketch", "attend_selected", "attend_coded")
"""Ops that ``turbo``'s decode steps call for compressed pages, with and without an index."""


@pytest.mark.parametrize(
    ("changes", "attending"),
    [
        ({"num_query_heads": 40}, "cuda_sm90"),  # five to a kv head, as Qwen2.5-14B
        ({"num_query_heads": 96, "rope_dim": 64}, "cuda_sm90"),  # GLM-4.5-Air
        ({"num_query_heads": 64, "num_kv_heads": 4}, "cuda_sm90"),  # Qwen3-235B-A22B
        ({"num_query_heads": 64, "num_kv_heads": 4, "host_values": True}, "cuda"),
        ({"num_query_heads": 64, "num_kv_heads": 4, "capability": (8, 0)}, "cuda"),
        ({"num_query_heads": 16, "head_dim": 256, "rope_dim": 256}, "cuda"),  # Gemma-3-12B
    ],
)
def test_models_whose_decode_steps_have_kernels(
    built: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], attending: str
) -> None:
    monkeypatch.setattr("shadowkv.ops.attend_selected.cuda._op", lambda *_: lambda *_: 0)
    case = replace(INT4, **changes)
    if case.capability != (9, 0):
        monkeypatch.setattr(attend_selected_sm90, "missing", lambda: ["no Hopper"])
    backends = Ops("cuda", case).backends
    assert {name: backends[name] for name in DECODING[:3]} == dict.fromkeys(DECODING[:3], "cuda")
    assert backends["attend_selected"] == attending
    assert backends["attend_coded"] == {"cuda_sm90": "cuda_selected_sm90", "cuda": "cuda_selected"}[attending]


def test_more_than_sixteen_query_heads_a_kv_head_go_to_triton_and_pytorch(
    built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op refuses them, and none that serves waits for the host."""
    monkeypatch.setattr("shadowkv.ops.attend_selected.cuda._op", lambda *_: lambda *_: 0)
    ops = INT4.ops - {"dequantize_rows", "add_sinks", *FusedLayers.calls}
    ops = Ops("cuda", replace(INT4, ops=ops, num_query_heads=17 * 8))
    fallen = {
        name: ops.backends[name] for name in ops.called if any("kv head are more" in r for r in ops.reasons[name])
    }
    assert fallen == {
        "attend_selected": "triton",
        **dict.fromkeys(("sketch_queries", "sign_scores", "select_by_sketch"), "reference"),
        "attend_coded": "triton_selected",
    }
    assert not ops.synchronising


@pytest.mark.parametrize(
    ("changes", "backend", "reason"),
    [
        ({"dtype": torch.float16}, "triton", "it multiplies torch.bfloat16, not torch.float16"),
        ({"capability": (8, 0)}, "triton", "it is for GPUs of compute capability 9 and 10, not 8"),
        ({"dtype": torch.float32}, "reference", "it multiplies torch.bfloat16, not torch.float32"),
    ],
)
def test_experts_are_looped_over_in_float32_alone(
    built: None, changes: dict[str, object], backend: str, reason: str
) -> None:
    ops = Ops("cuda", replace(TURBO, ops=frozenset({"grouped_matmul"}), **changes))
    assert ops.backends["grouped_matmul"] == backend
    assert ops.reasons["grouped_matmul"][0] == f"cuda: {reason}"
    assert ops.synchronising == ["grouped_matmul"] * (backend == "reference")


@pytest.mark.parametrize(
    ("changes", "backends"),
    [
        ({}, ["cuda_sm90", "cuda_sm90", "cuda_sm90", "triton"]),
        ({"dtype": torch.float16, "head_dim": 64}, ["cuda_sm90", "cuda_sm90", "cuda_sm90", "triton"]),
        ({"head_dim": 96}, ["cuda", "cuda", "triton", "triton"]),
        ({"head_dim": 256}, ["cuda", "cuda", "triton", "triton"]),
        ({"head_dim": 512}, ["triton", "reference", "triton", "triton"]),
        ({"head_dim": 512, "dtype": torch.float32}, ["reference"] * 4),
        ({"head_dim": 520}, ["reference"] * 4),
        ({"head_dim": 84}, ["cuda_masked", "reference", "triton", "triton"]),
        ({"dtype": torch.float32}, ["cuda_masked", "reference", "triton", "triton"]),
    ],
)
def test_dense_prefill_by_dtype_and_head_dim(built: None, changes: dict[str, object], backends: list[str]) -> None:
    ops, calls = Ops("cuda", replace(INT4, **changes), attention_backend="shadowkv"), CALLS_OF_DENSE_ATTENTION
    assert [ops.backends[call] for call in calls] == backends
    if backends[0] != "cuda_sm90":
        assert ops.reasons[calls[0]][0].startswith("cuda_sm90: ")
    assert ops.needing_lengths == [call for call in calls[2:] if ops.backends[call] == "reference"]


@pytest.mark.parametrize(("library", "forms"), [("flashinfer", ["packed", "windowed"]), ("flash-attn", ["windowed"])])
def test_libraries_that_have_to_know_lengths(built: None, library: str, forms: list[str]) -> None:
    ops = Ops("cuda", INT4, attention_backend=library)
    assert ops.needing_lengths == [f"dense_attention.{form}" for form in forms]
    assert not Ops("cpu").needing_lengths


@pytest.mark.parametrize(
    ("head_dim", "block_memory", "captured"),
    [(128, 232448, True), (256, 232448, True), (256, 101376, False), (512, 232448, False)],
)
def test_a_sketch_is_learned_in_a_graph_where_a_kernel_whitens_rows(
    built: None, head_dim: int, block_memory: int, captured: bool
) -> None:
    """101,376 bytes are a thread block's shared memory on an RTX 4090."""
    ops = Ops("cuda", replace(INT4, head_dim=head_dim, block_memory=block_memory), attention_backend="shadowkv")
    shape = ModelShape(2, 32, 8, head_dim)
    parts = build_parts(resolve(preset("turbo:rank=32"), shape), shape, torch.bfloat16)
    assert (ops.backends["whiten_rows"] == "cuda") == captured
    assert ops.not_in_graphs == ["whiten_rows"] * (not captured)
    assert parts.captures_observe(ops) == captured
    assert "whiten_rows" not in Ops("cpu").not_in_graphs, "there are no graphs on a CPU"


@pytest.mark.parametrize(
    ("tokens", "heads", "tiles"),
    [(1, 32, 32), (128, 32, 32), (129, 32, 64), (1024, 8, 64), (896, 8, 56), (8192, 32, 2048)],
)
def test_on_hopper_few_queries_go_to_flash_attention(
    monkeypatch: pytest.MonkeyPatch, tokens: int, heads: int, tiles: int
) -> None:
    """By the size of a call alone."""
    for kernel in ("attend_sequences", "flash_attention"):
        monkeypatch.setattr(dense_attention, kernel, lambda q, *_, kernel=kernel: (kernel, kernel))
    expected = "attend_sequences" if tiles >= dense_attention.MIN_TILES else "flash_attention"
    q, k = torch.empty(tokens, heads, 64), torch.empty(tokens, 2, 64)
    assert dense_attention.causal(q, k, k) == expected
    assert dense_attention.partial(q, k, k, False) == (expected, expected)


def test_a_gpu_that_is_no_hopper_has_the_other_kernels(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attend_selected", "dense_attention"):
        monkeypatch.setattr(f"shadowkv.ops.{name}.cuda_sm90.missing", lambda: ["no Hopper"])
    monkeypatch.setattr(attend_selected, "supports", lambda case: [])
    ops = Ops("cuda", INT4)
    assert {name: ops.backends[name] for name in FOR_HOPPER} == dict.fromkeys(FOR_HOPPER, "cuda")
    assert ops.backends["attend_coded"] == "cuda_selected"
    for name in FOR_HOPPER:
        (told,) = ops.reasons[name]
        assert told.endswith(": no Hopper")


SKETCH = ("sketch_queries", "sign_scores", "select_by_sketch")


@pytest.mark.parametrize(
    ("device", "changes", "names", "reason"),
    [
        ("cuda", {"dtype": torch.float16}, ["paged_attention"], "cuda: torch.float16 is not bfloat16"),
        ("cuda", {"dtype": torch.float32}, ["dense_attention.partial"], "cuda: torch.float32 is not of 16 bits"),
        ("cuda", {"head_dim": 80}, ["paged_attention"], "cuda: head dim 80 is not 64, 96, 128 or 256"),
        ("cuda", {"head_dim": 84}, ["dense_attention.partial"], "cuda: head dim 84 is no multiple of 8 up to 256"),
        ("cuda", {"head_dim": 192}, SKETCH, "cuda: head dim 192 is not in 8-128, 200-256 or 456-512"),
        ("cuda", {"head_dim": 192}, ["sketch_keys"], "triton: head dim 192 is above 128"),
        ("cuda", {"num_query_heads": 136}, SKETCH, "cuda: 17 query heads per kv head are more than 16"),
        ("cuda", {"num_query_heads": 264}, ["select_top_chunks"], "cuda: 33 query heads per kv head are more than 32"),
        (
            "cuda",
            {"mass": True},
            ["select_top_chunks"],
            "cuda: the policy stops at a share of the softmax (mass), which the CUDA kernel does not support",
        ),
        ("cuda", {"fetched_bytes": 24}, ["fetch_chunks"], "cuda: chunks of 24 bytes are no multiple of 16"),
        (
            "cuda",
            {"max_pages": 60000},
            ["select_by_sketch"],
            "cuda: 232448 bytes of shared memory are too few",
        ),
        (
            "cuda",
            {"max_pages": 9000, "max_selected": 75000},
            ["select_by_sketch"],
            "too few to select from 576000",
        ),
        ("cpu", {"dtype": torch.float16}, ["paged_attention"], "cpu: torch.float16 is not float32 or bfloat16"),
        ("cuda", {"head_dim": 192, "value_codec": 1}, ["quantize_rows"], "triton: head dim 192 is more than 128"),
        ("cuda", {"key_codec": 1000}, ["quantize_rows", "project_latents"], "triton: codec 1000 of keys is unknown"),
        ("cuda", {"value_codec": 17}, ["quantize_rows", "rebuild_rows"], "triton: codec 17 of values is unknown"),
        ("cpu", {"key_codec": 1000}, ["attend_selected"], "cpu: codec 1000 of keys is unknown"),
        ("cpu", {"dtype": torch.float64}, ["attend_selected"], "cpu: torch.float64 is not float32 or bfloat16"),
        ("cpu", {"head_dim": 264}, ["sign_scores", "select_by_sketch"], "cpu: head dim 264 is above 256"),
    ],
)
def test_what_a_backend_cannot_serve_goes_to_the_reference_with_its_reason(
    built: None, device: str, changes: dict[str, object], names: list[str], reason: str
) -> None:
    ops, usual = Ops(device, replace(TURBO, **changes)), Ops(device, TURBO)
    for name in names:
        assert usual.backends[name] != "reference"
        assert ops.backends[name] == "reference"
        assert any(reason in one for one in ops.reasons[name])


def test_long_contexts_and_many_examined_runs_are_searched_by_kernels(built: None) -> None:
    for changes in ({"max_pages": 55000}, {"max_pages": 9000, "max_selected": 55000}):
        assert Ops("cuda", replace(TURBO, **changes)).backends["select_by_sketch"] == "cuda"


def test_the_next_backend_is_asked_before_the_reference(built: None) -> None:
    ops = Ops("cuda", replace(TURBO, head_dim=96))
    assert ops.backends["dense_attention.packed"] == ops.backends["attend_blocks"] == "triton"
    assert ops.reasons["dense_attention.packed"] == ["cuda_sm90: head dim 96 is not 64 or 128"]


@pytest.mark.parametrize(
    ("changes", "backend", "reason"),
    [
        ({}, "cuda_fp8", None),
        ({"value_codec": 5}, "triton", "cuda_fp8: codec 5 of values is not fp8"),
        ({"centred": True}, "triton", "cuda_fp8: coded keys are stored without their mean"),
        ({"dtype": torch.float16}, "triton", "cuda_fp8: torch.float16 is not bfloat16"),
        ({"head_dim": 80}, "triton", "cuda_fp8: head dim 80 is not 64, 96, 128 or 256"),
    ],
)
def test_rows_of_8_bit_floats_have_kernels(
    built: None, changes: dict[str, object], backend: str, reason: str | None
) -> None:
    ops = Ops("cuda", replace(TURBO, ops=frozenset(CALLS), rank=0, **{"key_codec": 12, "value_codec": 12, **changes}))
    assert ops.backends["attend_coded"] == backend
    assert ops.backends["quantize_rows"] == ops.backends["rebuild_rows"] == "triton"
    assert reason is None or reason in ops.reasons["attend_coded"]


@pytest.mark.parametrize("centred", [False, True])
def test_selected_8_bit_floats_have_a_kernel(built: None, centred: bool) -> None:
    case = replace(TURBO, rank=0, key_codec=12, value_codec=12, chunk=1, centred=centred)
    assert Ops("cuda", case).backends["attend_selected"] == "cuda"
    without_mean = replace(case, centred=True, interleaved=True), replace(case, centred=True, key_codec=5)
    for other, reason in zip(without_mean, ("in neighbours", "stored without their mean"), strict=True):
        ops = Ops("cuda", other)
        assert ops.backends["attend_selected"] == "reference"
        assert any(told.startswith("cuda: ") and reason in told for told in ops.reasons["attend_selected"])


@pytest.mark.parametrize(
    ("changes", "backend", "reason"),
    [
        ({}, "cuda_dense", None),
        ({"value_codec": 12}, "triton", "cuda_dense: codec 12 of values is not dense"),
        ({"host_values": True}, "triton", "cuda_dense: values are on the host, in other pages than keys"),
        ({"head_dim": 80}, "triton", "cuda_dense: head dim 80 is not 64, 96, 128 or 256"),
    ],
)
def test_dense_rows_have_kernels(built: None, changes: dict[str, object], backend: str, reason: str | None) -> None:
    dense = {"rank": 0, "key_codec": 0, "value_codec": 0, "centred": False, "host_values": False}
    ops = Ops("cuda", replace(TURBO, ops=frozenset({"attend_coded"}), **{**dense, **changes}))
    assert ops.backends["attend_coded"] == backend
    assert reason is None or reason in ops.reasons["attend_coded"]


@pytest.mark.parametrize(("dim", "backend"), [(128, "cuda"), (64, "triton")])
def test_levels_that_are_bytes_go_to_cuda(built: None, dim: int, backend: str) -> None:
    rows = {"rank": 0, "key_codec": 5, "value_codec": 6, "head_dim": dim, "rope_dim": dim}
    coded = replace(TURBO, ops=frozenset({"attend_coded"}), **rows)
    assert Ops("cuda", coded).backends["attend_coded"] == backend


@pytest.mark.parametrize(
    ("keys", "values", "backend"), [(8, 8, "cuda"), (9, 9, "cuda"), (14, 15, "cuda"), (8, 9, "triton")]
)
def test_other_formats_go_to_cuda_as_policies_pair_them(built: None, keys: int, values: int, backend: str) -> None:
    coded = replace(TURBO, ops=frozenset({"attend_coded"}), rank=0, key_codec=keys, value_codec=values)
    assert Ops("cuda", coded).backends["attend_coded"] == backend


@pytest.mark.parametrize(
    ("changes", "backend", "reason"),
    [
        ({}, "cuda_mixed_sm90", None),
        ({"rank": 176}, "triton_selected", "cuda_mixed_sm90: rank 176 is not 96, 128, 160 or 192"),
        (
            {"num_kv_heads": 9, "num_query_heads": 36},
            "triton_selected",
            "cuda_mixed_sm90: 9 kv heads are an odd number",
        ),
        ({"head_dim": 64, "rope_dim": 64}, "triton_selected", "cuda_mixed_sm90: head dim 64 is not 128"),
        (
            {"interleaved": True},
            "triton_selected",
            "cuda_mixed_sm90: RoPE does not rotate all dimensions in halves",
        ),
        (
            {"host_values": True},
            "triton_selected",
            "cuda_mixed_sm90: values are on the host, and the kernel reads whole pages",
        ),
        (
            {"capability": (8, 0)},
            "triton_selected",
            "cuda_mixed_sm90: compute capability (8, 0) is not that of Hopper, 9.0",
        ),
        ({"key_codec": 18, "value_codec": 2}, "cuda_selected", "cuda_mixed_sm90: codec 2 of values is not vq-4x256"),
        ({"value_codec": 10}, "reference", "triton_selected: codec 10 of values is unknown"),
    ],
)
def test_low_rank_keys_without_an_index_have_kernels(
    built: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], backend: str, reason: str | None
) -> None:

    def known(case: Case) -> list[str]:
        return [] if case.key_codec == 18 else ["no kernel for its codecs"]

    monkeypatch.setattr(attend_selected, "supports", known)
    on_device = replace(TURBO, ops=frozenset(CALLS), fetched_bytes=0, host_values=False)
    ops = Ops("cuda", replace(on_device, **{**SHARD, **changes}))
    assert ops.backends["attend_coded"] == backend
    if reason is not None:
        name, _, why = reason.partition(": ")
        assert any(told.startswith(name) and why in told for told in ops.reasons["attend_coded"])


def test_ops_that_are_not_called_are_not_asked(built: None) -> None:
    ops = Ops("cuda", replace(TURBO, ops=frozenset(("apply_rope",)), dtype=torch.float16))
    assert ops.called == {"apply_rope"}
    assert ops.backends["paged_attention"] == "cuda"
    assert not ops.synchronising


def test_references_that_wait_for_the_device_are_told(built: None) -> None:
    assert Ops("cuda", replace(TURBO, dtype=torch.float16, fetched_bytes=8)).synchronising == [
        "fetch_chunks",
        "paged_attention",
    ]


def test_an_override_chooses_one_ops_backend_alone() -> None:
    ops = Ops("cuda", overrides={"apply_rope": "reference"})
    assert ops.backends == {**Ops("cuda").backends, "apply_rope": "reference"}
    assert not ops.reasons["apply_rope"]


def test_an_override_that_cannot_serve_is_refused_with_its_reason(built: None) -> None:
    with pytest.raises(ValueError, match=r"'paged_attention' has no backend 'cuda' here: cuda: torch.float32 is not"):
        Ops("cuda", replace(TURBO, dtype=torch.float32), {"paged_attention": "cuda"})


def test_unknown_ops_in_overrides_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"bake, sort.*known: .*apply_rope"):
        Ops("cpu", overrides={"sort": "reference", "apply_rope": "reference", "bake": "reference"})


def test_a_backend_that_the_op_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"'apply_rope'.*'abacus'"):
        Ops("cpu", overrides={"apply_rope": "abacus"})


@pytest.mark.parametrize("call", CALLS)
def test_backends_take_what_their_reference_takes(call: str) -> None:
    """Which is what type checkers know of an op."""
    op, _, form = call.partition(".")
    paths = [path for path in BACKENDS if op in OPS_OF[path.parent.name]]
    modules = {path.stem: import_module(f"shadowkv.ops.{path.parent.name}.{path.stem}") for path in paths}
    if op == "attend_coded":
        modules |= {name: EveryChunk(name) for name in SELECTED}
    found = {}
    for name, module in modules.items():
        function = getattr(module, form or op, None)
        if callable(function):
            parameters = inspect.signature(function).parameters.values()
            found[name] = [(each.name, each.kind, each.default) for each in parameters]
    assert found and all(parameters == found["reference"] for parameters in found.values()), found


@pytest.mark.parametrize(
    "path",
    [path for path in BACKENDS if path.stem not in ("reference", "__init__")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_backend_calls_its_own_reference(path: Path) -> None:
    folder = path.parent.name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in OPS_OF[folder] and isinstance(node.value, ast.Name):
            assert node.value.id != "reference", f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == f"shadowkv.ops.{folder}.reference":
            assert not {*OPS_OF[folder]} & {alias.name for alias in node.names}, f"line {node.lineno}"


SIZE_OF_A_CALL = {"low_rank_basis/cuda.py": ["takes"], "whiten_rows/cuda.py": ["missing"]}
"""Backends that check at each call whether a kernel serves it, because a case does not have the rank of one group of kv
heads."""


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_runs_is_chosen_by_the_registry_alone(path: Path) -> None:
    """No function of a backend asks at each call what is there, or calls another backend of its op."""
    asked, ops = [], OPS_OF.get(path.parent.name, [])
    siblings = {file.stem for file in path.parent.glob("*.py")} - {path.stem} if ops else set()
    for function in ast.parse(path.read_text()).body:
        if not isinstance(function, ast.FunctionDef) or function.name in ("missing", "supports"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                asked += [called] * (called in ("missing", "supports", "takes"))
            if isinstance(node, ast.Attribute) and node.attr in ops and isinstance(node.value, ast.Name):
                assert node.value.id not in siblings, f"line {node.lineno}"
    assert asked == SIZE_OF_A_CALL.get(str(path.relative_to(ROOT)), [])

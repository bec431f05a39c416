"""What an engine says of the backends of its ops, and that it runs with the references among them."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from noted_calls import noted_calls
from test_cuda_graphs import steps
from test_engine import drain, prompt, tokens

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.startup.loading import backend_lines, load_from_config
from shadowkv.layers.computing import Computing
from shadowkv.layers.mlp import MLP
from shadowkv.layers.norm import RMSNorm
from shadowkv.ops.case import Case
from shadowkv.ops.extension import Unbuilt, cpu_missing
from shadowkv.ops.registry import Ops

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PARAMS = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("kv", ["full", "shadowkv"])
def test_the_backend_of_every_op_that_is_called_is_said(make: Any, kv: str) -> None:
    engine = make(kv=kv, kv_dense_below=0, device="cpu")
    lines = [line.removeprefix("kernels ").split(": ") for line in engine.notes if line.startswith("kernels ")]
    said = {name: backend for backend, names in lines for name in names.split(", ")}
    ops = engine.cache.ops
    assert said == {name: ops.backends[name] for name in ops.called}
    assert {"dense_attention.causal", "paged_attention", "rms_norm"} <= said.keys()
    assert ("select_top_chunks" in said) == (kv == "shadowkv")


@pytest.mark.skipif(bool(cpu_missing()), reason="the C++ extension is not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_cpp_does_not_know_runs_in_pytorch_and_is_said(make: Any, dtype: str) -> None:
    engine = make(kv="shadowkv:budget=64,outliers=4", device="cpu", dtype=dtype)
    line = "slow    paged_attention runs in PyTorch, cpu: torch.float16 is not float32 or bfloat16"
    assert (line in engine.notes) == (dtype == "float16")
    engine.add_request("one", prompt(0, 1200), PARAMS)
    assert len(tokens(drain(engine)["one"])) == 100


def test_layers_cache_and_sampler_share_one_object_of_ops(make: Any, tiny: Path) -> None:
    first = make(kv="full", device="cpu")
    loaded = load_from_config(EngineConfig(model=str(tiny), load_format="dummy", device="cpu"))
    for engine in (first, Engine(EngineConfig(str(tiny), kv="full", device="cpu"), loaded)):
        layers = [module for module in engine.runner.model.modules() if isinstance(module, Computing)]
        assert {type(layer) for layer in layers} == {RMSNorm, MLP}
        assert all(layer.ops is engine.cache.ops for layer in layers)
        assert engine.runner.sampler._sample_tokens is engine.cache.ops.sample_tokens


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_every_op_that_runs_is_declared(make: Any, quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would be chosen without having been asked whether they support the case."""
    monkeypatch.setattr("shadowkv.models.loader.unfit", lambda device, dtype: None)
    dtype = "float32" if quantization is None else "bfloat16"
    engine = make(kv="shadowkv:budget=64,outliers=4", device="cpu", dtype=dtype, quantization=quantization)
    ops, called = engine.cache.ops, noted_calls(engine.cache.ops, monkeypatch)
    monkeypatch.setattr(engine.runner.sampler, "_sample_tokens", ops.sample_tokens)
    engine.add_request("one", prompt(0, 700), SamplingParams(max_tokens=80, seed=1, ignore_eos=True))
    assert len(tokens(drain(engine)["one"])) == 80
    assert called <= ops.called
    of_layers = engine.runner.model.called_ops
    assert called >= {*of_layers, "sample_tokens", "attend_selected"}
    assert ("scaled_matmul" in of_layers) == (quantization == "fp8")


def test_backends_by_name_reach_layers_cache_and_sampler(tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), load_format="dummy", device="cpu", kv="full")
    names = ("rms_norm", "sample_tokens", "paged_attention")
    engine = Engine(config, backends=dict.fromkeys(names, "reference"))
    assert all(engine.cache.ops.backends[name] == "reference" for name in names)
    assert not any(engine.cache.ops.reasons[name] for name in names)  # as they were asked for
    assert engine.runner.model.norm.ops.backends["rms_norm"] == "reference"
    with pytest.raises(ValueError, match="'rms_norm' has no backend 'abacus'"):
        Engine(config, backends={"rms_norm": "abacus"})
    with pytest.raises(ValueError, match="tensor_parallel_size=2 must be 1: other ranks choose their backends"):
        Engine(replace(config, tensor_parallel_size=2), backends={"rms_norm": "reference"})


CASE = Case(frozenset(("paged_attention", "sign_scores", "apply_rope")), torch.bfloat16, 128, 32, 8, 128)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["kernels cuda: paged_attention, sign_scores", "kernels triton: apply_rope"]),
        (
            {"num_kv_heads": 1},
            [
                "kernels cuda: paged_attention",
                "kernels reference: sign_scores",
                "kernels triton: apply_rope",
                "slow    sign_scores runs in PyTorch, cuda: 32 query heads per kv head are more than 16",
            ],
        ),
        (
            {"dtype": torch.float16},
            [
                "kernels cuda: sign_scores",
                "kernels reference: paged_attention",
                "kernels triton: apply_rope",
                "slow    paged_attention runs in PyTorch, cuda: torch.float16 is not bfloat16; "
                "triton: head dim 128 is not 512",
                "graphs  none, as with enforce_eager: the host waits for paged_attention",
            ],
        ),
    ],
)
def test_a_reference_on_a_gpu_is_a_warning_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    expected: list[str],
) -> None:
    for name in ("paged_attention", "sign_scores"):
        monkeypatch.setattr(f"shadowkv.ops.{name}.cuda.missing", lambda: [])
    ops = Ops("cuda", replace(CASE, **changes))
    with caplog.at_level(logging.WARNING):
        assert backend_lines(ops, torch.device("cuda"), eager=False) == expected
    warned = [line.removeprefix("slow    ") for line in expected if line.startswith("slow")]
    assert [record.getMessage() for record in caplog.records] == [f"on a GPU {line}" for line in warned]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ops_without_their_library_are_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    backend, language, slower, remedy = {
        "cpu": ("cpu", "C++", "PyTorch", "pip install -v --no-build-isolation"),
        "cuda": ("cuda", "CUDA", "Triton or PyTorch", "csrc/build_cuda.py"),
    }[device]
    for name in ("paged_attention", "sign_scores"):
        monkeypatch.setattr(f"shadowkv.ops.{name}.{backend}.missing", lambda: [Unbuilt("not built")])
    with caplog.at_level(logging.WARNING):
        lines = backend_lines(Ops(device, CASE), torch.device(device), eager=False)
    [line] = [line for line in lines if line.startswith("slow")]
    assert line.startswith(f"slow    paged_attention, sign_scores run in {slower} instead of {language}: not built. ")
    assert remedy in line
    [record] = caplog.records
    assert line.removeprefix("slow    ") in record.getMessage()


LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
GLM = {**LLAMA, "model_type": "glm4", "head_dim": 64, "pad_token_id": 0}


def saved(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@ON_GPU
@pytest.mark.parametrize(
    ("config", "kv", "name"),
    [
        (GLM, "turbo:keys=lloyd-4bit", "attend_selected"),
        ({**LLAMA, "num_attention_heads": 36, "head_dim": 64}, "turbo", "select_by_sketch"),
        (LLAMA, "quest:mass=0.9", "select_top_chunks"),
    ],
    ids=["coded keys, interleaved", "18 query heads each", "mass"],
)
def test_references_that_need_no_host_are_captured(
    config: dict[str, Any], kv: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path, config)
    engine = Engine(
        EngineConfig(model=str(model), load_format="dummy", kv=kv, kv_dense_below=0, max_model_len=4096, max_num_seqs=6)
    )
    assert engine.cache.ops.backends[name] == "reference"
    assert any(line.startswith(f"slow    {name} runs in PyTorch") for line in engine.notes)
    del engine
    eager, graphs = (steps(model, kv, eager, monkeypatch) for eager in (True, False))
    assert graphs.isfinite().all()
    error = (eager - graphs).norm(dim=1) / eager.norm(dim=1)
    assert error.max() < 0.05, error


@ON_GPU
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(LLAMA, "float32"), (LLAMA, "float16"), ({**LLAMA, "head_dim": 80}, "auto"), ({**LLAMA, "head_dim": 192}, "auto")],
    ids=["float32", "float16", "80 dimensions", "192 dimensions"],
)  # fmt: skip
@pytest.mark.parametrize("kv", ["full", "shadowkv:outliers=4", "turbo", "turbo-host"])
def test_what_cannot_be_captured_runs_without_graphs(
    config: dict[str, Any], dtype: str, kv: str, tmp_path: Path
) -> None:
    engine = Engine(
        EngineConfig(
            model=str(saved(tmp_path, config)), load_format="dummy", kv=kv,
            kv_dense_below=0, dtype=dtype, max_num_seqs=4,
            max_model_len=4096, host_memory_gib=1.0,
        )
    )  # fmt: skip
    assert engine.runner.graphs is None
    assert "graphs  none, as with enforce_eager: the host waits for paged_attention" in engine.notes
    for number, length in enumerate((1500, 40, 700)):
        engine.add_request(str(number), prompt(number, length), PARAMS)
    outputs = drain(engine)
    assert [len(tokens(outputs[str(number)])) for number in range(3)] == [100] * 3

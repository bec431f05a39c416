"""What ``shadowkv doctor`` finds, on this machine and on one with a GPU whose libraries were not built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shadowkv import cli
from shadowkv.doctor.machine import Gpu, Machine
from shadowkv.doctor.ops import Choices, choices_for
from shadowkv.doctor.report import as_text
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.kvcache import plugins
from shadowkv.ops import extension, registry
from shadowkv.ops.registry import CALLS
from shadowkv.ops.sources import cuda_digest

ROOT = Path(__file__).parents[2]


def rows(text: str) -> dict[str, str]:
    """Lines of the table by op."""
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line)
    return {line[0].strip("()"): line[1] for line in lines if line[0].strip("()") in CALLS}


def test_the_backends_are_those_that_an_engine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--kv", "turbo", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    engine = Engine(EngineConfig(kv="turbo", device="cpu", load_format="dummy", max_model_len=1024, max_num_seqs=1))
    ops = engine.cache.ops
    assert {op["op"]: op["backend"] for op in told["ops"]} == ops.backends
    assert {op["op"] for op in told["ops"] if op["called"]} == ops.called
    chosen_for = {"model": EngineConfig().model, "kv": "turbo", "device": "cpu", "attention_backend": "auto"}
    assert told["chosen_for"] == chosen_for
    assert told["machine"]["torch"] == torch.__version__
    assert told["machine"]["total_bytes"] > told["machine"]["free_bytes"] > 0


def test_backends_of_plugins_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight

    def register() -> None:
        registry.register("rms_norm", "mine", rms_norm)

    plugin = EntryPoint("mine", "mine:register", plugins.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda entry: register)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [plugin])
    monkeypatch.setattr(plugins, "_outcomes", {False: None})  # the package's own plugin is loaded
    monkeypatch.setattr(registry, "REGISTERED", {})
    [choice] = [choice for choice in choices_for("llama-3.1-8b", "full", "cpu").ops if choice.op == "rms_norm"]
    assert (choice.backend, choice.called) == ("mine", True)


def test_text_has_every_op_and_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert rows(text).keys() == {*CALLS}
    for name in ("torch", "driver", "GPU", "CPU", "memory", "CUDA compiler", "C++ ops", "CUDA ops", "extras"):
        assert f"\n{name:14}" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "no/such/model.gguf"], "error: "),
        (["--device", "tpu"], "error: --device tpu is not auto, cpu, cuda or cuda:N"),
        (["--kv", "full:budget=2", "--device", "cpu"], "error: "),
        (
            ["--attention-backend", "FLASHINFER", "--device", "cpu"],
            "error: --attention-backend flashinfer can serve no attention here: there is no CUDA device",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(line) and err.count("\n") == 1


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A GPU, as far as choosing goes; returns the folder of libraries, which is empty."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("shadowkv.kvcache.case.block_memory", lambda device: 232448)
    monkeypatch.setattr(extension, "CUDA_FOLDER", tmp_path)
    extension.cuda_missing.cache_clear()
    yield tmp_path
    extension.cuda_missing.cache_clear()


def choices() -> Choices:
    return choices_for("llama-3.1-8b", "turbo", "cuda")


def test_what_was_not_built_has_a_reason_and_a_remedy(hopper: Path) -> None:
    text = as_text(MACHINE, choices())
    table = rows(text)
    assert table["attend_selected"].split("  ")[0] == "Triton"
    assert "cuda_sm90: not built" in table["attend_selected"] and "build it (1)" in table["attend_selected"]
    assert table["rms_norm"] == "Triton"
    assert table["dense_attention.causal"].startswith("CUDA ")
    [remedy] = [line for line in text.splitlines() if line.startswith("(1) ")]
    assert remedy.endswith("csrc/build_cuda.py")
    assert "could be faster here: " in text.splitlines()[-1]
    assert "GPU           NVIDIA H100, compute capability 9.0, 80.0 GiB" in text


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_prefill_is_sparse_only_with_kernels(hopper: Path, monkeypatch: pytest.MonkeyPatch, has_kernel: bool) -> None:
    if not has_kernel:
        monkeypatch.setattr("shadowkv.ops.attend_blocks.triton.missing", lambda: ["none here"], raising=False)
    called = {choice.op for choice in choices().ops if choice.called}
    assert ("attend_blocks" in called) == ("select_blocks" in called) == has_kernel


@pytest.mark.parametrize("library", ["flashinfer", "flash_attn"])
def test_a_library_of_attention_is_in_the_table(hopper: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(f"shadowkv.ops.dense_attention.{library}.missing", lambda: [])
    table = rows(as_text(MACHINE, choices_for("llama-3.1-8b", "full", "cuda", library.replace("_", "-"))))
    assert table["dense_attention.causal"] == table["dense_attention.packed"] == library
    assert table["paged_attention"].startswith("PyTorch ")


def no_library(folder: Path) -> None:
    """Writes a file that is no library, and a record that it is built with CUDA 13 from the clone's sources."""
    digest = cuda_digest(ROOT / "csrc/kernels/sign_scores/sign_scores.cu", ROOT)
    (folder / "sign_scores.so").write_bytes(b"none")
    record = {"nvcc": "13.0.88", "torch": "2.13.0", "sources": {"sign_scores": digest}}
    (folder / "built.json").write_text(json.dumps(record))


def test_a_library_that_does_not_load_says_why(hopper: Path) -> None:
    no_library(hopper)
    [choice] = [choice for choice in choices().ops if choice.op == "sign_scores"]
    assert choice.reason is not None and "sign_scores.so cannot be loaded: " in choice.reason
    assert "too short" in choice.reason or "invalid ELF" in choice.reason
    assert choice.remedy is not None


def test_an_older_torch_is_told(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    [choice] = [choice for choice in choices().ops if choice.op == "sign_scores"]
    assert choice.reason == "cuda: CUDA ops need torch 2.11 or later, this is 2.9.1+cu128"


def test_libraries_of_a_later_cuda_than_the_drivers_are_left(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_library(hopper)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12040, raising=False)
    [choice] = [choice for choice in choices().ops if choice.op == "sign_scores"]
    assert choice.reason == "cuda: built with CUDA 13.0.88, but the driver supports only CUDA 12.4"
    assert choice.remedy is not None
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13020)
    extension.cuda_missing.cache_clear()
    [choice] = [choice for choice in choices().ops if choice.op == "sign_scores"]
    assert choice.reason is not None and "cannot be loaded" in choice.reason


@pytest.mark.parametrize("record", [{}, {"sources": {}}, {"sources": {"sign_scores": "0123"}}])
def test_libraries_of_other_sources_are_left(hopper: Path, record: dict[str, Any]) -> None:
    (hopper / "sign_scores.so").write_bytes(b"none")
    (hopper / "built.json").write_text(json.dumps({"nvcc": "12.8.93", **record}))
    [choice] = [choice for choice in choices().ops if choice.op == "sign_scores"]
    assert choice.reason == "cuda: sign_scores.so was built from sources that have changed since"
    assert choice.remedy is not None


def test_an_older_gpu_has_nothing_to_do(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    text = as_text(MACHINE, choices())
    assert "cuda: compute capability 7.5 is below 8.0" in rows(text)["sign_scores"]
    assert text.endswith("\nNothing to do.")


MACHINE = Machine(
    shadowkv="0.1.0", source=None, python="3.11", torch="2.13.0+cu130", triton="3.7.1", cuda_runtime="13.0",
    driver="580.65.06", gpus=[Gpu("NVIDIA H100", (9, 0), 80 << 30)], gpu_problem=None, cuda_compiler="none: …",
    cpp_compiler="g++ 12", cpp_ops="not built", cuda_ops="not built", cores=8, simd="avx512", total_bytes=2**36,
    free_bytes=2**35, extras={"json": None, "ray": "pip install ray"},
)  # fmt: skip

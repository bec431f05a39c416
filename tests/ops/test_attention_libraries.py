"""The backends that call FlashInfer and flash-attn, with stubs of the libraries; and where these backends are
chosen."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import library_checks
import pytest
import torch
from attention_stubs import STUBS, BatchPrefillWithRaggedKVCacheWrapper, stub
from test_dense_attention import CACHED, packed, with_cached
from test_op_registry import TURBO

from shadowkv.engine.startup.loading import backend_lines
from shadowkv.load_settings import ATTENTION_BACKENDS
from shadowkv.ops import extension
from shadowkv.ops.cuda_compiler import PYPI, CompilerNotFound
from shadowkv.ops.dense_attention import flash_attn, flashinfer
from shadowkv.ops.registry import FORMS, LIBRARIES, Ops
from shadowkv.wording import SettingsError

if torch.cuda.is_available():
    pytest.skip("the libraries themselves are tested there", allow_module_level=True)

CALLS = tuple(f"dense_attention.{form}" for form in sorted(FORMS["dense_attention"]))
SHAPES = [(3, 1, 64), (2, 4, 128), (1, 8, 256), (1, 16, 64)]
"""kv heads, query heads of each, head dim."""
SIZES = [(1, 1), (1, 77), (64, 64), (37, 130)]
"""Queries, and keys up to the last of them."""

shapes = pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
sizes = pytest.mark.parametrize(("n", "m"), SIZES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture(params=["flashinfer", "flash_attn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library's backend, which calls the stub."""
    monkeypatch.setitem(sys.modules, request.param, stub(request.param))
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(flashinfer, "_workspace", lambda device: (torch.empty(1, dtype=torch.uint8), event))
    flashinfer._planned.cache_clear()
    return {"flashinfer": flashinfer, "flash_attn": flash_attn}[request.param]


@shapes
@sizes
@dtypes
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_and_their_sums_are_the_references(
    seed: int, library: Any, heads: int, group: int, dim: int, n: int, m: int, dtype: torch.dtype, is_causal: bool
) -> None:
    lse, exact, _ = library_checks.partial(library, *library_checks.drawn(n, m, heads, group, dim, dtype), is_causal)
    torch.testing.assert_close(lse.double(), exact.double(), atol=1e-4, rtol=1e-5)


@shapes
@sizes
def test_causal_queries_are_the_last(seed: int, library: Any, heads: int, group: int, dim: int, n: int, m: int) -> None:
    library_checks.causal(library, *library_checks.drawn(n, m, heads, group, dim, torch.bfloat16))


@shapes
@sizes
@pytest.mark.parametrize("window", [1, 9, 64, 500])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_have_as_many_tokens_and_sinks_their_share(
    seed: int, library: Any, heads: int, group: int, dim: int, n: int, m: int, window: int, with_sinks: bool
) -> None:
    library_checks.windowed(library, library_checks.drawn(n, m, heads, group, dim, torch.bfloat16), window, with_sinks)


@shapes
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [7, 1, 64, 65], [130, 3, 1, 40]], ids=str)
def test_packed_sequences_see_themselves_alone(
    seed: int, library: Any, heads: int, group: int, dim: int, lengths: list[int]
) -> None:
    *args, pack = packed(lengths, heads, group, dim, torch.bfloat16)
    library_checks.packed(library, args, pack)


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", ""])
@pytest.mark.parametrize(("lengths", "cached"), CACHED, ids=str)
def test_packed_sequences_see_what_they_have_cached(
    seed: int, library: Any, lengths: list[int], cached: list[int], known: bool
) -> None:
    *args, pack = with_cached(lengths, cached, 2, 3, 64, torch.bfloat16)
    unknown = pack._replace(lengths=None)
    library_checks.packed(library, args, pack, pack if known else unknown)
    library_checks.windowed(library, args, 50, False, unknown)


def test_no_packed_sequences(library: Any) -> None:
    library_checks.no_packed_sequences(library)


@pytest.mark.parametrize("library", ["flashinfer"], indirect=True)
def test_packs_are_planned_once_while_their_layers_take_turns(seed: int, library: Any) -> None:
    packs = [packed(lengths, 2, 2, 64, torch.bfloat16) for lengths in ([5, 7], [12], [3, 3, 6])]
    before = BatchPrefillWithRaggedKVCacheWrapper.planned
    for _ in range(3):
        for args in packs:
            flashinfer.packed(*args)
    assert BatchPrefillWithRaggedKVCacheWrapper.planned == before + len(packs)


@pytest.mark.parametrize("name", STUBS)
def test_stubs_have_the_signatures_of_what_is_installed(name: str) -> None:
    """Read from the package's sources: importing it may need a GPU's libraries."""
    found = find_spec(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    (folder,) = found.submodule_search_locations or ()
    files = {"flashinfer": ("prefill.py", "decode.py"), "flash_attn": ("flash_attn_interface.py",)}[name]
    bodies = [ast.parse(Path(folder, file).read_text()).body for file in files]
    # Overloads come before what they are of.
    defined = {node.name: node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for one in STUBS[name]:
        node = defined[one.__name__]
        pairs = [(one, node)]
        if isinstance(node, ast.ClassDef):
            methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
            pairs = [(getattr(one, method), methods[method]) for method in ("__init__", "plan", "run")]
        for ours, theirs in pairs:
            assert isinstance(theirs, ast.FunctionDef)
            own, names = inspect.signature(ours).parameters, [each.arg for each in theirs.args.args]
            if theirs.args.kwarg is None:
                assert [*own] == names[: len(own)]
            else:  # others by name
                assert names == [*own][: len(names)]
            defaults = dict(zip(reversed(names), reversed(theirs.args.defaults)))
            for each in own.keys() & defaults.keys():
                assert ast.literal_eval(defaults[each]) == own[each].default, each


# -- where they are chosen -----------------------------------------------------------------------------------------

CASE = replace(TURBO, ops=frozenset((*CALLS, "paged_attention", "paged_window_attention", "add_sinks", "rms_norm")))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry finds both libraries and our kernels."""
    for op in ("dense_attention", "paged_attention"):
        for name in ("cuda", "cuda_masked", "cuda_sm90", "flashinfer", "flash_attn"):
            if find_spec(f"shadowkv.ops.{op}.{name}"):
                module = import_module(f"shadowkv.ops.{op}.{name}")
                monkeypatch.setattr(module, "missing", lambda: [])


def test_the_flag_knows_every_library_and_nothing_else() -> None:
    assert list(ATTENTION_BACKENDS) == ["auto", "shadowkv", *LIBRARIES]


def test_auto_takes_a_library_where_it_was_measured_to_be_faster(installed: None) -> None:
    """The measurement is docs/design/prefill.md's."""
    wide = replace(CASE, head_dim=256)
    for case in (CASE, replace(CASE, head_dim=64), replace(wide, dtype=torch.float32)):
        assert Ops("cuda", case).backends == Ops("cuda", case, attention_backend="shadowkv").backends
    on_cpu = Ops("cpu", wide)
    assert on_cpu.backends["dense_attention.causal"] == "reference" and not on_cpu.reasons["dense_attention.causal"]
    found, ours = Ops("cuda", wide).backends, Ops("cuda", wide, attention_backend="shadowkv").backends
    others = {op: backend for op, backend in found.items() if backend != ours[op]}
    assert others == {"dense_attention.causal": "flashinfer", "dense_attention.packed": "flashinfer"}
    assert Ops("cuda", CASE, attention_backend="flashinfer").backends["dense_attention.causal"] == "flashinfer"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_has_the_ops_that_it_can_serve_and_lines_name_them(installed: None, library: str) -> None:
    ops, usual = Ops("cuda", CASE, attention_backend=library), Ops("cuda", CASE)
    assert {op for op, backend in ops.backends.items() if backend == LIBRARIES[library]} == {*CALLS}
    assert {op: ops.backends[op] for op in ops.backends if op not in CALLS} == {
        op: usual.backends[op] for op in usual.backends if op not in CALLS
    }
    lines = backend_lines(ops, torch.device("cuda"), eager=False)
    assert f"kernels {LIBRARIES[library]}: {', '.join(CALLS)}" in lines


def test_an_override_goes_before_a_library(installed: None) -> None:
    ops = Ops("cuda", CASE, {"dense_attention.causal": "cuda"}, "flash-attn")
    assert ops.backends["dense_attention.causal"] == "cuda"
    assert ops.backends["dense_attention.partial"] == "flash_attn"


@pytest.mark.parametrize(
    ("library", "changes", "reason"),
    [
        ("flashinfer", {"dtype": torch.float32}, "torch.float32 is not bfloat16 or float16"),
        ("flash-attn", {"dtype": torch.float32}, "torch.float32 is not of 16 bits"),
        ("flashinfer", {"head_dim": 96}, "head dim 96 is not 64, 128 or 256"),
        ("flash-attn", {"head_dim": 264}, "head dim 264 is no multiple of 8 up to 256"),
        ("flash-attn", {"ops": frozenset({"rms_norm"})}, "it has no backend for any op that is called"),
    ],
)
def test_what_a_library_does_not_take_is_refused_with_the_reason(
    installed: None, library: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingsError, match=f"^attention_backend='{library}' can serve no attention here: {reason}$"):
        Ops("cuda", replace(CASE, **changes), attention_backend=library)


def test_flash_attn_takes_more_head_dims(installed: None) -> None:
    ops = Ops("cuda", replace(CASE, head_dim=96), attention_backend="flash-attn")
    assert ops.backends["dense_attention.causal"] == "flash_attn"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reports a GPU of compute capability 8.6."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (flashinfer, "flashinfer-python is not installed: "),
        (flash_attn, "flash-attn is not installed: pip install flash-attn"),
    ],
)
def test_a_package_that_is_not_there_is_named(
    gpu: None, monkeypatch: pytest.MonkeyPatch, library: Any, words: str
) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    (reason,) = library.missing()
    assert reason.startswith(words)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert library.missing() == ["compute capability 7.5 is below 8.0", reason]


@pytest.mark.parametrize("found", ["toolkit", PYPI, None, "compiled"])
def test_flashinfer_needs_a_toolkit_unless_its_kernels_are_compiled(
    gpu: None, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    def compiler(major: int | None) -> Any:
        if found is None:
            raise CompilerNotFound("none")
        return SimpleNamespace(origin=found)

    there = {"flashinfer", *(["flashinfer_jit_cache"] if found == "compiled" else [])}
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(flashinfer, "find_compiler", compiler)
    monkeypatch.setattr(flashinfer, "_compiler_missing", flashinfer._compiler_missing.__wrapped__)
    reasons = flashinfer.missing()
    assert len(reasons) == (found in (PYPI, None))
    assert all("with a CUDA toolkit" in reason for reason in reasons)


def test_without_a_gpu_neither_can_run() -> None:
    assert extension.gpu_missing()[0] in flashinfer.missing() and extension.gpu_missing()[0] in flash_attn.missing()
    for library in LIBRARIES:
        with pytest.raises(SettingsError, match="there is no CUDA device"):
            Ops("cpu", attention_backend=library)

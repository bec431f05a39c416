"""Parts and presets from outside the package: names, errors, and plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import driver
import pytest
import torch
from driver import SHAPE, Stream, decode, make_cache, plain_attention, prefill

from shadowkv.baselines.streaming_llm import Recent
from shadowkv.kvcache import codecs, parts, plugins, presets
from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.codecs.fp8 import Fp8Rows
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.parts.base import KeyPart
from shadowkv.kvcache.parts.index_plain import Exact
from shadowkv.kvcache.parts.prefill import DensePrefill
from shadowkv.kvcache.parts.rows import DenseKeys, DenseValues
from shadowkv.kvcache.plugins import PluginError
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.sequences.layout import Layout


class Mine(Recent):
    pass


class MyKeys(DenseKeys):
    pass


class MyValues(DenseValues):
    pass


@pytest.fixture(autouse=True)
def no_plugins(registries_are_put_back: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugins are loaded before a test."""
    monkeypatch.setattr(plugins, "_outcomes", {False: None})  # the package's own plugin is loaded
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])


def test_parts_from_outside_serve_as_those_inside() -> None:
    parts.register("index", "mine", Mine)
    parts.register("keys", "mine", MyKeys)
    parts.register("values", "mine", MyValues)
    presets.register("all-mine", KVSpec(keys="mine", index="mine", values="mine", budget=1.0))
    spec = resolve(preset("all-mine:local=40"), SHAPE)
    assert [type(part) for part in build_parts(spec, SHAPE, torch.float32)] == [MyKeys, Mine, MyValues]
    cache = make_cache(spec)
    stream = Stream(0, cache.allocate(500, 600))
    prefill(cache, [(stream, 500)])
    for _ in range(3):
        decode(cache, [stream])
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=2e-5, rtol=2e-5)


class Learned(Exact):
    """Scores by queries and keys that the model's own weights weigh, dimension by dimension."""

    weights = ("index_scale",)

    def logits(self, store: Any, layer: int, q: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().logits(store, layer, q * store.weights[layer]["index_scale"], batch)


@pytest.mark.parametrize("ends", [0, 1])
def test_an_index_can_own_weights_of_the_model(ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its group's layers; without them there is no cache."""
    monkeypatch.setattr(driver, "SHAPE", replace(SHAPE, num_layers=4))
    parts.register("index", "learned", Learned)
    spec = KVSpec(index="learned", chunk=1, budget=16, skip_layers=ends)
    layout = Layout(spec, driver.SHAPE, torch.float32, 1000)
    device, memory = driver.DEVICE, Blocks(dict.fromkeys(layout.paged, 60))
    ops = choose_ops(layout, driver.ROPE, device)

    def last_step(*scales: float) -> torch.Tensor:
        weights = [{"index_scale": torch.full((driver.SHAPE.head_dim,), scale, device=device)} for scale in scales]
        cache = KVCache(layout, driver.ROPE, slots=2, memory=memory, ops=ops, device=device, weights=weights)
        stream = Stream(0, cache.allocate(500, 600))
        prefill(cache, [(stream, 500)])
        decode(cache, [stream])
        return stream.output()[-1]

    outputs = last_step(1.0, 1.0, 1.0, 1.0), last_step(1.0, -1.0, 1.0, 1.0)
    differ = [not torch.equal(*of_layer) for of_layer in zip(*outputs, strict=True)]
    assert differ == [False, True, False, False]
    with pytest.raises(ValueError, match=f"layer {ends} of the model has no index_scale"):
        KVCache(layout, driver.ROPE, slots=2, memory=memory, ops=ops, device=device)


@pytest.mark.parametrize(
    ("axis", "name", "part", "error", "reason"),
    [
        ("place", "mine", Mine, ValueError, "there is no axis 'place' of parts: keys, index, values, prefill"),
        ("indexes", "mine", Mine, ValueError, "there is no axis 'indexes'"),
        ("index", "sketch", Mine, ValueError, "index='sketch' is taken: the names are .*chunk-mean"),
        ("keys", "low-rank", MyKeys, ValueError, "keys='low-rank' is taken"),
        ("keys", "fp8", MyKeys, ValueError, "keys='fp8' is taken"),
        ("values", "rotated", MyValues, ValueError, "values='rotated' is taken"),
        ("prefill", "sparse", DensePrefill, ValueError, "prefill='sparse' is taken: the names are dense, sparse"),
        ("prefill", "mine", Mine, TypeError, "prefill='mine' must be a subclass of PrefillStrategy"),
        ("index", "my,own", Mine, ValueError, "'my,own' is no valid name"),
        ("index", "", Mine, ValueError, "'' is no valid name"),
        ("index", "mine", MyKeys, TypeError, "index='mine' must be a subclass of IndexPart"),
        ("keys", "mine", object(), TypeError, "must be a subclass of KeyPart"),
    ],
)
def test_what_cannot_be_registered_says_why(
    axis: str, name: str, part: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        parts.register(axis, name, part)
    assert not any(part in of_axis.values() for of_axis in parts.REGISTERED.values())


def test_a_name_is_taken_once() -> None:
    parts.register("index", "mine", Mine)
    parts.register("index", "mine", Mine)  # again
    parts.register("keys", "mine", MyKeys)  # another axis
    with pytest.raises(ValueError, match="index='mine' is taken"):
        parts.register("index", "mine", Exact)
    presets.register("mine", KVSpec(index="mine"))
    presets.register("mine", KVSpec(index="mine"))
    for name in ("mine", "turbo"):
        with pytest.raises(ValueError, match=f"the preset '{name}' is taken"):
            presets.register(name, KVSpec())
    with pytest.raises(ValueError, match="is no valid name"):
        presets.register("turbo:chunk=8", KVSpec())
    with pytest.raises(TypeError, match="must be a KVSpec, not 'turbo'"):
        presets.register("again", "turbo")  # type: ignore[arg-type]


def test_a_codec_takes_no_name_of_a_part() -> None:
    parts.register("values", "mine", MyValues)

    class Codec(Fp8Rows):
        id, name, axes = 4000, "mine", ("values",)

    with pytest.raises(ValueError, match="codec 'mine' has the name of a part: values='mine'"):
        codecs.register(Codec())
    Codec.name = "dense"
    with pytest.raises(ValueError, match="values='dense'"):
        codecs.register(Codec())


def test_arrays_of_two_parts_have_names_of_their_own() -> None:
    class Clash(Mine):
        def page_fields(self) -> Any:
            return MyValues.page_fields(self)  # type: ignore[arg-type]

    parts.register("index", "clash", Clash)
    spec = resolve(KVSpec(index="clash"), SHAPE)
    with pytest.raises(ValueError, match=r"arrays of pages have the same name, values: parts .*index='clash'"):
        build_parts(spec, SHAPE, torch.float32)


class Plugin:
    """An entry point."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.value, self.target = name, f"{name}:register", target
        self.loads = 0

    def load(self) -> Any:
        self.loads += 1
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


def installed(monkeypatch: pytest.MonkeyPatch, *found: Plugin) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "shadowkv.plugins" else [])


def test_plugins_are_loaded_once_and_for_names_alone_that_shadowkv_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        parts.register("index", "mine", Mine)
        presets.register("mine", KVSpec(index="mine"))

    function, module = Plugin("function", register), Plugin("module", ModuleType("module"))
    installed(monkeypatch, function, module)
    resolve(preset("turbo:index=votes"), SHAPE)
    assert not function.loads
    for _ in range(2):
        assert resolve(preset("quest:index=mine"), SHAPE).index == "mine"
        assert preset("mine").index == "mine"
        with pytest.raises(ValueError, match=r"unknown KV preset 'yours'; known: .*mine"):
            preset("yours")
    assert (function.loads, module.loads) == (1, 1)


def test_a_spec_that_is_no_text_finds_plugins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Plugin("mine", lambda: parts.register("index", "mine", Mine)))
    assert resolve(KVSpec(index="mine"), SHAPE).index == "mine"
    with pytest.raises(ValueError, match=r"index='yours' is not one of none, .*mine"):
        resolve(KVSpec(index="yours"), SHAPE)


def test_plugins_that_fail_are_named_and_the_others_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> None:
        parts.register("index", "sketch", Mine)

    installed(
        monkeypatch,
        Plugin("absent", ImportError("no module named 'absent'")),
        Plugin("constant", 7),
        Plugin("mine", lambda: parts.register("index", "mine", Mine)),
        Plugin("taken", taken),
    )
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            plugins.has(PRESETS, "yours")
        reasons = str(caught.value).split("; ")
        assert reasons[0] == "plugin 'absent' (absent:register) cannot be loaded: ImportError: no module named 'absent'"
        assert "plugin 'constant'" in reasons[1] and "neither a function nor a module" in reasons[1]
        assert "plugin 'taken'" in reasons[2] and "index='sketch' is taken" in reasons[2]
    assert resolve(KVSpec(index="mine"), SHAPE).index == "mine"
    with pytest.raises(ValueError, match="plugin 'absent'"):
        preset("yours")
    assert preset("turbo") == PRESETS["turbo"]


def test_an_engine_loads_them_for_their_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, broken = Plugin("mine", lambda: None), Plugin("broken", ImportError("no module"))
    installed(monkeypatch, mine, broken)
    for _ in range(2):
        assert "plugin 'broken'" in str(plugins.load_installed())
    assert mine.loads == broken.loads == 1
    assert preset("quest").index == "min-max"


def test_an_installed_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_policies.py").write_text(
        "from shadowkv.kvcache import parts, presets\n"
        "from shadowkv.kvcache.parts.index_plain import Exact\n"
        "from shadowkv.kvcache.policy.spec import KVSpec\n"
        "class Mine(Exact): pass\n"
        "def register():\n"
        "    parts.register('index', 'mine', Mine)\n"
        "    presets.register('newest', KVSpec(index='mine'))\n"
    )
    info = tmp_path / "my_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shadowkv.plugins]\nnewest = my_policies:register\n")
    code = "from shadowkv.kvcache.presets import preset; print(preset('newest:chunk=4'))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True).stdout
    assert "index='mine'" in out and "chunk=4" in out


def test_kinds_are_those_of_parts() -> None:
    assert issubclass(MyKeys, KeyPart) and list(parts.KINDS) == ["keys", "index", "values", "prefill"]

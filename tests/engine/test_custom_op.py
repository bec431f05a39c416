"""The example with a backend of one's own, and what cannot be registered."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import custom_op
import pytest
import torch

from shadowkv import LLM, SamplingParams
from shadowkv.engine.process.facts import Registered
from shadowkv.ops import registry
from shadowkv.ops.activation_rows.reference import rms_norm
from shadowkv.ops.registry import Ops

PROMPT = [5 + i % 200 for i in range(300)]


pytestmark = pytest.mark.usefixtures("registries_are_put_back")


def answer(model: Path) -> tuple[list[int], str]:
    """An answer's tokens, and the backend of ``rms_norm``."""
    with LLM(str(model), load_format="dummy", kv="full", max_model_len=512, max_num_seqs=1) as llm:
        (found,) = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0))
        return list(found.outputs[0].token_ids), llm.engine.cache.ops.backends["rms_norm"]


def test_an_engine_calls_it_in_prompts_and_steps(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, usual = answer(tiny)
    rows, own = [], custom_op.rms_norm
    monkeypatch.setattr(custom_op, "rms_norm", lambda x, *args: rows.append(math.prod(x.shape[:-1])) or own(x, *args))
    custom_op.register()
    assert answer(tiny) == (before, "torch") and usual != "torch"
    assert max(rows) >= len(PROMPT) and rows[-1] == 1


def test_it_is_what_the_reference_is() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    torch.testing.assert_close(custom_op.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    wide = custom_op.rms_norm(x.bfloat16(), weight, 1e-5)
    torch.testing.assert_close(wide, rms_norm(x.bfloat16(), weight, 1e-5))


def test_without_preference_it_serves_by_name_alone() -> None:
    registry.register("rms_norm", "torch", custom_op.rms_norm, preferred=False)
    registry.register("rms_norm", "torch", custom_op.rms_norm, preferred=False)  # again
    assert Ops("cpu").backends["rms_norm"] == "reference" and not Ops("cpu").outside
    ops = Ops("cpu", overrides={"rms_norm": "torch"})
    assert ops.rms_norm is custom_op.rms_norm and ops.outside == ["rms_norm"]


def test_a_module_says_what_it_supports_and_serves_a_form() -> None:
    module: Any = ModuleType("mine")
    module.packed = lambda *args, **options: None
    module.missing = lambda: ["not today"]
    registry.register("dense_attention.packed", "mine", module, device_types=("cpu",))
    ops = Ops("cpu")
    assert ops.backends["dense_attention.packed"] == "reference"
    assert ops.reasons["dense_attention.packed"] == ["mine: not today"]
    module.missing = lambda: []
    assert Ops("cpu").backends["dense_attention.packed"] == "mine"
    assert Ops("cpu").backends["dense_attention.causal"] == "reference"
    assert Ops("cuda").backends["dense_attention.packed"] != "mine"


def test_it_is_registered_in_the_engines_process() -> None:
    custom_op.register()
    registry.register("rms_norm", "module", custom_op, device_types=("cuda",), preferred=False)
    here = dict(registry.REGISTERED["rms_norm"])
    message = pickle.dumps(Registered.here())
    registry.REGISTERED.clear()
    pickle.loads(message).register()
    assert {"rms_norm": here} == registry.REGISTERED


@pytest.mark.parametrize(
    ("call", "name", "backend", "device_types", "error", "said"),
    [
        ("norm", "mine", custom_op.rms_norm, ("cpu",), ValueError, "there is no op 'norm': the calls are add_rms_norm"),
        ("dense_attention", "mine", custom_op, ("cpu",), ValueError, "there is no op 'dense_attention'"),
        ("rms_norm", "triton", custom_op.rms_norm, ("cpu",), ValueError, "rms_norm has a backend 'triton' already"),
        ("rms_norm", "mine", custom_op.rms_norm, ("tpu",), ValueError, "no ops for devices of type 'tpu'; use cuda or"),
        ("rope", "mine", custom_op, ("cpu",), ValueError, "there is no op 'rope'"),
        ("apply_rope", "mine", custom_op, ("cpu",), TypeError, "nor a module with a function 'apply_rope'"),
        ("apply_rope", "mine", 7, ("cpu",), TypeError, "backend 'mine' of apply_rope is neither a function"),
    ],
)
def test_what_cannot_be_registered_says_why(
    call: str, name: str, backend: Any, device_types: tuple[str, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        registry.register(call, name, backend, device_types=device_types)
    assert not any(registry.REGISTERED.values())

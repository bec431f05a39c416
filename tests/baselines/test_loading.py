"""Baselines are loaded when a policy names one, and not before."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "named",
    [
        "preset('quest:chunk=8')",
        "preset('turbo:values=vq-4x256')",
        "preset('turbo:index=votes')",
        "resolve(KVSpec(keys='tq35'), SHAPE)",
        "resolve(KVSpec(keys='low-rank-mixed', settings={'rank': 32}), SHAPE)",
    ],
)
def test_a_name_loads_them_and_the_default_policy_does_not(named: str) -> None:
    code = f"""
import sys
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.policy.spec import KVSpec
import torch
SHAPE = ModelShape(2, 4, 2, 64)
build_parts(resolve(preset("turbo:prefill_error=0.1"), SHAPE), SHAPE, torch.float32)
assert "quest" not in PRESETS and not any(name.startswith("shadowkv.baselines") for name in sys.modules)
{named}
assert "quest" in PRESETS and "shadowkv.baselines.quest" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)

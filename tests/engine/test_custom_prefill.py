"""The example with a prefill strategy of one's own."""

from __future__ import annotations

from pathlib import Path

import custom_prefill
import pytest

from shadowkv import LLM, SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.wording import SettingsError

PROMPT = [5 + i * i % 200 for i in range(700)]


pytestmark = pytest.mark.usefixtures("registries_are_put_back")


def generated(model: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> tuple[list[int], int]:
    """Tokens of an answer, and how often the strategy attended in place of exact attention."""
    calls, attend = [], custom_prefill.Nearby.attend
    monkeypatch.setattr(custom_prefill.Nearby, "attend", lambda self, *args: calls.append(args) or attend(self, *args))
    with LLM(str(model), load_format="dummy", max_model_len=1024, max_num_seqs=1, **options) as llm:
        (answer,) = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0))
    return list(answer.outputs[0].token_ids), len(calls)


def test_long_prompts_attend_by_it_and_short_ones_exactly(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    custom_prefill.register()
    exact, calls = generated(tiny, monkeypatch, kv="full", prefill="dense")
    assert not calls
    found, calls = generated(tiny, monkeypatch, kv="full", prefill="nearby")
    assert (found, calls) == (exact, 0)  # no longer than its width
    found, calls = generated(tiny, monkeypatch, kv="full:prefill=nearby,width=16")
    assert calls > 0 and len(found) == 4


def test_its_name_and_setting_are_checked(tiny: Path) -> None:
    with pytest.raises(SettingsError, match="prefill='nearby' is not one of auto, dense, sparse, nor a registered"):
        EngineConfig(prefill="nearby")
    custom_prefill.register()
    with pytest.raises(ValueError, match="width=0 must be at least 1"):
        LLM(str(tiny), load_format="dummy", kv="full:width=0", prefill="nearby")
    with pytest.raises(ValueError, match="width=8 has no meaning with prefill='sparse'; prefill that have it: nearby"):
        LLM(str(tiny), load_format="dummy", kv="full:width=8", prefill="sparse")

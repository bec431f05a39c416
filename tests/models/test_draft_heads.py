"""Layers that draft tokens compute what plain operations do, and are read from files that have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bad_files import edit_json
from draft_heads import build_with_head
from families import build
from safetensors.torch import load_file, save_file

from shadowkv.engine.execution.head_runner import HeadRunner
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.sizing import head_blocks, head_layout
from shadowkv.eval.running.caches import open_cache, prefill
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.presets import preset
from shadowkv.models import load_model
from shadowkv.models.loader import LoadedModel
from shadowkv.wording import SettingsError

TEXT = [5 + 7 * number % 80 for number in range(40)]


def open_head(loaded: LoadedModel) -> tuple[Runner, HeadRunner]:
    cache = open_cache(loaded, preset("full"), 256, slots=2)
    layout = head_layout(loaded.shard.config, loaded.model.dtype, 256)
    of_head = KVCache(layout, loaded.config.rope, slots=2, memory=head_blocks(layout, 2), ops=cache.ops)
    runner = Runner(loaded.model, cache)
    return runner, HeadRunner(runner, of_head, 80, 80)


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe-qk-norm", "qwen3_5", "qwen3_5_moe"])
def test_rows_are_those_of_plain_operations(name: str, tmp_path: Path) -> None:
    """In one step and in several, behind hidden states of the model, and then of the head itself."""
    theirs = build_with_head(name, tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32, draft_head=True)
    runner, head = open_head(loaded)
    sequence = runner.cache.allocate(1, 256)
    prefill(loaded.model, runner.cache, [(sequence, TEXT[:1])])
    hidden = theirs.hidden(TEXT)
    for place, token in enumerate(TEXT[1:], 1):
        runner.decode([sequence], [token])
        head.keep([place])
        torch.testing.assert_close(head._kept[place], hidden[place], atol=1e-3, rtol=0)
    following = [*TEXT[2:], 9]
    logits = theirs.states(following, hidden[1:])[1]
    drafting = head.cache.allocate(0, 256)
    for start, stop in ((0, 30), (30, 31), (31, 39)):
        got = head.read([drafting], [following[start:stop]], [*range(start + 1, stop + 1)])
        torch.testing.assert_close(got[0], logits[stop - 1], atol=1e-3, rtol=0)
    wanted = theirs.draft([TEXT[1], *following], hidden[1:], 5)
    drafts = [int(got.argmax())]
    for _ in range(4):
        head.chosen[0] = drafts[-1]
        drafts.append(int(head.draft([drafting], [0]).argmax()))
    assert drafts == wanted


def test_a_head_is_read_only_if_asked_for(tmp_path: Path) -> None:
    theirs = build_with_head("glm4_moe", tmp_path)
    plain, loaded = load_model(tmp_path), load_model(tmp_path, draft_head=True)
    assert plain.model.draft_head is None and "weights of layers that draft tokens are" in plain.notes[0]
    assert loaded.model.draft_head is not None and not loaded.notes
    own = sum(weight.numel() for weight in loaded.model.draft_head.parameters())
    assert loaded.model.num_parameters == plain.model.num_parameters + own > plain.model.num_parameters
    assert loaded.model.bytes_read(1) == plain.model.bytes_read(1)
    assert loaded.model.expert_bytes == plain.model.expert_bytes
    assert len(theirs.model.model.layers) == len(loaded.model.layers)


def test_files_without_a_head_are_refused(tmp_path: Path) -> None:
    advice = r"\. Use files with such a layer, or another method of speculative decoding$"
    build("glm4_moe", tmp_path / "lacking")
    with pytest.raises(SettingsError, match=rf"lacking: the files lack the layer .* model\.layers\.3\.\*{advice}"):
        load_model(tmp_path / "lacking", draft_head=True)
    edit_json(tmp_path / "lacking" / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(SettingsError, match=f"lacking: the config says that the files have no layer .*{advice}"):
        load_model(tmp_path / "lacking", draft_head=True)
    build("llama", tmp_path / "llama")
    with pytest.raises(
        SettingsError, match=f"no layer .* can be read from llama models, only from glm4_moe, .*{advice}"
    ):
        load_model(tmp_path / "llama", draft_head=True)


def test_a_head_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    build_with_head("glm4_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.3.eh_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
        load_model(tmp_path, draft_head=True)


def test_configs_of_heads_that_make_no_sense(tmp_path: Path) -> None:
    build("qwen3_5", tmp_path)
    edit_json(tmp_path / "config.json", mtp_num_hidden_layers="one")
    with pytest.raises(ValueError, match="mtp_num_hidden_layers='one' is not a whole number from 0 to 4096"):
        load_model(tmp_path)

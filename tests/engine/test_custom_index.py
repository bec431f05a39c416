"""The example with an index of one's own, and a batch file that its server answers."""

from __future__ import annotations

import json
from pathlib import Path

import custom_index
import pytest
import torch

from shadowkv import LLM, SamplingParams
from shadowkv.kvcache import parts
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset

pytestmark = pytest.mark.usefixtures("registries_are_put_back")


def test_it_selects_the_tokens_with_the_shortest_keys(tiny: Path) -> None:
    custom_index.register()
    prompt = [5 + i % 200 for i in range(600)]
    with LLM(str(tiny), load_format="dummy", kv="small-norms:budget=32", kv_dense_below=0, max_model_len=1024) as llm:
        cache, seen = llm.engine.cache, []
        cache.selection_hook = lambda layer, q, batch, selected: seen.append((layer, batch, selected)) or selected
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0))
        assert len(answer.outputs[0].token_ids) == 4 and seen
        layer, batch, selected = seen[0]
        norms = cache.groups[0].store.page["key_norms"][layer][batch.pages[0]].transpose(0, 1).flatten(1)  # [H, tokens]
        norms = norms.masked_fill(cache.groups[0].store.excluded(layer, batch.pages, batch.first)[0], float("inf"))
        norms = norms[:, : int(batch.num_chunks)]
        shortest = norms.topk(selected.chunks.shape[-1], largest=False).indices.sort().values
        assert torch.equal(selected.chunks[0], shortest)


def test_its_setting_is_read_checked_and_used() -> None:
    custom_index.register()
    shape = ModelShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16)
    for text in ("small-norms:order=1", "small-norms:index.order=1.0"):
        spec = parts.resolve(preset(text), shape)
        assert spec.as_dict()["order"] == 1.0
        assert parts.build_parts(spec, shape, torch.float32).index.settings == custom_index.SmallNorms.Settings(1.0)
    assert parts.resolve(preset("small-norms"), shape).as_dict()["order"] == 2.0
    for text, said in (
        ("small-norms:order=0.0", r"order=0\.0 must be finite and positive"),
        ("small-norms:order=x", "order='x' is not a number"),
        ("turbo:order=1", r"order=1\.0 has no meaning with index='sketch'; index that have it: small-norms"),
        ("small-norms:keys.order=1", r"'keys\.order' is not a field; .*, and settings of parts: .*index\.order"),
    ):
        with pytest.raises(ValueError, match=said):
            parts.resolve(preset(text), shape)


def test_a_name_that_two_parts_have_needs_its_axis() -> None:
    custom_index.register()
    shape = ModelShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16)

    class Other(parts.base.ValuePart):
        Settings = custom_index.SmallNorms.Settings

    parts.REGISTERED["values"]["other"] = Other
    with pytest.raises(ValueError, match=r"order=1\.0 is ambiguous: use index\.order or values\.order"):
        parts.resolve(preset("small-norms:values=other,order=1.0"), shape)
    resolved = parts.resolve(preset("small-norms:values=other,index.order=1.0"), shape)
    assert resolved.as_dict()["index.order"] == 1.0 and resolved.as_dict()["values.order"] == 2.0


def test_it_serves(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
    asked.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    flags = ["--model", str(tiny), "--load-format", "dummy", "--served-model-name", "tiny", "--max-model-len", "64"]
    assert custom_index.main([*flags, "--input", str(asked), "--output", str(answered)]) == 0
    assert json.loads(answered.read_text())["response"]["status_code"] == 200

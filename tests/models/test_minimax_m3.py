"""MiniMax-M3: attention to the blocks that its indexer chooses, through the engine, on ranks too, its files, and
configs that cannot be run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json
from dense_cache import packed_logits
from families import build, oracle_logits
from safetensors.torch import load_file, save_file
from test_experts_engine import LONG, oracle, prompt
from test_families import assert_ranks_give, assert_same, sequences
from test_quantized_engine import answers, assert_alike

from shadowkv import LLM, SamplingParams
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.running.caches import open_cache, prefill
from shadowkv.kvcache.decode import native as decode
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.prefill import native as prompts
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.snapshots.header import Snapshot, SnapshotHeader
from shadowkv.models import load_config, load_model
from shadowkv.models.loader import LoadedModel

NAMES = ("minimax_m3", "minimax_m3-small-blocks")
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["dense"]}
"""What its indexer chooses does not depend on how keys and values are stored."""
LOSSLESS = {
    "full": "full",
    "on the host": "full:place=host",
    "segments": "turbo:keys=low-rank,values=dense,rank={kv_dim}",
    "segments, on the host": "turbo-host:index=native,keys=low-rank,values=dense,rank={kv_dim}",
}
"""Policies that lose nothing. Low-rank keys fit a state to each segment."""


def lossless(kind: str, loaded: LoadedModel) -> KVSpec:
    return preset(LOSSLESS[kind].format(kv_dim=loaded.config.shape.kv_dim))


def budget(loaded: LoadedModel) -> int:
    """The most tokens that a query attends to."""
    indexer = loaded.config.layer_kinds[-1].indexer
    assert indexer is not None
    return indexer.budget


@pytest.mark.parametrize("block", [1024, 48])
@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(
    name: str, kind: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ragged prompts below, at and above what a query attends to, of forks in the middle of blocks, and of steps."""
    for device in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, device, block)
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    most, cache = budget(loaded), open_cache(loaded, lossless(kind, loaded), 800, slots=24)
    runner = Runner(loaded.model, cache)
    texts = [prompt(seed, length) for seed, length in enumerate((500, most + 1, most, most - 1, 5))]
    sequences = [cache.allocate(len(text), 800) for text in texts]
    got = prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    assert_close(got, [oracle(theirs, text) for text in texts])
    for length in (64, 192, most, 320, 448):
        assert cache.fork_point(sequences[0], length) == length
        fork, text = cache.fork(sequences[0], length, length + 9, 800), [*texts[0][:length], *prompt(5, 9)]
        got = prefill(loaded.model, cache, [(fork, text[length:])])
        assert_close(got, [oracle(theirs, text)])
        cache.release(fork)
    # More than a block, so that every sequence begins one.
    for number, step in enumerate(zip(*(prompt(10 + seed, 133) for seed in range(len(texts))), strict=True)):
        got = runner.decode(sequences, list(step))
        texts = [[*text, token] for text, token in zip(texts, step, strict=True)]
        if number in (0, 1, 70, 132):
            assert_close(got, [oracle(theirs, text) for text in texts])
    assert (cache.groups[0].pool.tables.compressed > 0).any()


@pytest.mark.parametrize("kind", ["full", "segments"])
def test_every_draft_of_a_step_selects_for_itself(kind: str, tmp_path: Path) -> None:
    """From exact and from compressed pages. Some of the drafts are removed after the step, as wrong ones are."""
    theirs, loaded = build("minimax_m3", tmp_path, LONG), load_model(tmp_path)
    cache = open_cache(loaded, lossless(kind, loaded), 800, slots=24)
    runner, texts = Runner(loaded.model, cache), [prompt(0, 500), prompt(1, budget(loaded) - 3), prompt(2, 5)]
    sequences, most = [cache.allocate(len(text), 800) for text in texts], 0
    prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    for step in range(24):
        counts = [min(room, 1 + (3 * step + i) % 8) for i, room in enumerate(cache.most_tokens(sequences))]
        new = [prompt(10 * step + i, count) for i, count in enumerate(counts)]
        got = runner.decode(sequences, [first for first, *_ in new], drafts=[drafts for _, *drafts in new])
        if step in (0, 1, 9, 23):
            seen = [[*text, *more[: i + 1]] for text, more in zip(texts, new, strict=True) for i in range(len(more))]
            assert_close(got, [oracle(theirs, text) for text in seen])
        right = [1 + (step + i) % count for i, count in enumerate(counts)]
        texts = [[*text, *more[:count]] for text, more, count in zip(texts, new, right, strict=True)]
        most = max(most, *counts)
        for sequence, text in zip(sequences, texts, strict=True):
            cache.truncate(sequence, len(text))
    assert most == 8 and (cache.groups[0].pool.tables.compressed > 0).sum() > 1


def assert_close(got: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-4, rtol=0)


Chosen = list[torch.Tensor]
"""For each call of an indexer with several queries, which blocks they chose, bool [n, H, blocks]."""


@contextmanager
def chosen_by_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chosen]:
    """What prompts and steps choose."""
    found = Chosen()

    def recording(choose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def record(*arguments: Any) -> torch.Tensor:
            found.append(choose(*arguments))
            return found[-1]

        return record

    with monkeypatch.context() as patch:
        for module in (decode, prompts):
            patch.setattr(module, "selected_blocks", recording(module.selected_blocks))
        yield found


@torch.no_grad()
def chosen_by_transformers(model: torch.nn.Module, text: list[int]) -> Chosen:
    """What all queries of a text choose, layer by layer."""
    found = Chosen()

    def keep(_: Any, __: Any, indices: torch.Tensor) -> None:
        blocks = torch.zeros(*indices.shape[1:3], -(-len(text) // 64) + 1, dtype=torch.bool)
        blocks.scatter_(-1, indices[0].where(indices[0] >= 0, blocks.shape[-1] - 1), True)
        found.append(blocks[..., :-1].transpose(0, 1))

    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    hooks = [indexer.register_forward_hook(keep) for indexer in indexers]
    model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def assert_same_blocks(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Blocks behind the last are chosen by none."""
    width = min(ours.shape[-1], theirs.shape[-1])
    assert torch.equal(ours[..., :width], theirs[..., :width])
    assert not ours[..., width:].any() and not theirs[..., width:].any()


@pytest.mark.parametrize("kv", ["full", "fp8", "full:keys=lloyd-4bit,values=lloyd-4bit,place=host"])
@pytest.mark.parametrize("name", NAMES)
def test_the_chosen_blocks_are_those_of_transformers(
    name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a prompt, in steps from exact and from compressed pages of which some end within a block, and beside a short
    sequence."""
    theirs = build(name, tmp_path, {**LONG, **ONE_LAYER})
    loaded = load_model(tmp_path)
    cache = open_cache(loaded, preset(kv), 800, slots=24)
    runner, texts = Runner(loaded.model, cache), [prompt(0, 500), prompt(1, 30)]
    sequences = [cache.allocate(len(text), 800) for text in texts]
    with chosen_by_ours(monkeypatch) as ours:
        prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    (expected,) = chosen_by_transformers(theirs, texts[0])
    assert_same_blocks(ours[0], expected)
    assert 0 < expected[-1].float().mean() < 1
    steps = [prompt(10, 140), prompt(11, 140)]
    with chosen_by_ours(monkeypatch) as ours:
        for step in zip(*steps, strict=True):
            runner.decode(sequences, list(step))
    texts = [[*text, *more] for text, more in zip(texts, steps, strict=True)]
    for row, text in enumerate(texts):
        (expected,) = chosen_by_transformers(theirs, text)
        for found, of_query in zip(ours, expected[-140:], strict=True):
            assert_same_blocks(found[row], of_query)


@pytest.mark.parametrize("kv", ["fp8", "full:keys=lloyd-8bit,values=lloyd-8bit", "fp8:place=host"])
def test_codecs_change_keys_and_values_alone(kv: str, tmp_path: Path) -> None:
    """8 bits lose a few hundredths, attention to other tokens far more."""
    theirs = build("minimax_m3", tmp_path, {**LONG, **ONE_LAYER})
    loaded = load_model(tmp_path)
    cache = open_cache(loaded, preset(kv), 800, slots=8)
    runner, text = Runner(loaded.model, cache), prompt(0, 600)
    sequence = cache.allocate(len(text), 800)
    prefill(loaded.model, cache, [(sequence, text)])
    got, expected = runner.decode([sequence], [7])[0], oracle(theirs, [*text, 7])
    theirs.model.layers[0].self_attn.indexer.topk_blocks = 5
    everything = oracle(theirs, [*text, 7])
    assert (got - expected).norm() < 0.25 * (everything - expected).norm()
    assert not torch.equal(got, expected)


def test_two_ranks_give_the_logits_of_the_whole(tmp_path: Path) -> None:
    assert_ranks_give(2, tmp_path, build("minimax_m3", tmp_path))


@pytest.mark.parametrize("name, ranks", [("minimax_m3", 2), ("minimax_m3-small-blocks", 2), ("minimax_m3", 3)])
def test_ranks_answer_as_one(name: str, ranks: int, tmp_path: Path) -> None:
    """Of long prompts; ranks have two kv heads and one, or share one."""
    build(name, tmp_path, {**LONG, "num_attention_heads": 6, "intermediate_size": 48})
    texts = [prompt(0, 450), prompt(1, 7)]
    assert_alike(answers(tmp_path, texts, tensor_parallel_size=ranks)[1], answers(tmp_path, texts)[1])


@pytest.mark.parametrize("length", [500, 200])
@pytest.mark.parametrize("kind", LOSSLESS)
def test_snapshots_hold_index_keys(kind: str, length: int, tmp_path: Path) -> None:
    """Of compressed and of dense sequences, whole, and up to a fork point in the middle of a block."""
    theirs, loaded = build("minimax_m3", tmp_path, LONG), load_model(tmp_path)
    spec, text = lossless(kind, loaded), prompt(0, length)
    cache, other = (open_cache(loaded, spec, 700, slots=12) for _ in range(2))
    sequence = cache.allocate(length, 700)
    prefill(loaded.model, cache, [(sequence, text)])
    copied = other.snapshots.load(cache.snapshots.export(sequence), 700)
    stop = cache.fork_point(sequence, length - 100)
    assert stop % 128 == 0 or stop == 64
    stop = cache.fork_point(sequence, stop + 64)
    with cache.snapshots.open_reading(sequence, 0, stop) as reading:
        cut = Snapshot(reading.header, torch.empty(reading.header.pieces, dtype=torch.uint8))
        for layer in range(reading.header.num_layers):
            reading.read_layer(layer, cut.layer(layer))
    assert SnapshotHeader.from_plain(asdict(cut.header)) == cut.header
    for at, restored in ((length, copied), (stop, other.snapshots.load(cut, 700))):
        more = [*text[:at], *prompt(1, 9)]
        other.extend(restored, len(more), 700)
        assert_close(prefill(loaded.model, other, [(restored, more[at:])]), [oracle(theirs, more)])
        runner = Runner(loaded.model, other)
        for token in prompt(2, 70):
            got, more = runner.decode([restored], [token]), [*more, token]
        assert_close(got, [oracle(theirs, more)])


@pytest.mark.parametrize("kv", ["full", "fp8"])
def test_answers_with_a_prefix_cache_are_those_without(kv: str, tmp_path: Path) -> None:
    """Of several turns in one batch, on disk between two engines, too."""
    build("minimax_m3", tmp_path, LONG)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    options = {"kv": kv, "max_model_len": 900, "max_num_seqs": 3, "dtype": "float32", "max_cached_seqs": 3}
    document, found = prompt(0, 320), dict[bool, list[list[int]]]()
    for reuse in (False, True):
        cached, found[reuse] = list[int](), list[list[int]]()
        for _ in range(2):
            disk = {"kv_disk_dir": str(tmp_path / "disk")} if reuse else {}
            with LLM(str(tmp_path), enable_prefix_caching=reuse, **options, **disk) as llm:
                texts = [[*document, *prompt(seed, 40)] for seed in (1, 2)]
                for turn in range(2):
                    outputs = llm.generate(texts, params)
                    cached += [output.num_cached_tokens or 0 for output in outputs]
                    found[reuse] += [list(output.outputs[0].token_ids) for output in outputs]
                    texts = [
                        [*text, *output.outputs[0].token_ids, *prompt(turn, 30)]
                        for text, output in zip(texts, outputs, strict=True)
                    ]
        assert bool(sum(cached)) == reuse
        if reuse:
            assert min(cached[4:]) >= 320  # the second engine found all of it on disk
    if kv == "full":
        assert found[True] == found[False]


def test_files_with_an_image_encoder(tmp_path: Path) -> None:
    """The text model is loaded alone, and older fields say the same."""
    theirs = build("minimax_m3", tmp_path)
    file, plain = tmp_path / "config.json", load_config(tmp_path)
    text = json.loads(file.read_text())
    for name in ("layer_types", "mlp_layer_types", *(name for name in text if name.startswith("index_"))):
        del text[name]
    text |= {"moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai", "qk_norm_type": "per_head"}
    text["sparse_attention_config"] = {
        "use_sparse_attention": True,
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 16,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 2,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1],
    }
    file.write_text(json.dumps({"model_type": "minimax_m3_vl", "text_config": text, "vision_config": {}}))
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {name: torch.ones(3) for name in ("vision_tower.x.weight", "multi_modal_projector.linear_1.weight")}
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert loaded.config.layer_kinds == plain.layer_kinds and loaded.config.dense_layers == plain.dense_layers == (0,)
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(theirs, sequences()))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"index_n_heads": 4}, "index_n_heads=4 is not supported, only num_key_value_heads=2"),
        ({"index_head_dim": 32}, "index_head_dim=32 is not supported, only head_dim=16"),
        ({"index_block_size": 96}, "index_block_size=96 is not a multiple of 64"),
        ({"index_topk_blocks": 0}, "index_topk_blocks=0 is not a whole number from 1"),
        ({"index_local_blocks": 3}, "index_local_blocks=3 is more than index_topk_blocks=2"),
        (
            {"index_block_size": 64, "index_topk_blocks": 1},
            "index_topk_blocks=1 of 64 tokens are fewer than 128 tokens",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "only minimax_m3_sparse or full_attention for each of 3 layers"),
        (
            {"mlp_layer_types": ["dense"]},
            r"mlp_layer_types=\['dense'\] is not supported, only sparse or dense for each",
        ),
        (
            {"mlp_layer_types": None, "moe_layer_freq": [0, 2, 1]},
            r"moe_layer_freq=\[0, 2, 1\] is not supported, only 1",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'swigluoai'"),
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported, only 7.0"),
        ({"sparse_attention_config": 3}, "sparse_attention_config=3 is not an object"),
        ({"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block=1 is not supported, only 0"),
    ],
)
def test_configs_that_cannot_be_run(fields: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    build("minimax_m3", tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "kv, words",
    [
        ("quest", "index='min-max' cannot replace the indexer that this model's layers were trained with"),
        ("full:index=native,budget=512", "index='native' selects as many blocks as the model does"),
        ("turbo:budget=512", "index='native' selects as many blocks as the model does"),
        ("turbo:min_budget=512", "index='native' selects .* leave out budget, min_budget and outliers"),
        ("full-speculative", "drafts=true .* has no meaning with this model, whose own indexer selects in every step"),
        ("fp8:drafts=true", "drafts=true .* has no meaning with this model"),
        ("fp8:skip_layers=1", "skip_layers=1 cannot leave layers with an indexer exact"),
        ("fp8:local=200", "local=200 tokens and a page of 64 are more than the 256 that a query attends to"),
    ],
)
def test_policies_that_cannot_be_used(kv: str, words: str, tmp_path: Path) -> None:
    build("minimax_m3", tmp_path)
    with pytest.raises(ValueError, match=words):
        resolve(preset(kv), load_config(tmp_path).shape)


def test_other_models_have_no_native_index() -> None:
    with pytest.raises(ValueError, match="index='native' needs a model with layers that have an indexer"):
        resolve(preset("full:index=native"), ModelShape(2, 4, 2, 64))


def test_native_is_what_layers_with_an_indexer_do_anyway(tmp_path: Path) -> None:
    build("minimax_m3", tmp_path)
    loaded = load_model(tmp_path)

    def policies(cache: KVCache) -> list[KVSpec]:
        return [group.layout.spec for group in cache.groups]

    for kv in ("fp8", "turbo", "turbo-host"):
        asked, plain = (open_cache(loaded, preset(text), 200) for text in (f"{kv}:index=native", kv))
        assert policies(asked) == policies(plain)
        assert [spec.index for spec in policies(plain)] == ["native", "none"]

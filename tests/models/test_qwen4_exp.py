"""The Qwen4 preview: streams, n-grams and attention to what its indexer selects, through the engine and on ranks, and
configs that cannot be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json
from families import build
from test_experts_engine import oracle, prompt
from test_minimax_m3 import LOSSLESS, assert_close, lossless
from test_quantized_engine import answers, assert_alike

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.running.caches import open_cache, prefill
from shadowkv.kvcache.decode import pooled as decode
from shadowkv.kvcache.prefill import native as prompts
from shadowkv.kvcache.recurrent import states
from shadowkv.models import load_config, load_model

NAMES = ("qwen4_exp", "qwen4_exp-one-stream-more")
LONG = {"max_position_embeddings": 1024}
BUDGET = 128


@pytest.mark.parametrize("block", [1024, 46])
@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(
    name: str, kind: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ragged prompts below, at and above what a query attends to, of forks, and of steps."""
    for device in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, device, block)
    monkeypatch.setattr(states, "CHECKPOINT_EVERY", 192)
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    cache = open_cache(loaded, lossless(kind, loaded), 600, slots=16)
    runner = Runner(loaded.model, cache)
    texts = [prompt(seed, length) for seed, length in enumerate((301, BUDGET + 6, BUDGET, BUDGET - 1, 1))]
    texts[0][7] = texts[0][150] = 2  # n-grams do not reach behind the end of a text
    sequences = [cache.allocate(len(text), 600) for text in texts]
    got = prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    assert_close(got, [oracle(theirs, text) for text in texts])
    point = cache.fork_point(sequences[0], 250)
    assert point == 192
    fork, text = cache.fork(sequences[0], point, point + 9, 600), [*texts[0][:point], *prompt(5, 9)]
    assert_close(prefill(loaded.model, cache, [(fork, text[point:])]), [oracle(theirs, text)])
    cache.release(fork)
    for number, step in enumerate(zip(*(prompt(10 + seed, 70) for seed in range(len(texts))), strict=True)):
        got = runner.decode(sequences, list(step))
        texts = [[*text, token] for text, token in zip(texts, step, strict=True)]
        if number in (0, 1, 2, 3, 69):
            assert_close(got, [oracle(theirs, text) for text in texts])
    assert (cache.groups[0].pool.tables.compressed > 0).any()


@pytest.mark.parametrize("length", [301, 90])
@pytest.mark.parametrize("kind", ["full", "segments", "on the host"])
def test_forks_and_snapshots_continue(kind: str, length: int, tmp_path: Path) -> None:
    """Of a compressed and of a dense sequence. A fork begins where a page does; a snapshot ends within a block."""
    theirs, loaded = build("qwen4_exp", tmp_path, LONG), load_model(tmp_path)
    cache, other = (open_cache(loaded, lossless(kind, loaded), 600, slots=12) for _ in range(2))
    sequence, text = cache.allocate(length, 600), prompt(0, length)
    prefill(loaded.model, cache, [(sequence, text)])
    point = cache.fork_point(sequence, length)
    assert point % 64 == 0 < point and length % 4
    restored = other.snapshots.load(cache.snapshots.export(sequence), 600)
    other.extend(restored, length + 9, 600)
    fork = cache.fork(sequence, point, point + 9, 600)
    for place, own, start in ((cache, fork, point), (other, restored, length)):
        more = [*text[:start], *prompt(1, 9)]
        assert_close(prefill(loaded.model, place, [(own, more[start:])]), [oracle(theirs, more)])
        runner = Runner(loaded.model, place)
        for token in prompt(2, 70):
            got, more = runner.decode([own], [token]), [*more, token]
        assert_close(got, [oracle(theirs, more)])


def assert_same_blocks(scores: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Of each query, scores of all blocks, and the chosen ones, [n, blocks]. Blocks with the score 0 are
    interchangeable."""
    width = min(ours.shape[-1], theirs.shape[-1])
    assert not ours[:, width:].any() and not theirs[:, width:].any()
    scores, ours, theirs = (x[:, :width] for x in (scores, ours, theirs))
    assert torch.equal(ours.sum(-1), theirs.sum(-1))
    assert (scores[ours != theirs] == 0).all()


def test_four_index_heads_choose_the_blocks_that_transformers_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as in published models. In a prompt, and in steps from exact and from compressed pages."""
    one = {"num_hidden_layers": 2, "layer_types": ["indexed_attention", "linear_attention"], "ple_layer_ids": []}
    theirs = build("qwen4_exp", tmp_path, {**LONG, **one, "indexer_n_heads": 4})
    loaded, text, more = load_model(tmp_path), prompt(0, 301), prompt(10, 140)
    cache = open_cache(loaded, lossless("full", loaded), 600, slots=8)
    runner, sequence = Runner(loaded.model, cache), cache.allocate(len(text), 600)
    ours: list[tuple[torch.Tensor, torch.Tensor]] = []
    choose = decode.selected_complete_blocks

    def record(scores: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ours.append((scores, choose(scores, *arguments)))
        return ours[-1][1]

    for module in (decode, prompts):
        monkeypatch.setattr(module, "selected_complete_blocks", record)
    prefill(loaded.model, cache, [(sequence, text)])
    for token in more:
        runner.decode([sequence], [token])
    attended = []
    indexer = theirs.model.layers[0].self_attn.indexer
    hook = indexer.register_forward_hook(lambda _, __, mask: attended.append(mask[0, 0]))
    with torch.no_grad():
        theirs(torch.tensor([[*text, *more]]), use_cache=False)
    hook.remove()
    (mask,) = attended
    complete = (torch.arange(len(mask)) + 1) // 4
    blocks = mask[:, : len(mask) // 4 * 4].unflatten(-1, (-1, 4)).all(-1)
    blocks &= torch.arange(blocks.shape[-1]) < complete[:, None]
    assert_same_blocks(*ours[0], blocks[: len(text)])
    assert len(ours) == 1 + len(more)
    for (scores, chosen), expected in zip(ours[1:], blocks[len(text) :], strict=True):
        assert_same_blocks(scores, chosen, expected[None])
    assert (blocks.sum(-1) < complete).sum() > 300 and blocks.sum(-1).max() == BUDGET // 4


def test_ranks_answer_as_one(tmp_path: Path) -> None:
    build("qwen4_exp", tmp_path, LONG)
    assert_alike(answers(tmp_path, tensor_parallel_size=2)[1], answers(tmp_path)[1])


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("indexer_kv_heads", 2, "indexer_kv_heads=2 is not supported, only 1"),
        ("indexer_compress_ratio", 3, "indexer_compress_ratio=3 is not supported, only 1, 2, 4, 8 or 16"),
        ("indexer_budget", 130, "indexer_budget=130 is not a multiple of indexer_compress_ratio=4 from 128 on"),
        ("indexer_head_dim", None, "indexer_head_dim=None is not a whole number from 1"),
        ("ple_layer_ids", [2], r"ple_layer_ids=\[2\] is not supported, only a list of layers with linear attention"),
        ("output_gate_type", "relu", "output_gate_type='relu' is not supported, only 'sigmoid' or 'silu'"),
    ],
)
def test_configs_that_cannot_be_run_are_refused(field: str, value: object, reason: str, tmp_path: Path) -> None:
    build("qwen4_exp", tmp_path)
    edit_json(tmp_path / "config.json", **{field: value})
    with pytest.raises(ValueError, match=reason):
        load_config(tmp_path)

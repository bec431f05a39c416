"""Adapters are trained on what they should be, learn, and can be loaded; a stopped run goes on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from shadowkv.eval.suites.ruler.needles import CONFIGS
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.models import load_config, load_model
from shadowkv.models.sources import adapter_of
from training import loop
from training.batches import Lengths, chat_batches, in_order
from training.chats import Chat
from training.loop import Recipe, Training, held_out_divergence
from training.losses import divergence, retrieval_loss
from training.model import PROJECTIONS, Base, Lora, compress, hidden_states, load_base, padded
from training.samples import TASKS, Tokens, retrieval_batch, tokenizer_of
from training.texts import read_texts

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``write_texts`` leaves it, of few words."""
    folder = tmp_path_factory.mktemp("texts")
    words = [
        f"{first}{last}"
        for first in ("river", "stone", "cloud", "field", "house")
        for last in ("s", "ward", "less", "ly", "ing")
    ]
    (folder / "prose.txt").write_text(" ".join(words * 200))
    for kind in ("noun", "adjective", "verb"):
        (folder / f"{kind}list.txt").write_text("\n".join(f"{kind}{word}" for word in words * 4))
    return folder


@pytest.fixture(scope="module")
def base() -> Base:
    """A model of two small layers with random weights and SmolLM2's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    config = dataclasses.replace(
        load_config(MODEL), num_layers=2, hidden_size=64, intermediate_size=96, num_query_heads=2, num_kv_heads=1
    )
    sizes = dict(zip(PROJECTIONS, [(128, 64), (64, 64), (64, 64), (64, 128), (96, 64), (96, 64), (64, 96)]))
    weights = {"model.embed_tokens.weight": torch.randn(config.vocab_size, 64, generator=generator)}
    weights["model.norm.weight"] = torch.ones(64)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            weights[f"{prefix}{name}.weight"] = torch.randn(size, generator=generator) / 8
        weights |= {
            f"{prefix}{name}.weight": torch.ones(64) for name in ("input_layernorm", "post_attention_layernorm")
        }
    return Base(config, weights)


def test_samples_ask_what_their_prompts_say(texts: Path) -> None:
    tokenizer, seen = tokenizer_of(MODEL), 0
    for seed in range(12):
        for sample in retrieval_batch(MODEL, texts, 1024, 2, f"{seed}"):
            assert 512 < len(sample.ids) <= 1024
            answer = tokenizer.decode(sample.ids[-sample.answer :])
            prompt = tokenizer.decode(sample.ids[: -sample.answer])
            assert sample.ids[-1] == tokenizer.backend.token_to_id("<|im_end|>")
            value = answer.strip().rstrip(".").split(", ")[0].split(" is ")[-1]
            seen += value in prompt
    assert seen >= 20  # of 24; common words are listed in other ways
    assert set(CONFIGS) < set(TASKS)
    again = retrieval_batch(MODEL, texts, 1024, 2, "0")
    assert again == retrieval_batch(MODEL, texts, 1024, 2, "0") != retrieval_batch(MODEL, texts, 1024, 2, "1")


def test_texts_say_how_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"python -m training texts --out"):
        read_texts(tmp_path)


def test_lengths_have_their_shares_of_the_time() -> None:
    lengths, spent = Lengths({1: 0.5, 4: 0.5}, phased=False), {1: 0.0, 4: 0.0}
    for _ in range(400):
        length = lengths.next(0.0)
        spent[length] += length
        lengths.took(length, length)
    assert spent[1] == pytest.approx(spent[4], rel=0.1)
    phases = Lengths({1: 1, 4: 3}, phased=True)
    assert [phases.next(progress) for progress in (0.0, 0.2, 0.3, 1.0)] == [1, 1, 4, 4]


def test_batches_hold_every_chat_once() -> None:
    chats = [Tokens([1] * (10 + 7 * number % 50), 3) for number in range(40)]
    batches = list(in_order(chats, 200))
    assert [chat for batch in batches for chat in batch] == chats
    assert all(len(batch) * max(len(chat.ids) for chat in batch) <= 200 for batch in batches)
    drawn = chat_batches(chats, 200, random.Random(0))
    epoch: list[Tokens] = []
    while len(epoch) < 40:
        epoch += next(drawn)
    assert sorted(map(id, epoch)) == sorted(map(id, chats))


def test_no_adapter_and_the_same_rope_diverge_by_nothing(base: Base) -> None:
    lora, chats = Lora(base), [Tokens([5, 6, 7, 8, 9], 2), Tokens([3, 2, 1], 1)]
    parts, counts = divergence(base, lora, (1e5, 1e5), chats)
    assert counts == [2, 1]
    torch.testing.assert_close(parts, torch.zeros(3), atol=1e-5, rtol=0)
    assert divergence(base, lora, (1e5, 1e2), chats)[0].max() > 1e-4


def test_a_row_does_not_see_its_padding(base: Base) -> None:
    short, long = [4, 5, 6], [9, 8, 7, 6, 5, 4]
    together = hidden_states(base, padded([short, long], torch.device("cpu")), 1e5)
    alone = hidden_states(base, torch.tensor([short]), 1e5)
    torch.testing.assert_close(together[0, :3], alone[0])


@pytest.mark.slow
def test_it_learns_and_goes_on_where_it_stopped(
    base: Base, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # each look at it takes a second: as many steps on any machine
    monkeypatch.setattr(loop, "monotonic", lambda: float(next(clock)))
    chats = [Chat([f"How is {name}?"], True, name < "c", [[40, 41, 42, 2]]) for name in "abcdefgh"]
    recipe = Recipe(
        model=MODEL, texts=texts, out=tmp_path / "out", minutes=0.5, rate=2e-2, lengths={512: 1.0}, phased=True,
        tokens=512, batches=1, theta=4e6, chat_tokens=256, chat_batches=1, chat_weight=1.0, test_minutes=9.0, workers=1,
    )  # fmt: skip
    Training(recipe, base, None, chats).run()
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    tests = [entry["held_out_kl"] for entry in log if "held_out_kl" in entry]
    assert len(tests) == 2
    assert tests[1] < 0.7 * tests[0]
    steps = log[-1]["step"]
    assert steps > 3
    again = Training(dataclasses.replace(recipe, minutes=0.6), base, None, chats)
    again.run()
    assert again.progress.step > steps
    assert again.progress.log[: len(log)] == log
    loaded = Lora(base)
    loaded.load(tmp_path / "out")
    for trained, stored in zip(again.lora.parameters(), loaded.parameters()):
        torch.testing.assert_close(stored, trained, atol=0, rtol=2**-8)


def test_the_divergence_of_held_out_chats_is_a_mean_over_tokens(base: Base) -> None:
    """Answers of all lengths count by their tokens, those that were chosen greedily and others apart."""
    lora = Lora(base)
    draw = torch.Generator().manual_seed(1)
    for _, b in lora.pairs.values():
        b.data.normal_(0, 0.1, generator=draw)
    chats = [(number % 2 == 0, Tokens(list(range(number, number + 30)), 3 + 4 * number)) for number in range(5)]
    found = held_out_divergence(base, lora, (1e5, 1e5), chats)
    parts, counts = divergence(base, lora, (1e5, 1e5), [tokens for _, tokens in chats])
    greedy = torch.cat([torch.full((count,), flag) for (flag, _), count in zip(chats, counts, strict=True)])
    means = {"": parts.mean(), "_greedy": parts[greedy].mean(), "_drawn": parts[~greedy].mean()}
    assert found == {f"held_out_kl{name}": pytest.approx(mean.item(), rel=1e-4) for name, mean in means.items()}
    assert found["held_out_kl_greedy"] != pytest.approx(found["held_out_kl_drawn"], rel=1e-2)


def test_drawn_places_of_text_and_answers_have_a_loss(base: Base) -> None:
    lora = Lora(base)
    losses = retrieval_loss(base, lora, 4e6, [Tokens(list(range(20)), 4)], torch.Generator().manual_seed(0))
    (losses[0] + losses[1]).backward()
    hidden = hidden_states(base, torch.arange(20)[None], 4e6)[0]
    logits = F.linear(hidden[15:19], base.embedding)
    torch.testing.assert_close(losses[0], F.cross_entropy(logits, torch.arange(16, 20)))
    assert all(b.grad is not None and b.grad.abs().max() > 0 for _, b in lora.pairs.values())


def test_training_computes_what_a_server_computes(tmp_path: Path) -> None:
    directory = adapter_of("smollm2-135m-64k")
    assert directory is not None
    loaded = load_model("smollm2-135m-64k", dtype="float32")
    assert loaded.config.shape == ModelShape(30, 9, 3, 64, loaded.config.layer_kinds)
    assert (loaded.config.rope.theta, loaded.config.max_position) == (4e6, 65536)
    base = load_base(MODEL, torch.device("cpu"))
    lora = Lora(base)
    lora.load(directory)
    name = "model.layers.7.mlp.down_proj"
    torch.testing.assert_close(lora.added(name, base.weights[f"{name}.weight"]), loaded.model.layers[7].mlp.down.weight)
    lora.save(tmp_path / "whole", MODEL)
    compress(tmp_path / "whole", tmp_path / "int8")
    adapted = load_model(MODEL, dtype="float32", adapter=tmp_path / "int8")
    change = adapted.model.layers[7].mlp.down.weight - base.weights[f"{name}.weight"]
    exact = lora.added(name, base.weights[f"{name}.weight"]) - base.weights[f"{name}.weight"]
    assert (change - exact).norm() < 0.02 * exact.norm()

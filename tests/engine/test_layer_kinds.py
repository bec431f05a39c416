"""Models of which some layers, or all, have a sliding window: as transformers computes them, from every tier, on two
ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from test_engine import GREEDY, assert_empty, drain, prompt, small_blocks, tokens
from test_mixed_steps import paced
from test_prefix_cache import cached
from tiers import assert_nothing_left, evict_device, settle
from transformers import AutoConfig, AutoModelForCausalLM

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.sizing import _demand, _shared_out
from shadowkv.eval.running.caches import open_cache, prefill
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.shape import FULL, LayerKind, ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models import load_model
from shadowkv.ops.apply_rope.tables import RopeConfig

WINDOW, VOCABULARY = 100, 256


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "layer_types": MIXED},
    "mistral": {},
    "gemma3_text": {"head_dim": 16, "layer_types": MIXED, "query_pre_attn_scalar": 12, "tie_word_embeddings": True},
}
LOCAL = LayerKind(WINDOW, RopeConfig(16, theta=10000.0))
KINDS = {"mistral": (LayerKind(WINDOW),) * 4, "gemma3_text": (LOCAL, FULL, LOCAL, LOCAL)}

Model = tuple[Path, torch.nn.Module]
"""Files of a small random model, and transformers' own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make("qwen2", tmp_path_factory.mktemp("mixed"))


def make(family: str, directory: Path) -> Model:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            norms = parameter.ndim == 1
            mean = 1.0 if norms and family != "gemma3_text" else 0.0  # Gemma's norms add 1
            parameter.normal_(mean, 0.3 if norms else 0.15)
    made.save_pretrained(directory, safe_serialization=True)
    vocabulary = {chr(ord(" ") + number): number for number in range(90)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[])).save(str(directory / "tokenizer.json"))
    return directory, made


@torch.no_grad()
def oracle(model: torch.nn.Module, text: list[int]) -> torch.Tensor:
    """transformers' logits [tokens, V]."""
    return model(torch.tensor([text]), use_cache=False).logits[0]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [2048, 48])
def test_logits_are_those_of_transformers(
    family: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packed prompts and of one in blocks, steps, later turns, a fork, and what goes on from a snapshot."""
    small_blocks(monkeypatch, block)
    model = make(family, tmp_path)
    loaded = load_model(model[0], dtype=torch.float32)
    assert loaded.config.layer_kinds == KINDS.get(
        family, (LayerKind(WINDOW), FULL, LayerKind(WINDOW), LayerKind(WINDOW))
    )
    assert loaded.config.max_position == 2048
    cache = open_cache(loaded, preset("full"), 1200, slots=4)
    runner = Runner(loaded.model, cache)
    texts = [prompt(seed, length) for seed, length in enumerate((300, 40, 5))]
    sequences = [cache.allocate(len(text), 1200) for text in texts]
    got = prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    close(got, torch.stack([oracle(model[1], text)[-1] for text in texts]))
    following = [prompt(10 + seed, 150) for seed in range(3)]
    for step in zip(*following, strict=True):
        got = runner.decode(sequences, list(step))
        texts = [[*text, token] for text, token in zip(texts, step, strict=True)]
    close(got, torch.stack([oracle(model[1], text)[-1] for text in texts]))
    point = cache.fork_point(sequences[0], 449)
    assert point == 448
    turn = prompt(20, 130)
    fork = cache.fork(sequences[0], point, point + 130, 1200)
    close(prefill(loaded.model, cache, [(fork, turn)])[0], oracle(model[1], texts[0][:point] + turn)[-1])
    other = open_cache(loaded, preset("full"), 1200, slots=1)
    twin = other.snapshots.load(cache.snapshots.export(sequences[0]), 1200)
    for owner, sequence in ((cache, sequences[0]), (other, twin)):
        close(prefill(loaded.model, owner, [(sequence, turn)])[0], oracle(model[1], texts[0] + turn)[-1])
    close(Runner(loaded.model, other).decode([twin], [7])[0], oracle(model[1], [*texts[0], *turn, 7])[-1])


def engine_of(model: Model, **options: Any) -> Engine:
    settings = {"kv": "full", "max_num_seqs": 4, "max_cached_seqs": 2, "kv_dense_below": 0, **options}
    return Engine(EngineConfig(model=str(model[0]), **settings))


def ask(engine: Engine, text: list[int]) -> tuple[list[int], int]:
    """Answer and cached tokens of one request."""
    engine.add_request("x", text, GREEDY)
    outputs = drain(engine)
    return tokens(outputs["x"]), cached(outputs)["x"]


def greedy(model: torch.nn.Module, text: list[int], count: int = 8) -> list[int]:
    """transformers' answer."""
    answer: list[int] = []
    for _ in range(count):
        answer.append(int(oracle(model, text + answer)[-1].argmax()))
    return answer


def test_prompts_in_the_pass_of_a_step_are_answered_as_by_transformers(model: Model) -> None:
    engine, texts = engine_of(model), [prompt(1, 130), prompt(2, 250), prompt(3, 5)]
    engine.add_request("0", texts[0], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    outputs = engine.step()
    steps = paced(engine)
    for number in (1, 2):
        engine.add_request(str(number), texts[number], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        outputs += engine.step()
    assert [prompts for _, prompts in steps if prompts] == [[250, 5]]
    for number, count in enumerate((40, 20, 20)):
        of_request = [output for output in outputs if output.request_id == str(number)]
        assert tokens(of_request) == greedy(model[1], texts[number], count)
    assert_empty(engine)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_prompts_come_back_from_every_tier(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "model")
    document, question = prompt(1, 640), prompt(2, 100)
    options = {"kv_offload_gib": 0.0625, "kv_disk_dir": str(tmp_path / "cache")}
    engine = engine_of(model, **options)
    first, wanted = document + question, greedy(model[1], document + question)
    assert ask(engine, first) == (wanted, 0)
    conversation = [*first, *wanted, *prompt(3, 60)]
    assert ask(engine, conversation) == (greedy(model[1], conversation), len(first) + len(wanted) - 1)
    settle(engine)
    evict_device(engine)
    longer = first + prompt(4, 70)
    whole = len(first) // 64 * 64
    assert ask(engine, longer) == (greedy(model[1], longer), whole)
    assert engine.scheduler.prefix_cache.stats()["host"].hit_tokens == whole
    settle(engine)
    engine.close()
    engine = engine_of(model, **options)
    assert ask(engine, longer) == (greedy(model[1], longer), (len(longer) - 1) // 64 * 64)
    settle(engine)
    assert_nothing_left(engine)
    engine.close()


@pytest.mark.parametrize("kv", ["turbo:values=dense", "full"])
def test_requests_side_by_side_are_answered_as_alone(model: Model, kv: str) -> None:
    texts = {str(seed): prompt(seed, length) for seed, length in enumerate((700, 90, 333, 10, 128, 1))}
    alone = {name: ask(engine_of(model, kv=kv), text)[0] for name, text in texts.items()}
    engine = engine_of(model, kv=kv)
    for name, text in texts.items():
        engine.add_request(name, text, GREEDY)
    assert {name: tokens(outputs) for name, outputs in drain(engine).items()} == alone
    if kv == "full":
        assert alone == {name: greedy(model[1], text) for name, text in texts.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="ranks meet through gloo")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    document, answers = prompt(1, 400), []
    for ranks in (1, 2):
        engine = engine_of(model, tensor_parallel_size=ranks, max_model_len=1024)
        found = []
        for seed in (2, 3):
            text = document + prompt(seed, 60)
            engine.add_request("x", text, params)
            outputs = drain(engine)["x"]
            found.append((tokens(outputs), [one.logprob for output in outputs for one in output.logprobs or []]))
        engine.close()
        answers.append(found)
    for one, two in zip(*answers, strict=True):
        assert one[0] == two[0]
        torch.testing.assert_close(torch.tensor(one[1]), torch.tensor(two[1]), atol=1e-4, rtol=0)
    assert answers[0][0][0] == greedy(model[1], document + prompt(2, 60))


def test_a_policy_is_of_no_layer_where_all_have_a_window(tmp_path: Path) -> None:
    """And the start says so; a limit of the window's size leaves none that has one."""
    directory, oracle = make("mistral", tmp_path)
    text = prompt(1, 700)
    engine = engine_of((directory, oracle), kv="turbo")
    assert "windows 4 of 4 layers attend to the newest 100 tokens, exact under every policy" in engine.notes
    assert ask(engine, text)[0] == greedy(oracle, text)
    short = engine_of((directory, oracle), kv="turbo", max_model_len=WINDOW)
    assert not [line for line in short.notes if line.startswith("windows")]
    assert ask(short, text[:50])[0] == greedy(oracle, text[:50])


def test_memory_is_shared_out_so_that_short_sequences_have_windows_too() -> None:
    """Of a model whose windows take more than 1,000 tokens do in the other layers, memory for one longest sequence."""
    kinds = tuple(FULL if number % 6 == 5 else LayerKind(1024) for number in range(24))
    layout = Layout(preset("full"), ModelShape(24, 4, 2, 64, kinds), torch.float32, 65536)
    longest, short = (_demand(layout, tokens) for tokens in (65536, 1000))
    budget = layout.tier_bytes(longest)["device"] * 5 // 4
    blocks = _shared_out(layout, 65536, 64, Blocks(device=budget, host=0))
    assert longest.within(blocks)
    assert layout.tier_bytes(blocks)["device"] <= budget
    assert min(blocks[kind] // count for kind, count in short.items() if count) >= 3
    assert (
        _shared_out(layout, 65536, 2, Blocks(device=budget, host=0))[layout.bounded[0]]
        == 2 * longest[layout.bounded[0]]
    )

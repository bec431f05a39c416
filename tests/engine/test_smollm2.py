"""The engine on a real model: right tokens, found needles, next turns, long outputs."""

from __future__ import annotations

import random
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
from precision import assert_close_in_blocks
from session import Session
from torch import Tensor

from shadowkv import LLM, SamplingParams
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.scheduling.quality_meter import kl_divergence
from shadowkv.eval.running.caches import prefill_all
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel
from shadowkv.models.sources import fetch

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
TOPICS = (
    *("the sea", "a lighthouse", "bread", "the number seven", "a train journey"),
    *("winter", "chess", "volcanoes", "opera", "mathematics"),
)
NOUNS = ("grass", "sky", "river", "stone", "wind", "road", "tree", "cloud", "field", "light", "house", "bird", "hill")


def chat(llm: LLM, text: str) -> list[int]:
    prompt = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": text}])
    return llm.get_tokenizer().encode(prompt, add_special_tokens=False)


def filler(llm: LLM, count: int, seed: int) -> list[int]:
    """Dull text of exactly ``count`` tokens."""
    rng, ids = random.Random(seed), []
    while len(ids) < count:
        a, b, c = rng.sample(NOUNS, 3)
        ids += llm.get_tokenizer().encode(
            f" The {a} is near the {b}, and the {c} is far away.", add_special_tokens=False
        )
    return ids[:count]


def texts(llm: LLM) -> list[int]:
    """Tokens of some prose that comes with Python."""
    topics = import_module("pydoc_data.topics").topics
    return llm.get_tokenizer().encode("\n".join(topics[name] for name in sorted(topics))[:60000])


def all_logits(loaded: LoadedModel, tokens: list[int]) -> Tensor:
    """Full attention's logits [n, V] after each of ``tokens``."""
    session = Session(loaded, preset("full"), len(tokens))
    batch = session.cache.prefill_batch([(session.cache.allocate(len(tokens), len(tokens)), len(tokens))])
    with torch.inference_mode():
        hidden = loaded.model.embed(torch.tensor(tokens))
        for layer in session.runner.layers:
            hidden = torch.add(*layer.start(hidden, None, session.cache, batch.block(0, len(tokens)))())
        return loaded.model.logits(hidden)


def prefilled(loaded: LoadedModel, policies: list[str], prompt: list[int], room: int) -> list[tuple[Session, Tensor]]:
    """For each policy a session after ``prompt``, which is computed once for all, and its last token's logits [V]."""
    capacity = len(prompt) + room
    sessions = [Session(loaded, preset(kv), capacity) for kv in policies]
    sequences, logits = prefill_all(loaded.model, [session.cache for session in sessions], prompt, capacity)
    for session, sequence in zip(sessions, sequences):
        session.sequence = sequence
    return list(zip(sessions, logits))


@pytest.fixture(scope="module")
def oracle() -> Any:
    """Reads the file in Python, for seconds of CPU: what compares with it is in this file."""
    import gguf
    from transformers import AutoModelForCausalLM

    file = fetch("smollm2-135m-instruct")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # asked for the same twice, and for every module
            patch.setattr(gguf, name, lru_cache(getattr(gguf, name)))
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def test_logits_are_those_of_transformers_reading_of_the_file(loaded: LoadedModel, oracle: Any) -> None:
    ids = loaded.tokenizer.encode(
        "The quick brown fox jumps over the lazy dog. In 1969, three people flew to the Moon;\n\n"
        "def f(x):\n    return x\n"
    )

    @torch.no_grad()
    def theirs(count: int) -> list[Tensor]:
        return [oracle(torch.tensor([ids[:count]])).logits[0]]

    for count in (5, len(ids)):
        assert_close_in_blocks([all_logits(loaded, ids[:count])], partial(theirs, count))


def test_ten_greedy_answers_equal_transformers_token_for_token(llm: LLM, oracle: Any) -> None:
    prompts = [chat(llm, f"Write a short text about {topic}.") for topic in TOPICS]
    for prompt, answer in zip(prompts, llm.generate(prompts, GREEDY)):
        assert len(answer.outputs[0].token_ids) == 40 and len(prompt) < 64 < len(prompt) + 40  # over the end of a page
        with torch.inference_mode():
            # Greedy is token for token the same exactly if the oracle, given our text so far, always picks our next.
            ids = torch.tensor([prompt + answer.outputs[0].token_ids])
            picks = oracle(ids, logits_to_keep=41).logits[0, :-1].argmax(-1)
        assert picks.tolist() == answer.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_generate_of_transformers_with_our_cache_gives_our_tokens(
    llm: LLM, loaded: LoadedModel, oracle: Any, kv: str
) -> None:
    from shadowkv.hf import ShadowKVCache

    prompt = texts(llm)[:500]
    ours = [token for token, _ in Session(loaded, preset(kv), 520).greedy(prompt, 20)]
    usual = oracle.config._attn_implementation
    oracle.set_attn_implementation("shadowkv")
    try:
        cache = ShadowKVCache(oracle, kv, max_model_len=520)
        ids = torch.tensor([prompt])
        out = oracle.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, eos_token_id=None)
    finally:
        oracle.set_attn_implementation(usual)
    assert out[0, len(prompt) :].tolist() == ours
    assert (cache.batch.sequences[0].compressed > 400) == (kv == "turbo")


@pytest.mark.slow
def test_ragged_batch_equals_each_prompt_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", 512)
    lengths = [1, 7, 63, 64, 65, 780]  # the last is compressed; together they are more than a block
    assert sum(lengths) > BLOCK_TOKENS["cpu"]
    prompts = [filler(llm, n, seed=n) for n in lengths]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0, cache_prompt=False)
    together = llm.generate(prompts, params)
    for prompt, one in zip(prompts, together):
        (alone,) = llm.generate([list(prompt)], params)
        (mine,), (other,) = alone.outputs, one.outputs
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, "length")
        for token, a, b in zip(mine.token_ids, mine.logprobs, other.logprobs, strict=True):
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=2e-3)


def test_needle_in_a_prompt_of_two_blocks_is_found(
    llm: LLM, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", 1024)
    text, needle = filler(llm, 1300, seed=1), " The secret number of the lighthouse is 7304918. Remember it."
    middle = llm.get_tokenizer().encode(needle, add_special_tokens=False)
    question = "\nWhat is the secret number of the lighthouse? Answer with the number."
    body = llm.get_tokenizer().decode(text[:900] + middle + text[900:])
    prompt = chat(llm, body + question)
    assert len(prompt) > BLOCK_TOKENS["cpu"]
    policies = ["full", "shadowkv"]
    for kv, (session, logits) in zip(policies, prefilled(loaded, policies, prompt, 24)):
        answer = llm.get_tokenizer().decode([token for token, _ in session.answer(logits, 24)])
        assert "7304918" in answer
        assert (session.sequence.compressed > 1200) == (kv == "shadowkv")


@pytest.mark.parametrize(
    ("kv", "count", "limit"),
    [
        ("full", 200, 1e-6),
        pytest.param("quest", 400, 0.05, marks=pytest.mark.slow),
        ("shadowkv", 700, 0.05),
    ],
)
def test_second_turn_extends_the_cached_sequence(
    llm: LLM, loaded: LoadedModel, kv: str, count: int, limit: float
) -> None:
    first = chat(llm, llm.get_tokenizer().decode(filler(llm, count, seed=2)) + " Sum this up in a sentence.")
    session = Session(loaded, preset(kv), 2000)
    answer = [token for token, _ in session.greedy(first, 20)]
    assert (session.sequence.compressed > 0) == session.cache.spec.compresses
    # The answer's last token was sampled and never fed.
    second = answer[-1:] + llm.get_tokenizer().encode(
        "<|im_end|>\n<|im_start|>user\nName three birds and where they live.<|im_end|>\n<|im_start|>assistant\n"
    )
    forced = llm.get_tokenizer().encode(" Robins live in gardens, gulls by the sea and owls in old trees and barns.")
    extended = session.force(second, forced)
    fresh = Session(loaded, preset(kv), 2000).force(first + answer[:-1] + second, forced)
    assert kl_divergence(fresh, extended).mean() <= limit


@pytest.mark.slow
def test_a_document_behind_a_short_first_turn_is_kept_as_well_as_in_one_prompt(llm: LLM, loaded: LoadedModel) -> None:
    """It does not fit the state that the first turn left: it has one of its own, or is exact where it is short."""
    question = llm.get_tokenizer().encode("\n\nWhat is the text above about, in detail? Answer:")
    first, document = filler(llm, 400, seed=0), texts(llm)[:800]
    whole = first + document + question
    kv = "turbo:values=rotated-3bit,min_budget=640"  # more would attend to nearly everything
    (full, logits), (one, its_logits) = prefilled(loaded, ["full", kv], whole, 24)
    tokens, exact = zip(*full.answer(logits, 24))
    turns = Session(loaded, preset(kv), len(whole) + 24)
    turns.feed(first)
    turns.feed(document)
    assert (len(one.sequence.path), len(turns.sequence.path)) == (1, 2)
    answers = {"one prompt": one.follow(its_logits, list(tokens)), "turns": turns.force(question, list(tokens))}
    loss = {name: float(kl_divergence(torch.stack(exact), found).mean()) for name, found in answers.items()}
    print(f"KL to full attention: {loss}")
    # 1.71 of this text, 1.72 over four.
    assert loss["turns"] <= 2 * loss["one prompt"]


def test_next_turn_through_the_engine_reuses_what_is_cached(llm: LLM) -> None:
    prompt = filler(llm, 700, seed=3)
    (first,) = llm.generate([prompt], GREEDY)
    more = prompt + first.outputs[0].token_ids + llm.get_tokenizer().encode(" And then?")
    (second,) = llm.generate([more], SamplingParams(max_tokens=8, temperature=0.0))
    assert second.num_cached_tokens == len(prompt) + 39  # all but the last sampled token
    (same,) = llm.generate([more], SamplingParams(max_tokens=8, temperature=0.0))
    assert same.num_cached_tokens == len(more) - 1
    assert same.outputs == second.outputs


@pytest.mark.slow
def test_long_output_compresses_pages_in_bounded_memory(llm: LLM, loaded: LoadedModel) -> None:
    prompt, count = chat(llm, "Tell a very long story of a lighthouse."), 360
    session = Session(loaded, preset("shadowkv:outliers=8,budget=128"), len(prompt) + count)
    tokens, logits = zip(*session.greedy(prompt, count))
    sequence, spec = session.sequence, session.cache.spec
    length = sequence.length
    compressed = sequence.compressed
    assert length == len(prompt) + count - 1
    # What the state of the first tokens does not reach stays exact until it is a segment of its own.
    assert length - compressed <= spec.dense_limit
    print(f"{compressed} of {length} tokens are compressed, in {len(sequence.path)} segments")
    assert compressed >= 256 and len(sequence.path) == 2
    assert len(sequence.static) == spec.static_pages + (len(sequence.path) - 1) * spec.outlier_pages
    assert len(sequence.ring) <= spec.dense_limit // 64 + 2
    assert not sequence.dense
    reference = all_logits(loaded, prompt + list(tokens))[len(prompt) - 1 : -1]
    divergence = float(kl_divergence(reference, torch.stack(logits)).mean())
    print(f"KL of shadowkv to full over {count} generated tokens: {divergence:.2g}")
    assert divergence < 0.05

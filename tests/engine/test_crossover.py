"""From how many tokens on sequences are compressed: picked at start, by the model, the policy and the batch."""

from dataclasses import replace

import pytest
import torch

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.startup import crossover
from shadowkv.engine.startup.crossover import COSTS, dense_below
from shadowkv.kvcache.policy.growth import SETTLED
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models.loader import load_config
from shadowkv.ops.choose_experts.routing import Routing

LLAMA = load_config("llama-3.1-8b")
CARD = 110 * 2**30


def below(kv: str, batch: int, longest: int = 131072, cache_bytes: int | None = CARD) -> int:
    return dense_below(LLAMA, Layout(preset(kv), LLAMA.shape, torch.bfloat16, longest), "cuda", batch, cache_bytes)


@pytest.mark.parametrize("kv", ["turbo", "turbo-host", "shadowkv", "quest"])
def test_larger_batches_compress_sooner_and_never_what_no_state_is_fitted_on_for_good(kv):
    lengths = [below(kv, batch) for batch in (1, 8, 48, 256)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1] >= SETTLED


def test_a_cheaper_fit_compresses_sooner(monkeypatch):
    monkeypatch.setitem(crossover.COSTS, "cuda", replace(COSTS["cuda"], fit=0.07 / 32))
    assert below("turbo", 48) > 8256


def test_prompts_of_one_block_are_never_compressed(monkeypatch):
    monkeypatch.setitem(crossover.COSTS, "cuda", replace(COSTS["cuda"], fit=0.0, compress=0.0, step=0.0))
    assert below("turbo", 256) == BLOCK_TOKENS["cuda"] + 64


def test_what_never_pays_is_never_compressed(monkeypatch):
    monkeypatch.setitem(crossover.COSTS, "cuda", replace(COSTS["cuda"], row=1.0))
    assert below("turbo", 48) == 131073


def test_a_mixture_of_experts_compresses_as_late_as_the_weights_that_its_batch_reads(monkeypatch):
    """Compressed, more sequences fit, and more experts are read for them: less is gained than if that cost nothing."""
    model = load_config("qwen3-30b-a3b-2507")
    layout = Layout(preset("turbo"), model.shape, torch.bfloat16, 131072)
    counted = dense_below(model, layout, "cuda", 16, 10 * 2**30)
    monkeypatch.setattr(Routing, "share_touched", lambda self, tokens: 1.0)
    assert counted > dense_below(model, layout, "cuda", 16, 10 * 2**30)


def test_a_model_compresses_sooner_where_coding_its_keys_and_values_is_less_work():
    """Of 24 layers half have windows, and heads are of 64: a fifth of Llama's dimensions, in a third of its layers."""
    model = load_config("gpt-oss-20b")
    layout = Layout(preset("turbo"), model.shape, torch.bfloat16, 131072)
    assert dense_below(model, layout, "cuda", 184, CARD) < 61440


def test_a_card_too_small_for_a_dense_batch_compresses_sooner():
    assert below("turbo", 4, cache_bytes=4 * 2**30) < below("turbo", 4, cache_bytes=None)


def test_the_longest_context_changes_nothing_below_it():
    assert below("turbo", 48) == below("turbo", 48, longest=65536)


def test_an_engine_says_it_and_a_number_goes_before_it(make):
    auto = make(kv="quest", kv_dense_below="auto")
    assert auto.cache.spec.dense_below == auto.max_model_len + 1  # on a CPU so small a model never gains by it
    assert f"whole sequences up to {auto.max_model_len} tokens exact" in "\n".join(auto.notes)
    assert make(kv="quest", kv_dense_below=700).cache.spec.dense_limit == 699
    assert make(kv="quest:dense_below=500", kv_dense_below="auto").cache.spec.dense_limit == 499
    assert make(kv="quest", kv_dense_below=0).cache.spec.dense_limit == make(kv="quest").cache.spec.exact_limit
    assert make(kv="full", kv_dense_below="auto").cache.spec.dense_below is None


@pytest.mark.parametrize("value", [-1, "many", 1.5])
def test_what_is_no_length_is_refused(make, value):
    with pytest.raises(ValueError, match="kv_dense_below"):
        make(kv_dense_below=value)

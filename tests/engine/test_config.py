"""EngineConfig, its flags and its errors."""

import argparse
import json
from dataclasses import fields, replace

import pytest

from shadowkv.engine.config import EngineConfig
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import CACHE_DTYPES, PRESETS

SET = EngineConfig(
    model="some/model",
    revision="v1",
    download_dir="models",
    tokenizer="other/model",
    chat_template="chat.jinja",
    adapter="lora",
    load_format="dummy",
    max_num_seqs=3,
    max_model_len=4096,
    max_num_batched_tokens=512,
    max_cached_seqs=0,
    max_mamba_checkpoints=12,
    mamba_ssm_cache_dtype="bfloat16",
    kv_offload_gib=1.5,
    kv_disk_dir="cache",
    kv_disk_gib=8.0,
    eviction="graph",
    role="prefill",
    max_queued_seqs=77,
    scheduling_policy="priority",
    default_max_tokens=77,
    max_logprobs=7,
    generation_config="vllm",
    override_generation_config={"top_k": 5},
    seed=7,
    speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    quality_meter=0.25,
    kv="quest",
    kv_dense_below=2048,
    prefill="sparse",
    prefill_error=0.75,
    gpu_memory_utilization=0.5,
    host_memory_gib=2.5,
    fetch_buffer=3.0,
    dtype="bfloat16",
    quantization="fp8",
    attention_backend="flash-attn",
    device="cpu",
    tensor_parallel_size=2,
    enable_expert_parallel=True,
    disable_custom_all_reduce=True,
    rope_theta=5e6,
    hf_overrides={"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    enforce_eager=True,
    skip_warmup=True,
)


def parse(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    EngineConfig.add_arguments(parser)
    return EngineConfig.from_args(parser.parse_args(flags))


def flag(name: str, value: object) -> list[str]:
    """A field as the flag of its name with dashes; a switch has no value, and is named where it differs, and an object
    is JSON."""
    word = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        turned = word if value else word.replace("--", "--no-", 1)
        return [turned] * (value != getattr(EngineConfig, name))
    return [word, json.dumps(value) if isinstance(value, dict) else str(value)]


def flags_of(config: EngineConfig) -> list[str]:
    """Every field that is not None as a flag."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return [word for name, value in values.items() if value is not None for word in flag(name, value)]


def test_every_field_of_the_example_differs_from_its_default():
    same = [field.name for field in fields(SET) if getattr(SET, field.name) == field.default]
    assert same == ["enable_prefix_caching"]  # without which some of the others have no meaning


@pytest.mark.parametrize("config", [EngineConfig(), SET], ids=["default", "set"])
def test_every_field_is_a_flag_of_its_name(config):
    parsed = parse(*flags_of(config))
    assert parsed == config
    for field in fields(config):
        assert type(getattr(parsed, field.name)) is type(getattr(config, field.name)), field.name


def test_no_flags_give_the_defaults():
    assert parse() == EngineConfig()


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
def test_one_flag_changes_one_field(name):
    value = getattr(SET, name)
    others = {"kv_disk_dir": "cache"} if name in ("kv_disk_gib", "role") else {}  # which have no meaning by themselves
    flags = [*flag(name, value), *(word for other in others.items() for word in flag(*other))]
    assert parse(*flags) == replace(EngineConfig(), **{name: value}, **others)


def test_the_prefix_cache_can_be_turned_off():
    assert parse("--no-enable-prefix-caching") == EngineConfig(enable_prefix_caching=False)


def test_batch_is_another_name_of_max_num_seqs():
    assert parse("--batch", "5") == parse("--max-num-seqs", "5") == EngineConfig(max_num_seqs=5)


def test_policies_have_vllms_names_of_a_caches_dtype():
    assert parse("--kv-cache-dtype", "auto") == EngineConfig()
    for name in CACHE_DTYPES:
        spec = resolve(parse("--kv-cache-dtype", name).spec(), ModelShape(2, 8, 4, 64))
        assert spec.compresses == (name != "bfloat16") and spec.index == "none", name
    for name in ("float16", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4"):  # vLLM's too
        with pytest.raises(argparse.ArgumentError, match=f"'{name}' is not one of auto, bfloat16"):
            parse("--kv-cache-dtype", name)
    assert parse("--kv-cache-dtype", "bfloat16") == EngineConfig(kv="full")
    with pytest.raises(argparse.ArgumentError, match="not allowed with argument --kv"):
        parse("--kv", "full", "--kv-cache-dtype", "fp8")


@pytest.mark.parametrize("name", ["rank", "budget", "chunk", "outliers"])
def test_a_flag_for_a_policys_field_says_where_the_field_is(name):
    with pytest.raises(argparse.ArgumentError, match=f"--kv-{name} is a field of the policy: --kv turbo:{name}=64"):
        parse(f"--kv-{name}", "64")


@pytest.mark.parametrize("flag", ["--kv", "--kv-cache-dtype", "--load-format", "--dtype", "--quantization"])
def test_a_choice_that_is_not_known_is_refused_with_the_known_ones(flag):
    policies = {"--kv": "shadowkv", "--kv-cache-dtype": "turboquant_4bit"}
    known = {**policies, "--load-format": "dummy", "--dtype": "float16", "--quantization": "fp8"}[flag]
    with pytest.raises(argparse.ArgumentError, match=known):
        parse(flag, "nope")


def test_errors_list_every_value_that_cannot_be():
    bad = {
        "max_num_seqs": 0,
        "max_num_batched_tokens": -1,
        "max_cached_seqs": -2,
        "max_mamba_checkpoints": -1,
        "default_max_tokens": 0,
        "max_model_len": 0,
        "gpu_memory_utilization": 1.5,
        "host_memory_gib": -0.5,
        "kv_offload_gib": -1.0,
        "kv_disk_gib": 0.0,
        "fetch_buffer": 0.5,
        "rope_theta": 0.0,
    }
    with pytest.raises(ValueError) as error:
        EngineConfig(**bad)
    for name, value in bad.items():
        assert f"{name}={value}" in str(error.value)
        with pytest.raises(ValueError, match=f"{name}={value} must") as alone:
            EngineConfig(**{name: value})
        assert str(alone.value).count(" must ") == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"role": "decode"}, "role='decode' needs kv_disk_dir"),
        ({"role": "some"}, "role='some' is not one of both, prefill, decode"),
        ({"kv_disk_dir": ""}, "kv_disk_dir='' must not be empty"),
        ({"kv_disk_gib": 8.0}, "kv_disk_gib=8.0 has no meaning without kv_disk_dir"),
        ({"kv_disk_dir": "x", "enable_prefix_caching": False}, "no meaning"),
        ({"kv_offload_gib": 1.0, "enable_prefix_caching": False}, "no meaning"),
    ],
)
def test_settings_of_the_prefix_cache_that_cannot_be(values, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**values)


def test_a_base_of_rope_is_an_override():
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert EngineConfig().overrides == {}
    assert EngineConfig(rope_theta=4e6).overrides == EngineConfig(hf_overrides={"rope_theta": 4e6}).overrides
    assert EngineConfig(rope_theta=4e6, hf_overrides=yarn).overrides == {**yarn, "rope_theta": 4e6}
    with pytest.raises(ValueError, match=r"rope_theta=4000000\.0 is also in hf_overrides"):
        EngineConfig(rope_theta=4e6, hf_overrides={"rope_theta": 4e6})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "'{' is not JSON, such as .*: Expecting property name .* line 1 column 2"),
        ("9" * 5000, "is not JSON"),
        ("[" * 10**5, "is not JSON"),
        ("[]", r"'\[\]' is no JSON object, such as '\{\"rope_scaling\": "),
        ("null", "'null' is no JSON object"),
    ],
    ids=["cut", "digits", "deep", "list", "null"],
)
def test_overrides_are_an_object(text, said):
    with pytest.raises(argparse.ArgumentError, match=said):
        parse("--hf-overrides", text)
    with pytest.raises(ValueError, match=r"hf_overrides=\[\] must be dict or None, and is list"):
        EngineConfig(hf_overrides=[])


def test_an_unknown_quantization_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="quantization='int3' is not one of fp8"):
        EngineConfig(quantization="int3")


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), -1.0])
def test_a_fetch_buffer_is_a_finite_factor(factor):
    with pytest.raises(ValueError, match=f"fetch_buffer={factor} must be 0 or a finite number"):
        EngineConfig(fetch_buffer=factor)


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_cached_seqs": 0, "default_max_tokens": 1},
        {"max_model_len": 1},
        {"gpu_memory_utilization": 1.0, "host_memory_gib": 0.0},
    ],
    ids=str,
)
def test_values_at_the_ends_of_their_ranges_are_allowed(values):
    EngineConfig(**values)


@pytest.mark.parametrize("name", PRESETS)
def test_the_policy_is_the_preset_with_what_was_overridden(name):
    assert EngineConfig(kv=name).spec() == PRESETS[name]
    changed = EngineConfig(kv=f"{name}:rank=9,budget=100", kv_dense_below=4, prefill_error=0.5).spec()
    assert changed == PRESETS[name].changed(rank=9, budget=100, dense_below=4, prefill_error=0.5)


def test_fields_of_a_policy_can_be_given_with_its_name():
    config = parse("--kv", "turbo:chunk=8,budget=0.03,rank=64")
    assert config.spec() == PRESETS["turbo"].changed(chunk=8, budget=0.03, rank=64)
    with pytest.raises(argparse.ArgumentError, match=r"'depth'.*budget"):
        parse("--kv", "turbo:depth=8")


def test_a_spec_is_taken_as_it_is():
    spec = KVSpec(keys="low-rank", settings={"rank": 5})
    assert EngineConfig(kv=spec).spec() == spec


def test_an_unknown_preset_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'nope'.*shadowkv"):
        EngineConfig(kv="nope").spec()


def test_unknown_dtype_and_load_format_are_named_together():
    with pytest.raises(ValueError, match=r"load_format='pickle'.*dtype='nope'"):
        EngineConfig(dtype="nope", load_format="pickle")


def test_overrides_apply_to_a_policy_given_as_a_value():
    assert EngineConfig(kv=KVSpec(index="min-max"), prefill="sparse").spec().prefill == "sparse"

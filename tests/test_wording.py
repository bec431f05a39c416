"""Settings are fields in Python and flags on a command line, and numbers have their nouns in the right form."""

from __future__ import annotations

import pickle

import pytest

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import device_of
from shadowkv.wording import OutOfMemory, SettingsError, counted


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("max_num_seqs=-3 must be at least 1", "--max-num-seqs -3 must be at least 1"),
        ("rope_theta=1e-05 and rope_theta", "--rope-theta 1e-05 and --rope-theta"),
        ("model='my model' and model=\"it's\"", "--model 'my model' and --model 'it'\"'\"'s'"),
        ("prefill_error=3: rank=3, of the role of a model", "--prefill-error 3: rank=3, of the role of a model"),
        (
            "generation_config='a' has no generation_config.json",
            "--generation-config a has no generation_config.json",
        ),
        ("enable_prefix_caching=False, enforce_eager=True", "--no-enable-prefix-caching, --enforce-eager"),
        ("kv_disk_dir='a role=b' has role='decode'", "--kv-disk-dir 'a role=b' has --role decode"),
        ("max_model_len=9 is more than kv_disk_gibs", "--length 9 is more than kv_disk_gibs"),
        ("tensor_parallel_size=2 > intermediate_size=1", "--tensor-parallel-size 2 > intermediate_size=1"),
    ],
)
def test_fields_of_a_message_are_flags_on_a_command_line(message: str, flags: str) -> None:
    error = SettingsError(message, EngineConfig.names())
    assert str(error) == message
    assert error.as_flags({"max_model_len": "--length"}) == flags


def test_only_what_the_error_calls_a_setting_is_one() -> None:
    assert SettingsError("rope_theta=0 of config.json", ["device"]).as_flags({}) == "rope_theta=0 of config.json"


@pytest.mark.parametrize("kind", [SettingsError, OutOfMemory])
def test_an_error_survives_its_way_from_another_process(kind: type[SettingsError] | type[OutOfMemory]) -> None:
    error = pickle.loads(pickle.dumps(kind("kv_disk_gib=0", ["kv_disk_gib"])))
    assert (type(error), str(error), error.as_flags({})) == (kind, "kv_disk_gib=0", "--kv-disk-gib 0")


def test_python_is_told_of_fields() -> None:
    with pytest.raises(ValueError, match=r"^max_num_seqs=-3 must be at least 1$"):
        EngineConfig(max_num_seqs=-3)
    with pytest.raises(ValueError, match=r"^device='tpu' is not auto, cpu, cuda or cuda:N$"):
        device_of("tpu")
    refused = EngineConfig(kv="full", prefill_error=3.0).refused_policy(ValueError("no"))
    assert (str(refused), refused.as_flags({})) == (
        "kv='full', prefill_error=3.0: no",
        "--kv full, --prefill-error 3.0: no",
    )


def test_one_is_no_plural() -> None:
    assert [counted(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]

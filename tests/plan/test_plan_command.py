"""``python -m shadowkv.plan``: every preset gives a plan, as text and as JSON, and mistakes one line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shadowkv.kvcache.presets import PRESETS
from shadowkv.kvcache.sequences.group_layout import WINDOW_SLACK
from shadowkv.models.sources import config_file
from shadowkv.plan.__main__ import main
from shadowkv.plan.cards import parse_card
from shadowkv.plan.report import WIDTH

COMMAND = ["--model", "llama-3.1-8b", "--context", "124928", "--gpu-memory-gib", "139", "--host-memory-gib", "512"]


def run_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*COMMAND, "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, on one line."""
    return " ".join(capsys.readouterr().out.split())


def test_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "shadowkv.plan", *COMMAND, "--kv", "shadowkv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "largest batch by device memory" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_plan_that_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--kv", name)
    (plan,) = found["plans"]
    batch = plan["largest_batch"]
    assert batch * plan["device_bytes_per_sequence"] <= found["device_cache_bytes"]
    assert batch * plan["host_bytes_per_sequence"] <= 512 * 2**30
    more = batch + 1 + (batch + 5) // 4  # with segments to spare
    assert (
        more * plan["device_bytes_per_sequence"] > found["device_cache_bytes"]
        or more * plan["host_bytes_per_sequence"] > 512 * 2**30
    )
    floor = plan["floor_largest_batch"]
    assert floor["tokens_per_second"] == pytest.approx(batch / floor["step_ms"] * 1e3)
    assert floor["step_ms"] > plan["floor_batch_1"]["step_ms"] or batch == 1
    assert plan["device_gib_per_sequence"] == plan["device_bytes_per_sequence"] / 2**30


def test_full_attention_is_the_measure_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    full, paper = run_json(capsys, "--kv", "full", "shadowkv")["plans"]
    assert full["device_bytes_per_sequence"] == 2 * 124928 * 1024 * 2 * 32
    assert full["device_memory_saving"] == 1
    assert full["equivalent_bandwidth_tbs"] == pytest.approx(4.5)
    assert full["attended_tokens_per_step"] == 124928
    assert paper["device_memory_saving"] == full["device_bytes_per_sequence"] / paper["device_bytes_per_sequence"]
    assert paper["device_memory_saving"] > 6
    assert paper["equivalent_bandwidth_tbs"] > full["equivalent_bandwidth_tbs"]


@pytest.mark.parametrize(
    "model", ["gpt-oss-20b", "gemma-4-e2b", "minimax-m3", "qwen3.5-27b --mamba-ssm-cache-dtype bfloat16"]
)
def test_full_is_the_measure_whatever_the_layers_attend_to(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows are read as far as they reach. Layers with an indexer read their index keys, and recurrent states have
    their own size."""
    command = ["--context", "122880", "--gpus", "2", "--gpu-memory-gib", "1000", "--kv", "full", "fp8", "--json"]
    assert main(["--model", *model.split(), *command]) == 0
    full, fp8 = json.loads(capsys.readouterr().out)["plans"]
    assert full["equivalent_bandwidth_tbs"] == pytest.approx(4.5)
    assert full["device_memory_saving"] == 1
    assert 4.5 < fp8["equivalent_bandwidth_tbs"] < 9 and 1 < fp8["device_memory_saving"] < 2


def test_a_fetch_buffer_takes_device_memory_and_spares_the_bus(capsys: pytest.CaptureFixture[str]) -> None:
    none, some, more = (
        run_json(capsys, "--kv", "shadowkv", "--fetch-buffer", factor)["plans"][0] for factor in ("0", "2", "4")
    )
    sizes = [plan["device_bytes_per_sequence"] for plan in (none, some, more)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.05) and sizes[1] > sizes[0]
    assert none["equivalent_bandwidth_tbs"] < some["equivalent_bandwidth_tbs"] == more["equivalent_bandwidth_tbs"]


def test_step_floor_is_attention_and_the_weights_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--kv", "full")
    table = 128256 * 4096 * 2  # not read: the head is apart
    assert found["weight_bytes_read_per_step"] == found["weight_bytes"] - table
    seconds = (2 * 124928 * 1024 * 2 * 32 + found["weight_bytes_read_per_step"]) / 4.5e12
    assert found["plans"][0]["floor_batch_1"]["step_ms"] == pytest.approx(seconds * 1e3)


def test_steps_read_the_experts_that_their_tokens_are_expected_to_touch(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts of 3 x 2,048 x 768 weights, 8 a token."""
    command = ["--model", "qwen3-30b-a3b-2507", "--context", "32768", "--kv", "full", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    experts, table = 48 * 128 * 3 * 2048 * 768 * 2, 151936 * 2048 * 2
    assert found["expert_weight_bytes"] == experts
    others = found["weight_bytes"] - experts - table
    assert found["weight_bytes_read_per_step"] == pytest.approx(others + experts * 8 / 128)
    plan = found["plans"][0]
    batch = plan["largest_batch"]
    read = others + experts * (1 - (1 - 8 / 128) ** batch)
    assert plan["floor_largest_batch"]["weight_bytes"] == pytest.approx(read)
    attention = batch * 2 * 32768 * 512 * 2 * 48
    assert plan["floor_largest_batch"]["step_ms"] == pytest.approx((read + attention) / 4.5e12 * 1e3)
    for flags, inner in (([], 192), (["--enable-expert-parallel"], 768)):
        assert main([*command, "--tensor-parallel-size", "4", *flags]) == 0
        rank = json.loads(capsys.readouterr().out)
        assert rank["expert_weight_bytes"] == 48 * (128 if inner == 192 else 32) * 3 * 2048 * inner * 2
    uneven = [*command[:-1], "--tensor-parallel-size", "3", "--enable-expert-parallel"]
    assert main(uneven) == 0 and "\n         rank 0 has 43 of 128 whole\n" in capsys.readouterr().out
    assert main([*uneven, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expert_weight_bytes"] == experts / 128 * 43
    assert main(command[:-1]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("experts  128 in 48 layers, 8 a token: 54.00 GiB of the weights; ") for line in lines)


def test_quantized_experts_are_planned_as_gpus_hold_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", "qwen3-30b-a3b-2507", "--quantization", "gptq", "--context", "32768", "--kv", "full"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    numbers = 48 * 128 * 3 * 2048 * 768
    assert found["expert_weight_bytes"] == numbers / 2 + numbers / 128 * 2
    attention, table = 48 * 2048 * (2 * 4096 + 2 * 512), 151936 * 2048 * 2
    others = found["weight_bytes"] - found["expert_weight_bytes"] - 2 * table
    twice = 48 * 2048 * (4096 + 2 * 512)  # rows of queries, keys and values
    assert 0.5 * (attention + twice) < others < 0.6 * (attention + twice)  # 4 bits, scales, and some plain numbers
    assert found["weight_bytes_dequantized"] > found["weight_bytes"] + 1.4 * numbers
    for flags, inner, held in ((["8"], 96, 128), (["8", "--enable-expert-parallel"], 768, 16)):
        assert main([*command, "--json", "--tensor-parallel-size", *flags]) == 0
        rank, group = json.loads(capsys.readouterr().out), min(128, inner & -inner)  # of 96 columns there are 3 groups
        scales = 2 * inner * 2048 / 128 + 2048 * inner / group
        assert rank["expert_weight_bytes"] == 48 * held * (3 * 2048 * inner / 2 + 2 * scales)
    assert main([*command, "--dtype", "float16"]) == 0
    assert "those in int4-g128 are counted in float16: GPUs cannot multiply this form" in printed(capsys)


def test_windows_and_full_layers_of_gpt_oss(capsys: pytest.CaptureFixture[str]) -> None:
    """12 layers of each; windows have room for 128 tokens and the pages that a step goes on into. Of 20,914,757,184
    weights those of experts are in MXFP4, 17 bytes for 32 of them; sinks are in float32."""
    command = ["--model", "gpt-oss-20b", "--context", "122880", "--kv", "full", "turbo"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    in_mxfp4 = 24 * 32 * 3 * 2880 * 2880
    assert found["quantization"] == "mxfp4"
    assert found["weight_bytes"] == 2 * (20_914_757_184 - in_mxfp4 + 24 * 64) + in_mxfp4 * 17 / 32
    page = 2 * 64 * 512 * 2 * 12
    full, turbo = (plan["device_bytes_by_layer_kind"] for plan in found["plans"])
    assert full == {"full attention": 122880 // 64 * page, "a window of 128": (2 + WINDOW_SLACK) * page}
    assert turbo["a window of 128"] == full["a window of 128"]
    assert turbo["full attention"] < full["full attention"] / 4
    for plan in found["plans"]:
        assert sum(plan["device_bytes_by_layer_kind"].values()) == plan["device_bytes_per_sequence"]
    assert main(command) == 0
    text = capsys.readouterr().out
    on_one_line = " ".join(text.split())
    assert "bfloat16, mxfp4 weights" in on_one_line and "dequantized as they load, 38.96 GiB" in on_one_line
    (line,) = (line for line in text.splitlines() if line.startswith("  in layers of full attention "))
    assert line.split()[-2:] == [f"{kinds['full attention']:,}" for kinds in (full, turbo)]
    main(["--model", "qwen3-30b-a3b-2507", "--context", "32768"])
    assert "in layers of" not in capsys.readouterr().out


def test_flags_change_what_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run_json(capsys, "--kv", "full", "shadowkv")
    wider = run_json(capsys, "--kv", "full", "shadowkv:rank=512,budget=4096", "--hit-rate", "0")
    assert wider["plans"][0] == plain["plans"][0]
    before, after = plain["plans"][1], wider["plans"][1]
    assert after["spec"]["rank"] == 512
    assert after["device_bytes_per_sequence"] > before["device_bytes_per_sequence"]
    assert after["bytes_read_per_step_layer_and_sequence"]["host_values"] == 4096 * 1024 * 2
    assert run_json(capsys, "--dtype", "float32")["weight_bytes"] == 2 * plain["weight_bytes"]
    slower = run_json(capsys, "--kv", "full", "--device-bandwidth-tbs", "2")["plans"][0]
    assert slower["equivalent_bandwidth_tbs"] == pytest.approx(2)


def test_checkpoints_of_recurrent_states_leave_less_for_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them takes as much memory as half of a running sequence's states."""
    command = ["--model", "qwen3.5-27b", "--context", "8192", "--kv", "full", "--json"]
    sizes = {}
    for flags in ([], ["0"], ["64"], ["400"]):
        assert main([*command, *(["--max-mamba-checkpoints", *flags] if flags else [])]) == 0
        plan = json.loads(capsys.readouterr().out)
        sizes[plan["max_mamba_checkpoints"]] = plan["plans"][0]["largest_batch"]
    assert sizes[0] > sizes[64] > sizes[None] > sizes[400] > 0
    assert 64 < sizes[None] < 400
    assert main([*command[:-1], "--max-mamba-checkpoints", "64"]) == 0
    assert "149.6 MiB each: a sequence has 2, and checkpoints (64) are" in printed(capsys)
    assert main([*command, "--mamba-ssm-cache-dtype", "bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["largest_batch"] > sizes[None]
    drafts = ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 24}']
    assert main([*command, "--max-mamba-checkpoints", "40", *drafts]) == 0
    with_drafts = json.loads(capsys.readouterr().out)
    assert with_drafts["drafted_states"] == 24
    assert main([*command, "--max-mamba-checkpoints", "64"]) == 0
    batch = json.loads(capsys.readouterr().out)["plans"][0]["largest_batch"]
    # 24 states take as much memory as 24 more checkpoints do, and 24 rows of a step some more.
    assert batch - 1 <= with_drafts["plans"][0]["largest_batch"] <= batch
    assert main([*command[:-1], *drafts]) == 0
    assert "checkpoints (one for each sequence) and drafted tokens (24) are not counted" in printed(capsys)
    assert main([*command, "--max-mamba-checkpoints", "-1"]) == 2
    assert "--max-mamba-checkpoints -1 must be at least 0" in capsys.readouterr().err


def test_rows_of_drafted_tokens_are_counted_in_memory_but_not_in_times(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (
        run_json(capsys, "--kv", "fp8", "--context", "8192", "-sc.method=sparse", f"-sc.num_speculative_tokens={count}")
        for count in (1, 63)
    )
    (few,), (many,) = few["plans"], many["plans"]
    assert few["drafted_rows_largest_batch"] == few["largest_batch"] > many["largest_batch"]
    assert many["drafted_rows_largest_batch"] == 63 * many["largest_batch"]
    assert few["floor_batch_1"] == many["floor_batch_1"]
    (text,) = run_json(capsys, "--kv", "turbo", "-sc.method=ngram", "-sc.num_speculative_tokens=3")["plans"]
    assert text["drafted_rows_largest_batch"] == 3  # of one sequence, whatever the batch
    (own,) = run_json(capsys, "--kv", "full-speculative")["plans"]
    assert own["drafted_rows_largest_batch"] == 6 * own["largest_batch"]
    assert main([*COMMAND, "--kv", "full", "full-speculative"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "rows for drafted tokens" in line)
    assert row.split()[-2:] == ["0", str(own["drafted_rows_largest_batch"])]
    assert main([*COMMAND, "--kv", "full", "turbo"]) == 0
    assert "drafted" not in capsys.readouterr().out


def test_settings_of_recurrent_states_are_refused_for_models_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--max-mamba-checkpoints", "0", "--mamba-ssm-cache-dtype", "bfloat16"]) == 2
    flags = "--max-mamba-checkpoints 0, --mamba-ssm-cache-dtype bfloat16"
    assert capsys.readouterr().err == f"error: {flags}: no layer of this model has a recurrent state; leave it out\n"


def test_weights_in_eight_bits_leave_more_for_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    exact, low = run_json(capsys), run_json(capsys, "--quantization", "fp8")
    assert (exact["quantization"], low["quantization"]) == (None, "fp8")
    sizes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # a byte less a weight, a scale more a row
    saved = 32 * sum(rows * columns - 4 * rows for rows, columns in sizes)
    for name, sign in (("weight_bytes", -1), ("weight_bytes_read_per_step", -1), ("device_cache_bytes", 1)):
        assert low[name] == exact[name] + sign * saved
    assert low["plans"][0]["largest_batch"] > exact["plans"][0]["largest_batch"]
    assert main([*COMMAND, "--quantization", "fp8"]) == 0
    assert "hidden size 4096, bfloat16, fp8 weights context" in printed(capsys)


def test_copies_of_prompts_take_host_memory_and_staging(capsys: pytest.CaptureFixture[str]) -> None:
    plain, offload = (run_json(capsys, "--kv", "full", "turbo", *flags) for flags in ([], ["--kv-offload-gib", "64"]))
    assert offload["machine"]["kv_offload_gib"] == 64
    for before, after in zip(plain["plans"], offload["plans"], strict=True):
        assert before["largest_batch_host"] == after["largest_batch_host"]
        assert 0 <= before["largest_batch"] - after["largest_batch"] <= 1
    assert main([*COMMAND, "--kv", "turbo", "--kv-offload-gib", "64"]) == 0
    text = printed(capsys)
    assert "512 GiB, and 64 GiB for copies of cached prompts;" in text
    assert "host GiB at the largest batch 64.0 attended" in text
    assert main([*COMMAND, "--kv", "turbo", "--kv-offload-gib", "64", "--tensor-parallel-size", "2"]) == 0
    text = printed(capsys)
    assert "512 GiB, and 32 GiB for copies of cached prompts;" in text, "of the first of two ranks"


def test_text_has_a_column_per_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--kv", *PRESETS]) == 0
    head, *tables = capsys.readouterr().out.strip().split("\n\n")
    lines = [line for table in tables for line in table.splitlines()]
    assert max(map(len, [*head.splitlines(), *lines])) <= WIDTH < sum(map(len, PRESETS))
    assert [name for table in tables for name in table.splitlines()[0].split()] == list(PRESETS)
    labels = [[line[:36] for line in table.splitlines()[1:]] for table in tables]
    assert labels == [labels[0]] * len(tables), "each table has all rows"
    attended = [cell for line in lines if line.startswith("attended") for cell in line.split()[4:]]
    plans = run_json(capsys, "--kv", *PRESETS)["plans"]
    assert attended == [str(plan["attended_tokens_per_step"]) for plan in plans]
    assert [line.split()[1] for line in head.splitlines() if line.startswith("policy")] == [f"{n}:" for n in PRESETS]
    described = " ".join(head.split())
    assert all(f"policy {plan['kv']}: {plan['spec_in_words']}" in described for plan in plans)


def test_overrides_extend_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", "smollm2-135m-instruct", "--json", "--context"]
    yarn = json.dumps({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}})
    assert main([*command, "32768"]) == 2
    assert "--context 32768 is more than the 8192 positions" in capsys.readouterr().err
    assert main([*command, "32768", "--hf-overrides", yarn]) == 0
    assert main([*command, "65536", "--hf-overrides", '{"rope_theta": 4e6}']) == 0
    capsys.readouterr()
    assert main([*command, "32769", "--hf-overrides", yarn]) == 2
    assert "--context 32769 is more than the 32768 positions" in capsys.readouterr().err


def test_a_model_that_does_not_fit_has_no_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-3.1-70b", "--context", "4096"]) == 1
    assert main(["--model", "llama-3.1-70b", "--context", "4096", "--json"]) == 1
    out, err = capsys.readouterr()
    text, _, found = out.partition("{")
    assert "no limit" in text
    plan = json.loads("{" + found)["plans"][0]
    assert (plan["largest_batch"], plan["floor_largest_batch"], plan["gpus_needed"]) == (0, None, 2)
    said = "does not fit: turbo: not one sequence of 4096 tokens on 1 GPU of 139 GiB; it takes 2: "
    assert err == f"{said}--tensor-parallel-size 2\n" * 2


@pytest.mark.parametrize(("gpu", "model", "gpus"), [("h100", "llama-3.1-70b", 4), ("L4", "qwen3-8b", 2)])
def test_what_does_not_fit_fits_on_as_many_gpus_as_it_says(
    gpu: str, model: str, gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpu", gpu, "--model", model, "--context", "32k", "--kv", "full", "turbo"]
    assert main(flags) == 1
    assert f"; it takes {gpus}: --tensor-parallel-size {gpus}" in capsys.readouterr().err
    assert main([*flags, "-tp", str(gpus // 2)]) == 1
    assert main([*flags, "-tp", str(gpus)]) == 0


def test_too_little_host_memory_is_no_matter_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-3.1-8b", "--context", "128k", "--kv", "shadowkv", "--host-memory-gib", "1"]) == 1
    err = capsys.readouterr().err
    assert "1 GPU of 139 GiB with --host-memory-gib 1; it takes 7.8 GiB of host memory" in err and "tensor" not in err


def test_a_card_brings_its_memory_and_bandwidths(capsys: pytest.CaptureFixture[str]) -> None:
    def machine(*flags: str) -> dict[str, Any]:
        assert main(["--model", "llama-3.2-1b", "--context", "8k", "--json", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["machine"]
        return found

    assert machine() == machine("--gpu", "H200")
    names = "gpu_memory_gib", "device_bandwidth_tbs", "host_bandwidth_gbs"
    assert [machine()[name] for name in names] == [139, 4.5, 50.7]
    assert [machine("--gpu", "a100-80gb")[name] for name in names] == [79, 1.912, 25.35]
    assert machine("--gpu", "l40s", "--gpu-memory-gib", "40")["gpu_memory_gib"] == 40
    with pytest.raises(SystemExit):
        main(["--context", "8k", "--gpu", "voodoo2"])
    assert "'voodoo2' is not one of b200, h200," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "card"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("6000-ada", "rtx-6000-ada"),
        ("a100", "a100-80gb"),
        ("A100_40GB", "a100-40gb"),
        ("NVIDIA H100", "h100"),
    ],
)
def test_cards_by_what_people_type(typed: str, card: str) -> None:
    assert parse_card(typed) == card


@pytest.mark.parametrize("typed", ["a10", "l40", "rtx", "90", "40gb", "b20", "nvidia", ""])
def test_what_is_no_card(typed: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not one of"):
        parse_card(typed)


@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.2-3b", "mistral-nemo-12b"])
def test_families_are_planned_offline(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, "--context", "32k"]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "no-such-model", "--context", "1000"], "llama-3.1-8b"),
        (["--model", "llama-3.1-8b", "--context", "131073"], "131072"),
        (["--context", "1000", "--kv", "full", "no-such-policy"], f"known: {', '.join(PRESETS)}"),
        (["--context", "1000", "--kv", "full:rank=4"], "no meaning"),
        (["--context", "1000", "--kv", "turbo:rank=99999"], "rank=99999"),
        (
            ["--context", "1000", "--kv", "turbo:chunk=7,budget=0"],
            "chunk=7 does not divide a page of 64 tokens; use 1, 2, ",
        ),
        (["--context", "1000", "-sc.method=magic"], "method='magic' is not one of ngram, suffix, sparse, mtp"),
        (["--context", "1000", "-sc.method=sparse"], "--kv turbo selects tokens in every step"),
        (["--context", "1000", "--kv", "turbo-host", "-sc.method=suffix"], "set --fetch-buffer 0, or choose a policy"),
        (
            ["--model", "qwen3-next-80b-a3b", "--context", "1000", "--kv", "full", "-sc.method=sparse"],
            "layers with a recurrent state, which steps that draft would change; choose method suffix or ngram",
        ),
        (["--context", "0"], "--context"),
        (["--context", "1000", "--hit-rate", "1.1"], "--hit-rate"),
        (["--context", "1000", "--fetch-buffer", "0.5"], "--fetch-buffer 0.5 must"),
        (["--context", "1000", "--device-bandwidth-tbs", "nan"], "--device-bandwidth-tbs"),
        (["--context", "1000", "--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
        (["--context", "1000", "--host-memory-gib", "-1"], "--host-memory-gib"),
        (["--context", "1000", "--kv-offload-gib", "-1"], "--kv-offload-gib"),
        (["--context", "many"], "--context"),
        ([], "--context"),
        (["--context", "1000", "--dtype", "int3"], "--dtype"),
        (["--context", "1000", "--quantization", "int3"], "--quantization"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(flags)
    except SystemExit as stopped:  # argparse's own errors
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert said in err


def test_ranks_have_their_part_of_weights_heads_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    alone, cut = (run_json(capsys, "--kv", "full", "turbo", "--tensor-parallel-size", n) for n in ("1", "2"))
    assert cut["weight_bytes"] == pytest.approx(alone["weight_bytes"] / 2, rel=1e-3)  # but for the norms
    (full, turbo), (all_of_full, all_of_turbo) = cut["plans"], alone["plans"]
    assert full["device_bytes_per_sequence"] == all_of_full["device_bytes_per_sequence"] / 2
    assert turbo["spec"]["rank"] == 96 > all_of_turbo["spec"]["rank"] / 2
    assert 0.5 < turbo["device_bytes_per_sequence"] / all_of_turbo["device_bytes_per_sequence"] < 0.55
    assert turbo["largest_batch"] >= 2 * all_of_turbo["largest_batch"]


def test_replicas_are_counted_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--kv", "turbo", "--gpus", "2", "--replicas", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("GPUs     6: figures are for the first of 2 ranks") for line in lines)
    (one,) = (line for line in lines if line.startswith("largest batch  "))
    (all_of_them,) = (line for line in lines if line.startswith("largest batches of 3 replicas"))
    assert int(all_of_them.split()[-1]) == 3 * int(one.split()[-1])


PROJECTIONS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
"""Of Llama-3.1-8B: numbers in weights of its layers' projections."""


QKV = 32 * (32 + 2 * 8) * 128 * 4096
"""Numbers in the rows of queries, keys and values."""


@pytest.mark.parametrize(
    ("quantization", "words", "bits"),
    [
        ("awq", "int4-g128", 4 + 24 / 128),  # a float16 scale and a zero point in 8 bits for each group
        ("gptq", "int4-g128", 4 + 16 / 128),
        ("int4", "int4-g128", 4 + 16 / 128),
        ("nvfp4", "nvfp4", 4.5),
        ("mxfp4", "mxfp4", 4.25),
        ("fp8-block", "fp8-g128", 8.25),
        ("int8", "int8", 8),
    ],
)
def test_weights_of_a_form(quantization: str, words: str, bits: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads and tables stay as they are, queries, keys and values are there twice; what a row has alone is less than a
    thousandth."""
    plain, found = run_json(capsys), run_json(capsys, "--quantization", quantization)
    assert (plain["quantization"], found["quantization"]) == (None, words)
    saved = plain["weight_bytes"] - found["weight_bytes"]
    assert saved == pytest.approx(PROJECTIONS * (2 - bits / 8) - QKV * bits / 8, rel=1e-3)
    assert found["weight_bytes_dequantized"] == plain["weight_bytes"] and plain["weight_bytes_dequantized"] is None
    cut = run_json(capsys, "--quantization", quantization, "--tensor-parallel-size", "2")
    assert cut["weight_bytes"] == pytest.approx(found["weight_bytes"] / 2, rel=1e-3)
    main([*COMMAND, "--quantization", quantization])
    text = printed(capsys)
    assert f"bfloat16, {words} weights" in text and "dequantized as they load, 14.96 GiB" in text


@pytest.mark.parametrize(
    ("stated", "words", "kept"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4-g64", 0),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}, "int4-g128", 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.down_proj"]}, "nvfp4", 1),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 0),
    ],
)
def test_a_folder_says_how_its_weights_are_quantized(
    stated: dict[str, Any], words: str, kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No weights are read. 8-bit floats are planned with their own arithmetic."""
    config = json.loads(config_file("llama-3.1-8b").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    found = run_json(capsys, "--model", str(tmp_path))
    assert found["quantization"] == words
    plain = run_json(capsys)
    least = {0: 0.9, 1: 0.6, 4: 0.6}[kept] * PROJECTIONS * (1 if words == "fp8" else 1.4)
    assert least < plain["weight_bytes"] - found["weight_bytes"] < 1.5 * PROJECTIONS
    command = ["--model", str(tmp_path), "--context", "1024", "--quantization", "gptq"]
    assert main(command) == 2
    assert f"are in {stated['quant_method']} and are loaded as they are; leave it out" in capsys.readouterr().err


def test_ranks_of_minimax_m2_share_no_kv_head(capsys: pytest.CaptureFixture[str]) -> None:
    """Of its 8 kv heads, which are normalised together, each of 4 ranks has 2."""
    command = ["--model", "minimax-m2", "--context", "122880", "--kv", "full", "--tensor-parallel-size"]
    assert main([*command, "4", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["device_bytes_per_sequence"] == 122880 * 62 * 2 * (2 * 128) * 2
    assert main([*command, "16"]) == 2
    assert "--tensor-parallel-size 16 is more than the model's 8 kv heads" in capsys.readouterr().err


def test_a_draft_head_takes_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """For its weights, and for each sequence."""
    flags = ["--model", "glm-4.5-air", "--context", "32768", "--kv", "full", "--gpus", "8"]

    def largest(*drafts: str) -> tuple[int, int]:
        assert main([*flags, "--json", *drafts]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["plans"][0]["largest_batch"], found["weight_bytes"]

    (without, weights), (few, more) = largest(), largest("--speculative-config", '{"method": "mtp"}')
    many, _ = largest("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 60}')
    assert without > few > many
    assert 0.6 * 2**30 < more - weights < 0.7 * 2**30, "a layer, whole norms, and the whole projection"
    assert main([*flags, "--speculative-config", '{"method": "mtp"}']) == 0
    assert "drafts   up to 1 token of a sequence in a step, by a layer of the files: 0.61 GiB of the weights" in (
        capsys.readouterr().out
    )


def test_a_model_without_a_draft_head_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama-3.1-8b", "--context", "4096", "--speculative-config", '{"method": "mtp"}']
    assert main(flags) == 2
    assert "no layer that drafts tokens can be read from llama models" in capsys.readouterr().err

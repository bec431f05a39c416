"""The peer's bench counts as ours does: driven here with an engine of a few lines in vLLM's place."""

from __future__ import annotations

import json
from argparse import Namespace
from itertools import pairwise
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers
from gguf.quants import dequantize

from benchmarks.peer import bench_vllm, peer_reuse, random_gguf, vllm_server
from benchmarks.peer.peer_drive import MEASURED, SETTLING, Driver
from benchmarks.peer.peer_model import CONFIG, token_bytes, write_model
from benchmarks.prefix_cache.chat_trace import TraceShape
from benchmarks.sweeps.rows import read
from shadowkv.models.loader import load_model
from shadowkv.models.sources import config_file
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer


class Engine:
    """Answers every request with a token a step; one more request begins with each step."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        self.running: dict[str, int] = {}

    def add_request(self, name, prompt, params) -> None:
        assert all(isinstance(token, int) for token in prompt["prompt_token_ids"])
        self.waiting.append((name, params))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[SimpleNamespace]:
        if self.waiting:
            self.running.update([self.waiting.pop(0)])
        outputs = [SimpleNamespace(request_id=n, outputs=[SimpleNamespace(token_ids=[7])]) for n in self.running]
        self.running = {name: left - 1 for name, left in self.running.items() if left > 1}
        return outputs


class Keeper(Engine):
    """Finds beginnings of the latest ``kept`` prompts again, and with ``host`` memory those of all others there."""

    def __init__(self, kept: int, host: bool = False) -> None:
        super().__init__()
        self.kept, self.host, self.prompts = kept, host, []
        self.tokens = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}

    def add_request(self, name, prompt, params) -> None:
        super().add_request(name, prompt, params)
        tokens = prompt["prompt_token_ids"]
        local = max([same(tokens, one) for one in self.prompts[-self.kept :] if self.kept], default=0)
        known = max([same(tokens, one) for one in self.prompts if self.host], default=0)
        self.prompts.append(tokens)
        for source, count in zip(self.tokens, (len(tokens) - max(local, known), local, max(known - local, 0))):
            self.tokens[source] += count

    def get_metrics(self) -> list[SimpleNamespace]:
        others = [SimpleNamespace(name="vllm:prompt_tokens", labels={}, value=1)]
        name = "vllm:prompt_tokens_by_source"
        return others + [SimpleNamespace(name=name, labels={"source": s}, value=n) for s, n in self.tokens.items()]


def same(one: list[int], other: list[int]) -> int:
    """Tokens that two prompts begin with alike."""
    return next((n for n, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


TRACE = TraceShape(chats=3, turns=2, documents=2, shortest=20, longest=20, own=10, at_once=2)
TRACE_HITS = (20 + 3 * 30) / (3 * 30 + 3 * 44)
"""Of three prompts of 30 tokens the last begins like the first; second turns begin with them."""


@pytest.fixture
def driver() -> Driver:
    return Driver(Engine(), lambda tokens: tokens)


def test_rows_have_the_columns_of_our_sweeps(driver, tmp_path):
    args = Namespace(out=tmp_path, engine="serve", contexts=[50, 80], cases=[(6, 40, 5)], decode=[(3, 60)], repeats=2)
    row = {"engine": "vllm 0.26.0", "kv": "bf16", "prefill": "dense", "quantization": "fp8"}
    for args.engine in ("serve", "decode", "serve"):
        bench_vllm.measure(args, driver, row)
    assert [one["context"] for one in read(tmp_path / "prefill.csv")] == ["50", "80"]
    (case,) = read(tmp_path / "mixed.csv")
    assert float(case["wall_s"]) * float(case["output_tokens_per_s"]) == pytest.approx(30, rel=0.01)
    (batch,) = read(tmp_path / "decode.csv")
    assert float(batch["step_ms"]) * float(batch["decode_tokens_per_s"]) == pytest.approx(3000, rel=0.01)


def test_a_batch_that_never_decodes_together_has_no_figure(driver, monkeypatch):
    times = [[float(step) for step in range(first, first + SETTLING + MEASURED)] for first in (0, 1)]
    monkeypatch.setattr(driver, "run", lambda *_: (0.0, times))
    with pytest.raises(RuntimeError, match="2 x 60 never decoded together"):
        driver.decode(2, 60)


def test_answers_that_are_too_short_have_no_figure(driver):
    driver.sampling = lambda tokens: tokens - 1
    with pytest.raises(RuntimeError, match="instead of"):
        driver.run(10, [3])


def test_cases_are_written_as_requests_prompt_and_answer():
    assert bench_vllm.numbers("48x61184+512") == (48, 61184, 512)
    assert bench_vllm.numbers("16x61440") == (16, 61440)
    assert bench_vllm.decoding("autox61440") == (0, 61440)
    with pytest.raises(SystemExit):
        bench_vllm.parse(["--cases", "autox1024+256", "--out", "x"])


def test_a_batch_of_as_many_as_fit(driver, tmp_path):
    """700 blocks of 16 tokens, one of which the engine keeps, are three sequences of 3,000 tokens and ROOM."""
    cache, scheduler = SimpleNamespace(num_gpu_blocks=700, block_size=16), SimpleNamespace(max_num_seqs=32)
    driver.engine.vllm_config = SimpleNamespace(cache_config=cache, scheduler_config=scheduler)
    args = Namespace(out=tmp_path, engine="decode", decode=[(0, 3000)])
    bench_vllm.measure(args, driver, {"engine": "vllm 0.26.0", "kv": "fp8", "quantization": "gptq"})
    assert [one["batch"] for one in read(tmp_path / "decode.csv")] == ["3"]
    scheduler.max_num_seqs = 2
    assert driver.fitting(3256) == 2


def test_shapes_of_another_model_and_weights_in_few_bits(tmp_path):
    def written() -> dict:
        return json.loads((tmp_path / "config.json").read_text())

    write_model(tmp_path, config_file("qwen3-30b-a3b-2507"), "gptq")
    assert written()["architectures"] == ["Qwen3MoeForCausalLM"] and written()["num_experts"] == 128
    assert written()["quantization_config"]["group_size"] == 128
    write_model(tmp_path)
    assert written() == CONFIG
    with pytest.raises(ValueError, match="has the model_type 'gemma3_text'; llama and qwen3_moe are known"):
        write_model(tmp_path, config_file("gemma-3-27b"))


@pytest.mark.parametrize(
    ("name", "keeper", "rows"),
    [
        ("reuse", Keeper(1), {"shared": (5 / 6 * 0.8, 0), "one-by-one": (0.8, 0)}),
        ("reuse-off", Keeper(0), {"shared": (0, 0)}),
        ("restored", Keeper(2, host=True), {"restored": (0, 1)}),
        ("trace", Keeper(99), {"trace": (TRACE_HITS, 0)}),
    ],
)
def test_prompts_that_come_again(name, keeper, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_vllm, "SHAPE", peer_reuse.Shape(6, 40, 10, 4, TRACE))
    row = {"engine": "vllm 0.26.0", "kv": "bf16", "prefill": "dense", "quantization": "none"}
    for _ in range(2):
        bench_vllm.measure(Namespace(out=tmp_path, engine=name), Driver(keeper, lambda tokens: tokens), row)
    found = read(tmp_path / "reuse.csv")
    assert {(one["case"], one["reuse"], one["tokens"]) for one in found} == {
        (case, "off" if name == "reuse-off" else "on", "40") for case in rows
    }
    assert len(found) == len(rows)
    for one in found:
        device, host = rows[one["case"]]
        assert float(one["hit_rate_device"]) == pytest.approx(device, abs=1e-3)
        assert float(one["hit_rate_host"]) == pytest.approx(host, abs=1e-3)
        assert one["hit_rate_disk"] == ""
        tokens = {"shared": 24, "one-by-one": 20, "restored": 5, "trace": 3 * 2 * 4}[one["case"]]
        assert float(one["wall_s"]) * float(one["output_tokens_per_s"]) == pytest.approx(tokens, rel=0.01)
        assert 0 < float(one["ttft_p50_s"]) <= float(one["ttft_p99_s"]) <= float(one["wall_s"])


def test_counts_that_do_not_add_up_have_no_figure():
    driver = Driver(Keeper(1), lambda tokens: tokens)
    metrics = driver.engine.get_metrics()
    driver.engine.get_metrics = lambda: metrics
    with pytest.raises(RuntimeError, match="of prompts of 250 tokens"):
        peer_reuse.one_by_one(driver, peer_reuse.Shape(6, 40, 10, 4))


def test_settings_of_engines_that_reuse():
    def chosen(name, *more):
        return bench_vllm.chosen_settings(bench_vllm.parse(["--out", "x", "--engine", name, *more]))

    assert chosen("reuse")["enable_prefix_caching"] and not chosen("reuse-off")["enable_prefix_caching"]
    assert "kv_offloading_size" not in chosen("reuse", "--offload-gib", "40")
    restored = chosen("restored", "--offload-gib", "40")
    assert restored["kv_offloading_size"] == 40 and restored["kv_cache_memory_bytes"] == 2 * 61440 * 131072
    assert restored["max_model_len"] > 61440 + 512 + 128
    assert token_bytes("fp8") == 65536
    assert not chosen("serve", "--contexts", "1024")["enable_prefix_caching"]
    with pytest.raises(SystemExit):
        chosen("restored", "--offload-gib", "29")


def test_the_peers_server_is_of_the_same_model_and_tokens(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(vllm_server.os, "execve", lambda *call: started.append(call))
    monkeypatch.chdir(tmp_path)
    vllm_server.main(["--port", "8200", "--folder", str(tmp_path / "model"), "--max-num-seqs", "64"])
    ((program, command, environment),) = started
    assert command[:3] == [program, "-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(pairwise(command))
    assert flags["--model"] == flags["--tokenizer"] == str(tmp_path / "model") and flags["--port"] == "8200"
    assert flags["--load-format"] == "dummy" and command[-2:] == ["--max-num-seqs", "64"]
    assert environment["HF_HUB_OFFLINE"] == "1" and "--no-enable-prefix-caching" in command
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 32
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    ours = byte_tokenizer(CONFIG["vocab_size"], [CONFIG["eos_token_id"]])
    text = "Hello wörld\n\t☃ <300> " + "".join(map(chr, range(300)))
    assert theirs.encode(text).ids == ours.encode(text, False)
    ids = [*range(0, 128256, 7), CONFIG["eos_token_id"]]
    assert theirs.decode(ids) == ours.decode(ids)
    assert vllm_server.command(tmp_path, 1, [], tmp_path / "other").index(str(tmp_path / "other")) > 0


def tokenizer_of_letters(path):
    """A GGUF file with a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*map(chr, range(33, 123)), "ab"])
    writer.add_token_types([1] * 91)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


def test_a_random_file_is_a_hybrid_that_loads(tmp_path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 128, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_conv_kernel_dim": 4}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 4096}
    config, path = SimpleNamespace(**sizes, **heads, **linear, **dims), tmp_path / "random.gguf"
    random_gguf.write(config, tokenizer_of_letters(tmp_path / "letters.gguf"), path, seed=1)
    loaded = load_model(path)
    assert loaded.config.vocab_size == 128 and loaded.tokenizer.encode("ab", add_special_tokens=False) == [90]
    assert [bool(kind.state) for kind in loaded.config.shape.kinds] == [True, True, True, False]


@pytest.mark.parametrize("form", ["Q4_K", "Q6_K"])
def test_random_blocks_have_the_spread_of_weights(form: str) -> None:
    kind = gguf.GGMLQuantizationType[form]
    weights = dequantize(random_gguf.random_blocks(np.random.default_rng(0), 200, 1024, kind), kind)
    assert 0.5 < weights.std() * 32 < 2 and abs(weights.mean()) * 32 < 0.5

"""/tokenize, /detokenize, /version, /metrics and response_format."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from fake_engine import REPLY
from http_server import http_server
from prometheus_client.parser import text_string_to_metric_families
from test_serve_errors import error_of

from shadowkv import __version__
from shadowkv.engine.engine import EngineStats
from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.wording import SettingsError


def test_tokenize(call):
    def ask(**body):
        return call("POST", "/tokenize", json=body)

    assert ask(prompt="Hi").json() == {
        "count": 3,
        "max_model_len": 200,
        "tokens": [1, 72, 105],
        "token_strs": None,
    }
    strings = ask(prompt="Hi", add_special_tokens=False, return_token_strs=True, model="fake").json()
    assert strings["tokens"] == [72, 105] and strings["token_strs"] == ["'H'", "'i'"]
    pieces = ask(prompt="Hi", add_special_tokens=False, with_pieces=True).json()
    assert (pieces["count"], pieces["tokens"]) == (2, [{"id": 72, "piece": "H"}, {"id": 105, "piece": "i"}])
    messages = [{"role": "user", "content": "Hi"}]
    whole = "".join(map(chr, ask(messages=messages).json()["tokens"]))
    assert whole == "<user>Hi<assistant>"
    open_end = ask(messages=messages, add_generation_prompt=False).json()["tokens"]
    assert "".join(map(chr, open_end)) == "<user>Hi"
    assert ask(prompt="").json()["count"] == 1
    assert error_of(ask())["param"] == error_of(ask(prompt="a", messages=messages))["param"] == "prompt"
    assert error_of(ask(prompt="a", model="other"), 404)["code"] == "model_not_found"
    assert error_of(ask(messages=[{"role": "assistant", "content": "x"}]))["param"] == "messages"
    assert error_of(ask(prompt="a", grammar="x"))["param"] == "grammar"


def test_tokenize_as_llama_cpp_does(call):
    def ask(**body):
        return call("POST", "/tokenize", json=body)

    assert ask(content="Hi").json() == {"tokens": [72, 105]}
    assert ask(content="Hi", add_special=True).json() == {"tokens": [1, 72, 105]}
    pieces = [{"id": 72, "piece": "H"}, {"id": 105, "piece": "i"}]
    assert ask(content="Hi", with_pieces=True).json() == {"tokens": pieces}
    assert error_of(ask(content="Hi", prompt="Hi"))["param"] == "prompt"


def test_detokenize(call):
    assert call("POST", "/detokenize", json={"tokens": [72, 105]}).json() == {"prompt": "Hi", "content": "Hi"}
    assert call("POST", "/detokenize", json={"model": "fake", "tokens": [72, 105]}).json() == {"prompt": "Hi"}
    assert call("POST", "/detokenize", json={"tokens": []}).json() == {"prompt": "", "content": ""}
    for tokens in (["a"], 3, [0.5], [-1], [2**40], [2**80], ["a"] * 10_000):
        error = error_of(call("POST", "/detokenize", json={"tokens": tokens}))
        assert error["param"] == "tokens" and len(error["message"]) < 200


def test_tokenizer_info(call, engine, monkeypatch):
    info = {"eos_token": None, "bos_token": "\x01", "vocab_size": 0x110000, "tokenizer_class": "FakeTokenizer"}
    template = engine.tokenizer.chat_template
    assert call("GET", "/tokenizer_info").json() == {**info, "chat_template": template}
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert call("GET", "/tokenizer_info").json() == info


def test_head_is_get_without_a_body(url, call):
    with httpx.Client(base_url=url) as client:
        for path in ("/health", "/version", "/v1/models", "/v1/models/fake", "/tokenizer_info", "/docs", "/metrics"):
            head, got = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            if path != "/metrics":  # which counts on
                assert head.headers["content-length"] == str(len(got.content))
        assert client.head("/v1/models/other").status_code == 404
        assert client.head("/v1/completions").status_code == 405
    assert call("HEAD", "/health").content == b""


def test_version(call):
    assert call("GET", "/version").json() == {"version": __version__}


def metrics(call):
    answer = call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            name = sample.name.removeprefix("shadowkv:")
            found[(name, *labels.values())] = sample.value
    return found


def test_requests_are_counted_by_their_status(post, call):
    def counts():
        return {key[1]: value for key, value in metrics(call).items() if key[0] == "http_requests_total"}

    assert counts() == {"200": 0, "500": 0, "503": 0}
    post("completions", prompt="Hi")
    post("completions", prompt="BUSY")
    post("completions", prompt=None, grammar=3)
    call("GET", "/health")
    assert counts() == {"200": 1, "500": 0, "503": 1, "400": 1}
    assert metrics(call)["admission_rejections_total", "max_num_queued_reqs"] == 1


def test_metrics(post, call, engine):
    assert metrics(call)["prompt_tokens_total",] == 0
    post("completions", prompt=["Hi", "Ho"])
    post("completions", prompt="Hi", max_tokens=3, stream=True)
    post("completions", prompt=["HELLO", "FAIL"])
    found = metrics(call)
    assert (found["num_requests_running",], found["num_requests_waiting",]) == (0, 3)
    assert found["kv_cache_usage_perc",] == 0.25 and found["kv_cache_checkpoint_bytes",] == 4096
    assert [found["num_requests_waiting_by_reason", reason] for reason in ("capacity", "deferred")] == [2, 1]
    assert found["cache_config_info", "fake", "2.50", "500"] == 1
    assert found["kv_cache_used_bytes", "device"] == 10 and found["kv_cache_total_bytes", "host"] == 200
    fetched = [found[f"kv_{name}_total",] for name in ("chunks_selected", "chunks_fetched", "fetched_bytes")]
    assert fetched == [1000, 300, 614400]
    post("completions", prompt=["HELLO", "DIE"])
    post("completions", prompt="BUSY")
    post("completions", prompt="x" * 300)
    found = metrics(call)
    assert not {"num_requests_running", "kv_cache_used_bytes", "kv_chunks_fetched_total"} & {name for name, *_ in found}
    ended = {key[1]: value for key, value in found.items() if key[0] == "request_success_total"}
    assert ended["stop"] == 2 and ended["length"] == 1 and ended["error"] == 3 and ended["abort"] == 1
    assert found["prompt_tokens_total",] == 3 + 3 + 3 + 6 + 5 + 6 + 4
    assert found["prefix_cache_queries_total",] == found["prompt_tokens_total",]
    assert found["prefix_cache_hits_total",] == 2 * 7
    assert found["generation_tokens_total",] >= 2 * len(REPLY) + 3 + 3 + 2
    assert found["e2e_request_latency_seconds_count",] == 3
    assert found["e2e_request_latency_seconds_sum",] == pytest.approx(3 * 3.5, rel=0.01)
    for name, mean in (("time_to_first_token", 3), ("request_queue_time", 1), ("request_prefill_time", 2)):
        assert found[f"{name}_seconds_count",] == 7
        assert found[f"{name}_seconds_sum",] == pytest.approx(7 * mean, rel=0.01)
    assert found["inter_token_latency_seconds_count",] >= 2 * (len(REPLY) - 1) + 2
    assert found["process_resident_memory_bytes",] > 2**20
    engine.is_alive = True
    post("completions", prompt="Hi", echo=True, max_tokens=0)  # is computed whole, without a look at the cache
    assert metrics(call)["prompt_tokens_total",] == metrics(call)["prefix_cache_queries_total",] + 3


def test_metrics_of_requests_that_ended(post, call):
    post("completions", prompt=["Hi", "HELLO"], n=2)
    post("completions", prompt="Hi", max_tokens=3)
    post("completions", prompt="FAIL")
    found = metrics(call)
    for name, mean in (("request_decode_time", 0.5), ("request_inference_time", 2.5)):
        assert found[f"{name}_seconds_count",] == 5
        assert found[f"{name}_seconds_sum",] == pytest.approx(5 * mean, rel=0.01)
    assert found["request_time_per_output_token_seconds_count",] == 5
    per_token = 0.5 * (4 / (len(REPLY) - 1) + 1 / 2)
    assert found["request_time_per_output_token_seconds_sum",] == pytest.approx(per_token, rel=0.01)
    assert found["request_prompt_tokens_sum",] == 2 * 3 + 2 * 6 + 3
    assert found["request_generation_tokens_sum",] == 4 * len(REPLY) + 3
    assert found["request_prefill_kv_computed_tokens_sum",] == found["request_prompt_tokens_sum",] - 5 * 2
    assert (found["request_params_n_count",], found["request_params_n_sum",]) == (3, 4)
    assert (found["request_params_max_tokens_count",], found["request_params_max_tokens_sum",]) == (3, 16 + 3 + 16)
    cached, computed = (found["prompt_tokens_by_source_total", name] for name in ("local_cache_hit", "local_compute"))
    assert cached == found["prompt_tokens_cached_total",] == 2 * 6
    assert cached + computed == found["prompt_tokens_total",]
    assert found["num_preemptions_total",] == found["request_num_preemptions_sum",] == 0
    assert found["request_num_preemptions_count",] == 5


def test_metrics_may_have_vllms_names(engine):
    with http_server(build_app(engine, "fake", ServerSettings(metrics_prefix="vllm"))) as url:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).is_success
        page = httpx.get(f"{url}/metrics").text
        figures = httpx.get(f"{url}/page/stats").json()
    assert 'vllm:prompt_tokens_total{model_name="fake"} 3.0' in page and "vllm:num_requests_running{" in page
    assert "shadowkv:" not in page
    assert figures["prompt_tokens"] == 3
    with pytest.raises(SettingsError, match="metrics_prefix='x' is not one of shadowkv, vllm, llamacpp"):
        ServerSettings(metrics_prefix="x")


def test_metrics_may_be_llama_cpps(engine):
    with http_server(build_app(engine, "fake", ServerSettings(metrics_prefix="llamacpp"))) as url:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": ["Hi", "HELLO"]}).is_success
        answer = httpx.get(f"{url}/metrics")
        figures = httpx.get(f"{url}/page/stats").json()
        engine.is_alive = False
        later = httpx.get(f"{url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    found = {name.removeprefix("llamacpp:"): family.samples[0].value for name, family in families.items()}
    assert int(answer.headers["Process-Start-Time-Unix"]) > 0
    assert (found["prompt_tokens"], found["prompt_tokens_cached"], found["requests_deferred"]) == (3 + 6 - 4, 4, 3)
    assert (found["tokens_predicted"], found["n_tokens_max"]) == (2 * len(REPLY), 6 + len(REPLY))
    assert found["prompt_tokens_seconds"] == pytest.approx(5 / 4, rel=0.01)
    assert found["predicted_tokens_seconds"] == pytest.approx(2 * (len(REPLY) - 1) / 1, rel=0.01)
    assert figures["prompt_tokens"] == 9 and "llamacpp:requests_processing 0.0" in answer.text
    assert "llamacpp:tokens_predicted_total" in later and "llamacpp:requests_processing" not in later


PREFIXES = {
    "used_bytes": {"device": 10, "host": 7, "disk": 9},
    "total_bytes": {"device": 100, "host": 70, "disk": 90},
    "pinned_bytes": {"disk": 6},
    "other_files": {"disk": 13},
    "hit_tokens_total": {"device": 640, "host": 128, "disk": 64},
    "evictions_total": {"device": 2, "host": 3, "disk": 4},
    "copied_bytes_total": {"host": 4000, "disk": 3000},
    "refused_copies_total": {"host": 5, "disk": 1},
    "restored_bytes_total": {"host": 1500, "disk": 500},
    "restore_seconds_count": {"host": 6, "disk": 2},
    "restore_seconds_sum": {"host": 0.25, "disk": 0.5},
    "corrupt_files_total": {"disk": 8},
    "write_errors_total": {"disk": 11},
    "read_errors_total": {"disk": 12},
}


@pytest.mark.parametrize("tiers", [("device", "host", "disk"), ("device",), ()])
def test_metrics_of_the_prefix_cache_name_the_tiers_that_there_are(call, engine, monkeypatch, tiers):
    stats = asyncio.run(engine.stats())
    prefixes = {tier: one for tier, one in stats.prefixes.items() if tier in tiers}

    async def some(usage: bool) -> EngineStats:
        return replace(stats, prefixes=prefixes)

    monkeypatch.setattr(engine, "stats", some)
    found = {key: value for key, value in metrics(call).items() if key[0].startswith("prefix_cache_") and key[1:]}
    assert found == {
        (f"prefix_cache_{name}", tier): value
        for name, values in PREFIXES.items()
        for tier, value in values.items()
        if tier in tiers
    }


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "asked, schema",
    [
        ({"type": "text"}, None),
        (None, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}, SCHEMA),
    ],
)
def test_response_format(post, engine, asked, schema):
    assert post("chat", response_format=asked).status_code == 200
    found = engine.params[0].json_schema
    assert (found and json.loads(found)) == schema


@pytest.mark.parametrize("asked", [3, "json", {}, {"type": "regex"}, {"type": "json_schema"}, {"type": [1]}])
def test_wrong_response_format(post, asked):
    assert error_of(post("completions", response_format=asked))["param"] == "response_format"

"""Routes and fields that vLLM, SageMaker and llama.cpp have: batches of chats, probes, paths, counts in errors."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import REPLY
from http_server import http_server
from replies import events, named_events
from test_kept_responses import ask
from test_serve_errors import error_of

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.answers import ChatCompletion

BATCH = "/v1/chat/completions/batch"
HI = [{"role": "user", "content": "Hi"}]


def test_a_batch_of_chats_has_a_choice_for_each(call, engine):
    chats = [HI, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}]]
    answer = call("POST", BATCH, json={"messages": chats, "seed": 3, "logprobs": True, "top_logprobs": 1})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    ChatCompletion.model_validate(body)
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, REPLY), (1, REPLY)]
    assert engine.prompts == ["<user>Hi<assistant>", "<system>Be brief.<user>Rome?<assistant>"]
    assert body["usage"]["prompt_tokens"] == sum(map(len, engine.prompts))
    assert [params.seed for params in engine.params] == [3, 3]


def test_a_batch_may_continue_and_follow_rules(call, engine):
    chats = [[*HI, {"role": "assistant", "content": "So"}], [*HI, {"role": "assistant", "content": "Then"}]]
    assert call("POST", BATCH, json={"messages": chats, "continue_final_message": True}).is_success
    assert all(not prompt.endswith("<assistant>") for prompt in engine.prompts)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert call("POST", BATCH, json={"messages": [HI], "response_format": form}).is_success
    assert engine.params[-1].json_schema == '{"type": "object"}'


@pytest.mark.parametrize(
    "body, param",
    [
        ({"messages": HI}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [HI, []]}, "messages[1]"),
        ({"messages": [HI] * 5000}, "messages"),
        ({"messages": [HI], "n": 2}, "n"),
        ({"messages": [HI], "stream": True}, "stream"),
        ({"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [[*HI, {"role": "assistant", "content": ""}], HI], "continue_final_message": True},)
        + ("continue_final_message",),
    ],
)
def test_refusals_of_batches_name_the_field(call, engine, body, param):
    assert error_of(call("POST", BATCH, json=body), 400)["param"] == param
    assert not engine.prompts


def test_invocations_are_chats_or_completions(call, engine):
    chat = call("POST", "/invocations", json={"messages": HI, "max_tokens": 5, "a_hint": 1})
    assert (chat.json()["object"], engine.prompts[-1]) == ("chat.completion", "<user>Hi<assistant>")
    text = call("POST", "/invocations", json={"prompt": "Hi", "max_tokens": 5})
    assert (text.json()["object"], engine.prompts[-1]) == ("text_completion", "\x01Hi")
    assert call("POST", "/invocations", json={"messages": HI, "stream": True}).text.endswith("data: [DONE]\n\n")
    assert error_of(call("POST", "/invocations", json={}), 400)["param"] == "prompt"
    assert error_of(call("POST", "/invocations", json={"messages": 1}), 400)["param"] == "messages"
    assert call("POST", "/invocations", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert call("POST", "/invocations", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 400


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
def test_paths_without_their_version(call, path):
    body = {"input": "Hi"} if path == "/responses" else {"messages": HI}
    answer, known = (call("POST", url, json={**body, "seed": 1}) for url in (path, f"/v1{path}"))
    assert answer.json()["object"] == known.json()["object"] and answer.is_success
    assert call("GET", f"{path}/x/y").status_code == 404


def test_models_without_a_version_and_with_their_root(call, engine):
    (model,) = call("GET", "/models").json()["data"]
    assert (model["id"], model["root"], model["parent"]) == ("fake", engine.model_name, None)
    assert call("GET", "/models/fake").json() == model == call("GET", "/v1/models/fake").json()


def test_probes_need_no_key_and_other_paths_do(engine):
    with http_server(build_app(engine, "fake", ServerSettings(api_key=("k",)))) as url:
        assert httpx.get(f"{url}/load").json() == {"server_load": 3}
        for answer in (httpx.get(f"{url}/ping"), httpx.post(f"{url}/ping")):
            assert answer.json() == {"status": "ok"}
        for method, path in (("GET", "/models"), ("POST", "/chat/completions"), ("POST", "/invocations")):
            assert httpx.request(method, f"{url}{path}").status_code == 401
        engine.is_alive = False
        assert httpx.get(f"{url}/ping").status_code == 503
        assert error_of(httpx.get(f"{url}/load"), 503)["code"] == "engine_dead"


def test_a_prompt_that_is_too_long_says_how_long(post, engine):
    for endpoint, text in (("chat", {"messages": [{"role": "user", "content": "a" * 250}]}), ("completions", {})):
        error = error_of(post(endpoint, **({"prompt": "a" * 250} if endpoint == "completions" else text)), 400)
        assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
        assert error["n_ctx"] == engine.max_model_len < error["n_prompt_tokens"]
    assert "n_ctx" not in error_of(post("chat", temperature=-1), 400)


def test_a_conversation_goes_on_by_another_name_of_the_model(engine, client_of):
    send = client_of(engine, served_model_name=("fake", "other"))
    first = ask(send, model="other").json()
    assert ask(send, "Well?", model="other", previous_response_id=first["id"]).status_code == 200


def test_the_tokens_of_a_conversation_are_counted(call, engine):
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert call("POST", path, json={"messages": HI}).json() == {"input_tokens": len("<user>Hi<assistant>")}
    assert error_of(call("POST", path, json={"messages": [], "model": "fake"}), 400)["param"] == "messages"
    assert error_of(call("POST", path, json={"messages": HI, "model": "x"}), 404)["param"] == "model"
    assert error_of(call("POST", path, json={"messages": HI, "chat_template": "x"}), 400)["param"] == "chat_template"
    assert not engine.prompts


def test_answers_say_how_long_they_took(post):
    for endpoint in ("chat", "completions"):
        timings = post(endpoint, max_tokens=3).json()["timings"]
        assert (timings["cache_n"], timings["predicted_n"]) == (2, 3) and timings["prompt_ms"] == pytest.approx(2000)
        assert timings["predicted_per_second"] == pytest.approx(2000 / timings["predicted_ms"])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_says_how_long_it_took(post, endpoint, with_usage):
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    *parts, last = events(post(endpoint, stream=True, **options))
    assert last["timings"]["predicted_n"] == len(REPLY) and not any("timings" in part for part in parts)
    *parts, last = events(post(endpoint, stream=True, timings_per_token=True, **options))
    written = [part["timings"]["predicted_n"] for part in parts if "timings" in part]
    assert written[0] == 1 and written == sorted(written) and last["timings"]["predicted_n"] == len(REPLY)


def test_a_response_says_how_long_it_took(call):
    for asked, timed in ((True, {"response.output_text.delta", "response.completed"}), (False, set())):
        body = {"input": "Hi", "stream": True, "timings_per_token": asked}
        told = named_events(call("POST", "/v1/responses", json=body))
        assert {event["type"] for event in told if "timings" in event} == timed


def test_a_prompt_that_another_server_has_made_of_messages(post, engine):
    params = {"prompt_token_ids": [72, 105], "a_field_of_another_connector": 1}
    answer = post("chat", kv_transfer_params=params, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == [72, 105] and engine.prompts == ["Hi"]
    for ids in ([], [0x110000], [72] * 300):
        error = error_of(post("chat", kv_transfer_params={"prompt_token_ids": ids}), 400)
        assert error["param"].startswith("kv_transfer_params")


def test_load_is_reported_to_a_balancer(call):
    body = {"messages": HI}
    for kind, told in (
        ("TEXT", "TEXT named_metrics.num_requests_running=0, named_metrics.num_requests_waiting=3"),
        ("json", 'JSON {"named_metrics": {"num_requests_running": 0, "num_requests_waiting": 3}}'),
        ("xml", None),
    ):
        answer = call("POST", "/v1/chat/completions", json=body, headers={"Endpoint-Load-Metrics-Format": kind})
        assert answer.is_success and answer.headers.get("endpoint-load-metrics") == told
    assert "endpoint-load-metrics" not in call("POST", "/v1/chat/completions", json=body).headers


@pytest.mark.parametrize(
    "origin, is_local",
    [
        *(("http://localhost", True), ("https://localhost:8080", True), ("http://127.0.0.1:3000", True)),
        *(("http://[::1]:3000", True), ("http://[::1]", True), ("http://notlocalhost", False)),
        *(("http://localhost.evil.com", False), ("http://127x0.0.1", False), ("http://x.com?http://localhost", False)),
    ],
)
def test_pages_of_this_machine_may_be_allowed(engine, origin, is_local):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with http_server(build_app(engine, "fake", ServerSettings(allowed_origins=("localhost",)))) as url:
        answer = httpx.options(f"{url}/v1/chat/completions", headers=asked)
    assert answer.headers.get("access-control-allow-origin") == (origin if is_local else None)


@pytest.mark.parametrize(
    "body, code",
    [
        ({"seed": 2**63}, "less_than_equal"),
        ({"seed": -(2**63) - 1}, "greater_than_equal"),
        ({"max_tokens": "many"}, "int_type"),
        ({"messages": None}, "missing"),
        ({"suffix": "x"}, None),
        ({"best_of": 2}, None),
    ],
)
def test_the_code_of_a_refusal_says_what_is_wrong(post, body, code):
    assert error_of(post("chat", **body), 400)["code"] == code


@pytest.mark.parametrize("stream", [False, True])
def test_a_verbose_answer_has_the_prompt(post, stream):
    answer = post("chat", verbose=True, stream=stream)
    assert (events(answer)[0] if stream else answer.json())["__verbose"] == {"prompt": "<user>Hi<assistant>"}
    assert "__verbose" not in post("chat").json()


def test_a_server_without_a_page(engine):
    with http_server(build_app(engine, "fake", ServerSettings(ui=False, api_key=("k",)))) as url:
        assert httpx.get(url).status_code == 401
        for path in ("/", "/page/stats", "/page.js"):
            assert httpx.get(f"{url}{path}", headers={"Authorization": "Bearer k"}).status_code == 404
        assert httpx.get(f"{url}/health").is_success


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_what_the_model_reads_and_writes(call, stream):
    body = {"input": "Hi", "max_output_tokens": 3, "enable_response_messages": True, "stream": stream}
    answer = call("POST", "/v1/responses", json=body)
    told = named_events(answer)[-1]["response"] if stream else answer.json()
    for name, text in (("input_messages", "<user>Hi<assistant>"), ("output_messages", REPLY[:3])):
        assert told[name] == [{"type": "raw_message_tokens", "message": text, "tokens": [*map(ord, text)]}]
    assert "input_messages" not in call("POST", "/v1/responses", json={"input": "Hi"}).json()


def test_llama_cpps_name_for_the_length_of_an_answer(post, engine):
    for endpoint in ("chat", "completions"):
        assert post(endpoint, n_predict=2).json()["usage"]["completion_tokens"] == 2
        assert post(endpoint, n_predict=-1, max_tokens=3).json()["usage"]["completion_tokens"] == 3
        assert error_of(post(endpoint, n_predict=2, max_tokens=3))["param"] == "n_predict"
        assert error_of(post(endpoint, n_predict=-2))["param"] == "n_predict"
    assert error_of(post("chat", n_predict=2, max_completion_tokens=3))["param"] == "max_tokens"

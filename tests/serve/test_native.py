"""SGLang's ``/generate``, and llama.cpp's ``/completion``, ``/props`` and ``/slots``."""

from __future__ import annotations

import itertools
import json

import httpx
import pytest
from fake_engine import REPLY
from http_server import http_server
from replies import events
from test_serve_errors import error_of

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings

LONG = "a" * 250

MANY = ["".join(map(chr, range(start, start + 100))) for start in range(200, 1400, 100)]
"""Texts of more tokens than may be biased."""


def test_a_text_is_generated(call, engine):
    sampling = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 7, "stop": ["z"], "sampling_seed": 2}
    answer = call("POST", "/generate", json={"text": "Hi", "sampling_params": sampling, "rid": "mine"}).json()
    about = {"id": "mine", "prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2}
    end = {"type": "length", "length": 3}
    ids = [ord(letter) for letter in REPLY[:3]]
    assert answer == {"text": REPLY[:3], "output_ids": ids, "meta_info": {**about, "finish_reason": end}}
    (params,) = engine.params
    assert (params.temperature, params.top_k, params.stop, params.seed) == (0.5, 7, ("z",), 2)


def test_a_text_ends_by_itself(call, engine):
    answer = call("POST", "/generate", json={"input_ids": [72, 105]}).json()
    assert engine.prompts == ["Hi"] and engine.params[0].max_tokens == 128
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord(REPLY[-1])}


@pytest.mark.parametrize(
    "body, count",
    [({"text": "Hi", "sampling_params": {"n": 2}}, 2), ({"text": ["Hi"]}, 1), ({"input_ids": [[72], [73]]}, 2)],
)
def test_several_texts_are_a_list(call, body, count):
    assert [one["text"] for one in call("POST", "/generate", json=body).json()] == [REPLY] * count


def test_rules_and_scores_of_a_text(call, engine):
    body = {"text": "Hi", "sampling_params": {"regex": "a+", "max_new_tokens": 2}, "return_logprob": True}
    about = call("POST", "/generate", json={**body, "top_logprobs_num": 2}).json()["meta_info"]
    assert engine.params[0].grammar is not None and engine.params[0].logprobs == 2
    assert about["output_token_logprobs"][0] == [-0.5, ord("H"), None]
    assert [token for _, token, _ in about["output_top_logprobs"][0]] == [72, 73]


def test_events_have_all_of_a_text_until_then(call):
    answer = call("POST", "/generate", json={"text": "Hi", "stream": True})
    chunks = events(answer)
    assert chunks[-1]["text"] == REPLY and chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert all(after["text"].startswith(before["text"]) for before, after in itertools.pairwise(chunks))


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/generate", {}, "text"),
        ("/generate", {"text": "Hi", "input_ids": [1]}, "text"),
        ("/generate", {"text": ["Hi", 1]}, "text"),
        ("/generate", {"text": [72]}, "text"),
        ("/generate", {"input_ids": "Hi"}, "input_ids"),
        ("/generate", {"input_ids": [[1], "Hi"]}, "input_ids"),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ("/generate", {"text": "Hi", "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ("/completion", {"prompt": "Hi", "n_predict": -3}, "n_predict"),
        ("/completion", {"prompt": {"prompt_string": "Hi", "multimodal_data": ["x"]}}, "prompt"),
        ("/completion", {"prompt": {"prompt_string": ["Hi", "you"]}}, "prompt"),
        ("/completion", {"prompt": [{"prompt": "Hi"}]}, "prompt"),
        ("/completion", {"prompt": "Hi", "logit_bias": [["a", "b"]]}, "logit_bias"),
        ("/completion", {"prompt": "Hi", "logit_bias": [["a" * 8193, 1]]}, "logit_bias"),
        ("/completion", {"prompt": "Hi", "logit_bias": "a"}, "logit_bias"),
        ("/completion", {"prompt": "Hi", "logit_bias": [[text, 1] for text in MANY]}, "logit_bias"),
        ("/completion", {"prompt": "Hi", "mirostat": 2}, "mirostat"),
    ],
)
def test_refusals_name_the_parameter(call, engine, path, body, param):
    assert error_of(call("POST", path, json=body), 400)["param"] == param
    assert not engine.prompts


def test_a_completion_says_how_it_came_about(call, engine):
    body = {"prompt": "Hi", "n_predict": 3, "seed": 4, "return_tokens": True, "logit_bias": [[72, 1.5], [73, False]]}
    answer = call("POST", "/completion", json={**body, "n_probs": 1}).json()
    assert (answer["content"], answer["stop_type"], answer["truncated"]) == (REPLY[:3], "limit", False)
    assert answer["tokens"] == [ord(letter) for letter in REPLY[:3]]
    assert answer["generation_settings"]["seed"] == 4 and answer["generation_settings"]["n_predict"] == 3
    assert engine.params[0].logit_bias == {72: 1.5, 73: -100}
    timings = answer["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (2, 1, 3)
    assert answer["completion_probabilities"][0]["top_logprobs"][0]["id"] == 72


@pytest.mark.parametrize("biases", [[["ab", 2], [97, 1], ["c", False]], {"ab": 2, "97": 1, "c": False}])
def test_a_bias_is_of_a_token_or_of_a_texts_tokens(call, engine, biases):
    assert call("POST", "/completions", json={"prompt": "Hi", "logit_bias": biases}).is_success
    assert engine.params[0].logit_bias == {97: 2, 98: 2, 99: -100}


def test_an_ignored_end_is_among_the_biases(call, engine):
    engine.tokenizer.eos_token_ids = {3, 2}
    answer = call("POST", "/completion", json={"prompt": "Hi", "n_predict": 2, "ignore_eos": True}).json()
    assert answer["generation_settings"]["logit_bias"] == [{"token": 2, "bias": None}, {"token": 3, "bias": None}]


def test_events_with_probabilities_have_one_token(call):
    answer = call("POST", "/completion", json={"prompt": "Hi", "n_probs": 2, "stream": True})
    *parts, last = (json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line)
    scores = [part["completion_probabilities"] for part in parts]
    assert [one["id"] for (one,) in scores] == [ord(letter) for letter in REPLY]
    assert "".join(part["content"] for part in parts) == REPLY and "completion_probabilities" not in last


def test_errors_of_llama_cpps_paths_have_its_types(engine):
    app = build_app(engine, "fake", ServerSettings(api_key=("k",)))
    with http_server(app) as url:
        key = {"Authorization": "Bearer k"}
        for status, kind, answer in (
            (401, "authentication_error", httpx.post(f"{url}/completions", json={"prompt": "Hi"})),
            (400, "invalid_request_error", httpx.post(f"{url}/completion", json={}, headers=key)),
            (404, "not_found_error", httpx.post(f"{url}/completion", json={"prompt": "", "model": "x"}, headers=key)),
            (400, "exceed_context_size_error", httpx.post(f"{url}/completion", json={"prompt": LONG}, headers=key)),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)


def test_a_completion_without_a_length_has_the_servers_default(call, engine):
    call("POST", "/completion", json={"prompt": "Hi"})
    assert engine.params[0].max_tokens is None


def test_prompts_that_are_objects_and_chosen_fields(call, engine):
    body = {"prompt": [{"prompt_string": "Hi"}, [72]], "response_fields": ["content", "generation_settings/stream"]}
    answers = call("POST", "/completion", json=body).json()
    assert answers == [{"content": REPLY, "generation_settings/stream": False}] * 2
    assert engine.prompts == ["\x01Hi", "H"]


def test_texts_among_token_ids_are_one_prompt(call, engine):
    answers = call("POST", "/completion", json={"prompt": [[72, 105], ["a", 72, 105, "b", 33], "c"]}).json()
    assert len(answers) == 3 and engine.prompts == ["Hi", "\x01aHib!", "\x01c"]
    assert call("POST", "/completion", json={"prompt": [72, "b"]}).json()["content"] == REPLY
    assert engine.prompts[-1] == "Hb"
    for prompt in ([72, "b" * 300], [72, 10**9, "b"], [72, None, "b"], [[72], 5], [["a"]], 5, []):
        refused = call("POST", "/completion", json={"prompt": prompt})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt"), prompt


def test_a_streamed_completion_ends_with_its_figures(call):
    answer = call("POST", "/completion", json={"prompt": "Hi", "stream": True, "timings_per_token": True})
    *parts, last = (json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line)
    assert "".join(part["content"] for part in parts) == REPLY
    assert not any(part["stop"] for part in parts) and all("timings" in part for part in parts)
    assert last["stop"] and last["content"] == "" and last["timings"]["predicted_n"] == len(REPLY)


def test_what_a_server_says_of_itself(call, engine):
    props = call("GET", "/props").json()
    assert props["total_slots"] == engine.max_num_seqs and props["model_path"] == "/models/fake.gguf"
    assert props["default_generation_settings"]["n_ctx"] == engine.max_model_len
    engine.running = {"a"}
    assert [slot["is_processing"] for slot in call("GET", "/slots").json()] == [True, False, False, False]


def test_slots_and_metrics_can_be_turned_off(engine):
    with http_server(build_app(engine, "fake", ServerSettings(slots=False, metrics=False))) as url:
        for path, kind in (("/slots", "not_supported_error"), ("/metrics", "server_error")):
            answer = httpx.get(f"{url}{path}")
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (501, kind)
            assert error["message"] == f"this server was started with --no-{path[1:]}"
        assert httpx.get(f"{url}/health").status_code == 200


def test_the_prompt_of_a_conversation(call, engine):
    messages = [{"role": "user", "content": "Hi"}]
    assert call("POST", "/apply-template", json={"messages": messages}).json() == {"prompt": "<user>Hi<assistant>"}
    assert error_of(call("POST", "/apply-template", json={"messages": []}), 400)["param"] == "messages"
    assert not engine.prompts

"""What ``/openapi.json`` says: answers are as it has them, and bodies are taken or refused as it has them."""

from __future__ import annotations

import pytest
from app_client import AppClient
from fake_engine import FakeEngine
from pydantic import BaseModel

from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.prefix_cache.protocol import Saved
from shadowkv.serve.anthropic.answers import MessagesAnswer, MessagesError, TokenCount
from shadowkv.serve.batch import file_routes, message_routes, routes
from shadowkv.serve.bodies.api_error import LLAMA_PATHS
from shadowkv.serve.bodies.parameters import IGNORED, NEUTRAL, RANGES
from shadowkv.serve.http import status_routes
from shadowkv.serve.http.routing import Error
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.native import routes as native_routes
from shadowkv.serve.native.routes import LlamaError
from shadowkv.serve.openai import answers
from shadowkv.serve.page.routes import ServerStats
from shadowkv.serve.responses.answers import Response

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ANSWERS: list[tuple[str, str, dict | None, type[BaseModel]]] = [
    ("POST", "/v1/completions", {"prompt": "Hi"}, answers.Completion),
    ("POST", "/v1/completions", {"prompt": "Hi", "echo": True, "logprobs": 2, "n": 2}, answers.Completion),
    ("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2}, answers.Completion),
    ("POST", "/v1/chat/completions", CHAT, answers.ChatCompletion),
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, answers.ChatCompletion),
    ("POST", "/v1/chat/completions", {**CHAT, "verbose": True}, answers.ChatCompletion),
    ("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 3}, Response),
    ("POST", "/v1/responses", {"input": "Hi", "enable_response_messages": True}, Response),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 3}, MessagesAnswer),
    ("POST", "/v1/messages/count_tokens", CHAT, TokenCount),
    ("POST", "/v1/chat/completions/input_tokens", CHAT, answers.InputTokens),
    ("POST", "/apply-template", CHAT, native_routes.Template),
    ("POST", "/tokenize", {"prompt": "Hi", "return_token_strs": True}, answers.Tokenized),
    ("POST", "/tokenize", CHAT, answers.Tokenized),
    ("POST", "/detokenize", {"tokens": [72, 105]}, answers.Detokenized),
    ("POST", "/cache/save", {"name": "a", "prompt": "Hi"}, answers.SavedPrompt),
    ("POST", "/cache/save", {"name": "a", "prompt": [72], "cache_salt": "x"}, answers.SavedPrompt),
    ("POST", "/cache/save", {"name": "a", **CHAT}, answers.SavedPrompt),
    ("POST", "/cache/restore", {"name": "kept"}, answers.RestoredPrompt),
    ("GET", "/v1/files", None, file_routes.FileList),
    ("GET", "/v1/batches", None, routes.BatchList),
    ("GET", "/v1/messages/batches", None, message_routes.MessageBatchList),
    (
        "POST",
        "/v1/messages/batches",
        {"requests": [{"custom_id": "a", "params": {}}]},
        message_routes.MessageBatch,
    ),
    ("GET", "/tokenizer_info", None, answers.TokenizerInfo),
    ("POST", "/v1/chat/completions", {**CHAT, "return_selections": True}, answers.ChatCompletion),
    ("POST", "/v1/completions", {"prompt": "Hi", "return_selections": True}, answers.Completion),
    ("GET", "/page/stats", None, ServerStats),
    ("GET", "/v1/models", None, status_routes.ModelList),
    ("GET", "/v1/models/fake", None, status_routes.ServedModel),
    ("GET", "/health", None, status_routes.Health),
    ("GET", "/version", None, status_routes.Version),
]
ERRORS = [
    (400, "POST", "/v1/completions", {"prompt": "Hi", "n": 0}),
    (400, "POST", "/v1/completions", None),
    (404, "POST", "/v1/chat/completions", {**CHAT, "model": "other"}),
    (404, "POST", "/tokenize", {"prompt": "Hi", "model": "other"}),
    (404, "GET", "/v1/models/other", None),
    (400, "POST", "/cache/save", {"name": "../a", "prompt": "Hi"}),
    (404, "POST", "/cache/save", {"name": "a", "prompt": "Hi", "model": "other"}),
    (404, "POST", "/v1/batches", {"input_file_id": "x", "endpoint": "/v1/responses"}),
    (400, "POST", "/v1/messages/batches", {"requests": []}),
    (400, "GET", "/v1/batches?limit=x", None),
    (404, "GET", "/v1/responses/x", None),
    (404, "DELETE", "/v1/files/x", None),
    (404, "POST", "/v1/messages/batches/x/cancel", None),
    (404, "POST", "/cache/restore", {"name": "UnknownName"}),
    (409, "POST", "/cache/restore", {"name": "UnusableName"}),
    (503, "POST", "/cache/restore", {"name": "NotDone"}),
    (504, "POST", "/cache/restore", {"name": "DiskTooSlow"}),
    (413, "POST", "/detokenize", {"tokens": [1] * 1000}),
    (500, "POST", "/v1/completions", {"prompt": "BUG"}),
    (503, "POST", "/v1/completions", {"prompt": "BUSY"}),
    (400, "POST", "/v1/responses", {"input": 3}),
    (404, "POST", "/v1/responses", {"input": "Hi", "model": "other"}),
    (413, "POST", "/v1/responses", {"input": "Hi" * 1000}),
    (400, "POST", "/v1/embeddings", {"input": "Hi"}),
    (400, "POST", "/completion", {}),
    (404, "POST", "/completions", {"prompt": "Hi", "model": "other"}),
    (500, "POST", "/completion", {"prompt": "BUG"}),
    (503, "POST", "/completion", {"prompt": "BUSY"}),
    (413, "POST", "/apply-template", {"messages": "Hi" * 1000}),
    (400, "POST", "/generate", {}),
    (400, "POST", "/v1/messages", CHAT),
    (404, "POST", "/v1/messages/count_tokens", {**CHAT, "model": "other"}),
    (413, "POST", "/v1/messages", {**CHAT, "system": "Hi" * 1000}),
]


@pytest.fixture(scope="module")
def openapi():
    """Made once: it takes a second."""
    with AppClient(FakeEngine()) as client:
        yield client.app.openapi()


@pytest.fixture
def paths(openapi):
    return openapi["paths"]


def documented(paths, method, url):
    path = "/v1/models/{name}" if url.startswith("/v1/models/") else url.partition("?")[0].replace("/x", "/{id}")
    return paths[path][method.lower()]["responses"]


@pytest.mark.parametrize("method, url, body, model", ANSWERS)
def test_answers_are_as_documented(method, url, body, model, call, paths, engine):
    engine.saved["kept"] = Saved(64, 1000)
    answer = call(method, url, json=body)
    assert answer.status_code == 200
    model.model_validate(answer.json(), strict=True)
    content = documented(paths, method, url)["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith(f"/{model.__name__}")


@pytest.mark.parametrize("status, method, url, body", ERRORS)
def test_errors_are_as_documented(status, method, url, body, engine, paths):
    with AppClient(engine, ServerSettings(max_body_mib=0.001), raises=False) as client:
        answer = client(method, url, json=body)
    assert answer.status_code == status
    of_llama = LlamaError if url in LLAMA_PATHS else Error
    error = MessagesError if url.startswith("/v1/messages") else of_llama
    error.model_validate(answer.json(), strict=True)
    schema = documented(paths, method, url)[str(status)]["content"]["application/json"]["schema"]
    assert schema == {"$ref": f"#/components/schemas/{error.__name__}"}


def test_streams_and_metrics_have_their_media_types(post, call, paths):
    answer = post("completions", prompt="Hi", stream=True)
    for url in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        content = documented(paths, "POST", url)["200"]["content"]
        stream = answer.headers["content-type"].split(";")[0]
        assert {*content} == {"application/json", stream} and "schema" not in content[stream]
    assert [*documented(paths, "GET", "/metrics")["200"]["content"]] == ["text/plain"]


def test_nothing_is_documented_that_is_never_sent(paths):
    operations = [operation for path in paths.values() for operation in path.values()]
    assert len(operations) > 9 and not any("422" in operation["responses"] for operation in operations)


def test_a_method_that_the_path_has_not(call):
    answer = call("PUT", "/v1/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    Error.model_validate(answer.json(), strict=True)


def test_a_failure_that_nobody_foresaw(engine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr(engine.tokenizer, "decode", fail)
    with AppClient(engine, raises=False) as client:
        answer = client.post("/detokenize", tokens=[1])
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.headers["x-request-id"]
    Error.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize("name", sorted(RANGES.keys() - {"max_completion_tokens", "top_logprobs"}))
def test_ranges_are_those_of_sampling(name):
    field, limits = RANGES[name], {"prompt_logprobs": 0} if name == "max_tokens" else {}
    for key, outside in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
        if key not in field:
            continue
        if key != "exclusiveMinimum":
            SamplingParams(**{name: field[key]}, **limits)
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: field[key] + outside}, **limits)


def test_parameters_without_effect_are_in_the_schema(openapi, post):
    named = openapi["components"]["schemas"]
    for name, endpoint in (("ChatRequest", "chat"), ("CompletionRequest", "completions")):
        properties = named[name]["properties"]
        assert properties.keys() >= {*IGNORED, *NEUTRAL}
        for parameter in NEUTRAL:
            for value in properties[parameter].get("enum", ()):
                assert post(endpoint, **{parameter: value}).status_code == 200, parameter
        nulls = {key: None for key in properties if key not in named[name]["required"]}
        assert all(
            {"type": "null"} in value.get("anyOf", [{"type": "null"}])
            for key, value in properties.items()
            if key in nulls
        )
        assert post(endpoint, **nulls).status_code == 200

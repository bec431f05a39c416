"""The fuzzer: nothing breaks in a short run, its judge knows sense from nonsense, and a bad server is found out."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from robustness import fuzz
from robustness.fuzz import CALL, CALL_ITEM, TOOL, TYPICAL, Cases, Fuzz
from robustness.judging.judge import Judge

ROOT = str(Path(fuzz.__file__).parents[1])
JUDGE = Judge("tiny", limit=128, vocab=256)
OPENAPI = {
    "paths": {"/v1/completions": {"post": {"requestBody": {"content": {"application/json": {"schema": {
        "type": "object",
        "properties": {"prompt": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["prompt"],
    }}}}}}},
    "components": {"schemas": {}},
}  # fmt: skip
CHOICE = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ERROR = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}


def test_nothing_breaks():
    before = psutil.Process().children()
    found = fuzz.fuzz(fuzz.parse(["--bodies", "1200"]))
    assert found["ok"], found
    assert psutil.Process().children() == before, "processes that read bodies end"
    assert all(counts.get(200) and counts.get(400) for counts in found["statuses"].values())


def test_a_case_depends_on_the_seed_and_its_number_alone():
    one, other = Cases(OPENAPI, 1), Cases(OPENAPI, 1)
    assert [one.make(number) for number in (5, 6, 7)] == [other.make(number) for number in (7, 6, 5)][::-1]
    assert [one.make(number) for number in range(9)] != [Cases(OPENAPI, 2).make(number) for number in range(9)]


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_case_is_the_same_in_every_process(hash_seed):
    code = f"from robustness.fuzz import Cases; print([Cases({OPENAPI}, 1).make(number) for number in range(500)])"
    environment = {"PYTHONPATH": ROOT, "PYTHONHASHSEED": hash_seed}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str([Cases(OPENAPI, 1).make(number) for number in range(500)])


@pytest.mark.parametrize("status, content", [(200, {"choices": [CHOICE], "usage": USAGE}), (500, {"error": ERROR})])
def test_a_server_that_always_says_the_same_is_found_out(status, content):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=content))

    async def run() -> Fuzz:
        async with httpx.AsyncClient(transport=transport, base_url="http://bad") as client:
            found = Fuzz(client, Cases(OPENAPI, 0), JUDGE)
            await found.run(200, 60)
            return found

    found = asyncio.run(run())
    assert found.faults.total() > (50 if status == 200 else 199) and found.examples


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": [[1], "a"], "stream": True, "stream_options": {"include_usage": True}, "n": None}),
    ("/v1/completions", {"prompt": [1], "echo": True, "max_tokens": 0, "temperature": 2, "length_penalty": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": TYPICAL["messages"][2], "tools": [TOOL], "tool_choice": "none"}),
    ("/tokenize", {"prompt": ""}),
    ("/detokenize", {"tokens": []}),
    ("/cache/save", {"name": "a.B-1_", "prompt": "x" * 100, "cache_salt": "s", "messages": None}),
    ("/cache/save", {"name": "a", "messages": [{"role": "user", "content": "Hi"}], "parse_special": True}),
    ("/cache/restore", {"name": "..", "model": "tiny"}),
    ("/v1/completions", {"prompt": "a", "a_hint_to_others": [1]}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}, {"type": "function_call", **CALL_ITEM}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "system": "x"}),
    ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "Hi"}], "temperature": 7}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "n": 2, "regex": "a"}, "rid": "x"}),
    ("/generate", {"input_ids": [[1], [2]], "return_logprob": True, "sampling_params": {"max_new_tokens": 9}}),
    ("/completion", {"prompt": {"prompt_string": "a"}, "n_predict": -1, "logit_bias": [["a", 1], [5, False]]}),
    ("/completions", {"prompt": ["a", [1]], "n_probs": 3, "logit_bias": {"a": 1}, "stream": True, "mirostat": 0}),
    ("/apply-template", {"messages": [{"role": "user", "content": "Hi"}], "a_hint": 1}),
])  # fmt: skip
def test_sense(path, body):
    assert JUDGE.nonsense(path, "application/json", json.dumps(body).encode()) is None


@pytest.mark.parametrize("change", [
    {"n": 0}, {"n": True}, {"n": 1.0}, {"max_tokens": 0}, {"max_tokens": 10**30}, {"min_tokens": 2, "max_tokens": 1},
    {"temperature": -1}, {"temperature": "1"}, {"temperature": float("nan")}, {"user": float("inf")}, {"top_p": 0},
    {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}}, {"stop": ""}, {"stop_token_ids": [256]}, {"seed": 2**63},
    {"stop": ["x"] * 65}, {"stop": "x" * 1025}, {"stop_token_ids": [1] * 1025}, {"prompt": ["a"] * 2049},
    {"best_of": 2}, {"stream_options": {}}, {"stream": 1}, {"response_format": {"type": "json_schema"}}, {"model": "x"},
    {"stop_regex": "x"}, {"tools": [1]}, {"length_penalty": True}, {"logprobs": 21}, {"echo": None, "prompt": ""},
    {"prompt": "a" * 128}, {"prompt": []}, {"prompt": [256]}, {"prompt": [1, "a"], "n": []}, {"prompt": "\ud800"},
    {"response_format": {"type": "json_object"}, "ignore_eos": True},
])  # fmt: skip
def test_nonsense(change):
    assert JUDGE.nonsense("/v1/completions", "application/json", json.dumps({"prompt": "a", **change}).encode())


@pytest.mark.parametrize("change", [
    {"tools": [1]}, {"tools": [{"type": "function", "function": {"name": ""}}]}, {"tool_choice": "required"},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}}, {"guided_regex": "a", "guided_json": {}},
    {"continue_final_message": True}, {"guided_choice": []}, {"tools": [TOOL], "guided_regex": "a"},
    {"tools": [TOOL], "tool_choice": "any"}, {"tools": [TOOL], "response_format": {"type": "json_object"}},
    {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, {"parallel_tool_calls": 1},
    {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}]},
])  # fmt: skip
def test_nonsense_of_tools(change):
    body = {"messages": [{"role": "user", "content": "Hi"}], **change}
    assert JUDGE.nonsense("/v1/chat/completions", "application/json", json.dumps(body).encode())


@pytest.mark.parametrize("path, body", [
    ("/v1/responses", {"input": []}), ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"input": "a", "tools": [], "tool_choice": "required"}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}, "ignore_eos": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tool_choice": {"type": "any"}}),
    ("/v1/batches", {"input_file_id": "x", "endpoint": "/v1/embeddings"}),
    ("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": {}}] * 2}),
    ("/v1/responses", {"input": "a", "top_p": 0}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/messages", {"messages": [], "max_tokens": 1}), ("/v1/responses", {"input": "a", "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/chat/completions/input_tokens", {"messages": []}), ("/generate", {}), ("/generate", {"text": "a" * 10}),
    ("/generate", {"text": "a", "input_ids": [1]}), ("/generate", {"text": "a", "sampling_params": {"top_p": 0}}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}),
    ("/generate", {"text": "a", "sampling_params": {"stop_regex": "x"}}), ("/completion", {"prompt": "a" * 128}),
    ("/completion", {"prompt": "a", "n_predict": -2}), ("/completion", {"prompt": "a", "logit_bias": [["a", 101]]}),
    ("/completion", {"prompt": {"prompt_string": 1}}), ("/completions", {"prompt": "a", "n_probs": 21}),
    ("/completion", {"prompt": "a", "grammar": "x", "json_schema": {}}), ("/apply-template", {"messages": []}),
    ("/apply-template", {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "x"}),
])  # fmt: skip
def test_nonsense_of_other_apis(path, body):
    assert JUDGE.nonsense(path, "application/json", json.dumps(body).encode())


@pytest.mark.parametrize("change", [
    {"name": "../x"}, {"name": ""}, {"name": "x" * 65}, {"name": None}, {"name": "ä"}, {"prompt": None},
    {"prompt": "x"}, {"messages": [{"role": "user", "content": "Hi"}]}, {"parse_special": True},
    {"prompt": ["x" * 80] * 2}, {"prompt": "x" * 128}, {"max_tokens": 1}, {"cache_salt": ""},
])  # fmt: skip
def test_what_cannot_be_saved(change):
    body = {"name": "a", "prompt": "x" * 80, **change}
    assert JUDGE.nonsense("/cache/save", "application/json", json.dumps(body).encode())


@pytest.mark.parametrize("content_type, raw", [
    (None, b'{"prompt": "a"}'), ("text/plain", b'{"prompt": "a"}'), ("application/json", b'{"prompt": "a"'),
    ("application/json", b"[" * 100_000), ("application/json", b"[]"), ("application/json", b"\xff"),
])  # fmt: skip
def test_bodies_that_are_no_json(content_type, raw):
    assert JUDGE.nonsense("/v1/completions", content_type, raw)


@pytest.mark.parametrize("response, fine", [
    (httpx.Response(200, json={"choices": [CHOICE], "usage": USAGE}), True),
    (httpx.Response(200, json={"choices": [{**CHOICE, "finish_reason": None}], "usage": USAGE}), False),
    (httpx.Response(200, json={"choices": [CHOICE, {**CHOICE, "index": 1}], "usage": USAGE}), False),
    (httpx.Response(200, json={"choices": [CHOICE], "usage": {**USAGE, "total_tokens": 3}}), False),
    (httpx.Response(200, json={"choices": []}), False),
    (httpx.Response(200, text="all is well"), False),
    (httpx.Response(400, json={"error": ERROR}), True),
    (httpx.Response(422, json={"detail": []}), False),
    (httpx.Response(400, json={"error": {"message": "no"}}), False),
    (httpx.Response(500, json={"error": ERROR}), False),
    (httpx.Response(503, json={"error": {**ERROR, "code": "engine_dead"}}), False),
    (httpx.Response(503, json={"error": {**ERROR, "code": "queue_full"}}, headers={"Retry-After": "2"}), True),
])  # fmt: skip
def test_answers(response, fine):
    assert (JUDGE.malformed("/v1/completions", b'{"prompt": "a"}', response) is None) == fine


@pytest.mark.parametrize("content, fine", [
    (f"data: {json.dumps({'choices': [CHOICE]})}\n\ndata: [DONE]\n\n", True),
    (f"data: {json.dumps({'choices': [CHOICE]})}\n\n", False),
    (f"data: {json.dumps({'error': ERROR})}\n\ndata: [DONE]\n\n", False),
])  # fmt: skip
def test_streams(content, fine):
    response = httpx.Response(200, text=content)
    assert (JUDGE.malformed("/v1/completions", b'{"prompt": "a", "stream": true}', response) is None) == fine


LLAMA_ERROR = {**ERROR, "code": 400}
TEXT_END = {"text": "x", "meta_info": {"finish_reason": {"type": "stop"}}}
LLAMA_END = {"content": "x", "stop": True, "stop_type": "eos", "timings": {"predicted_n": 1}, "tokens_predicted": 1}


@pytest.mark.parametrize("path, status, answer, fine", [
    ("/generate", 200, TEXT_END, True), ("/generate", 200, [TEXT_END] * 2, True), ("/generate", 200, {}, False),
    ("/generate", 200, {**TEXT_END, "meta_info": {"finish_reason": None}}, False),
    ("/generate", 400, {"error": ERROR}, True), ("/generate", 400, {"error": {}}, False),
    ("/completion", 200, LLAMA_END, True), ("/completion", 200, {**LLAMA_END, "stop": False}, False),
    ("/completion", 200, {**LLAMA_END, "tokens_predicted": 2}, False), ("/apply-template", 200, {"prompt": "x"}, True),
    ("/completions", 400, {"error": LLAMA_ERROR}, True), ("/completions", 400, {"error": ERROR}, False),
    ("/completions", 400, {"error": {**LLAMA_ERROR, "type": "error"}}, False), ("/apply-template", 200, {}, False),
    ("/v1/chat/completions/input_tokens", 200, {"input_tokens": 3}, True),
    ("/v1/chat/completions/input_tokens", 200, {"input_tokens": 0}, False),
])  # fmt: skip
def test_answers_of_other_engines_apis(path, status, answer, fine):
    assert (JUDGE.malformed(path, b'{"prompt": "a"}', httpx.Response(status, json=answer)) is None) == fine


@pytest.mark.parametrize("path, content, fine", [
    ("/generate", f"data: {json.dumps(TEXT_END)}\n\ndata: [DONE]\n\n", True),
    ("/generate", f"data: {json.dumps(TEXT_END)}\n\n", False),
    ("/completion", f"data: {json.dumps(LLAMA_END)}\n\n", True),
    ("/completion", f"data: {json.dumps({**LLAMA_END, 'stop': False})}\n\n", False),
    ("/completion", f"data: {json.dumps({'error': LLAMA_ERROR})}\n\n", False),
])  # fmt: skip
def test_streams_of_other_engines_apis(path, content, fine):
    response = httpx.Response(200, text=content)
    assert (JUDGE.malformed(path, b'{"prompt": "a", "stream": true}', response) is None) == fine

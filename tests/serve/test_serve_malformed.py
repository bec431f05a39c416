"""Bodies that no well-meaning client sends: each gets a 400 in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json

import pytest
from fake_engine import REPLY
from test_serve_batch import records
from test_serve_errors import error_of

from shadowkv.serve.anthropic.protocol import MessagesRequest
from shadowkv.serve.openai.protocol import ChatRequest, CompletionRequest
from shadowkv.serve.responses.protocol import ResponsesRequest

JSON = {"Content-Type": "application/json"}
OTHERS = ("/v1/responses", "/v1/messages")
BODIES = {
    b'{"prompt": ': "valid JSON",
    b'{"prompt": "a"} x': "valid JSON",
    b'{"prompt": "a",}': "valid JSON",
    b"{'prompt': 'a'}": "valid JSON",
    b'{"prompt": "\xff"}': "byte 12 is not UTF-8",
    b"\xff\xfe{\x00}\x00": "byte 0 is not UTF-8",
    b'{"prompt": "\\ud800"}': "surrogate",
    b'{"prompt": "a", "\\udfff": 1}': "surrogate",
    b'{"prompt": "a", "temperature": NaN}': "NaN is no JSON number",
    b'{"prompt": "a", "user": 1e999}': "beyond the range",
    b'{"prompt": "a", "user": [-Infinity]}': "-Infinity is no JSON number",
    b'{"prompt": "a", "n": 1, "n": 2}': "the key 'n' occurs twice",
    b'{"prompt": "a", "response_format": {"type": "text", "type": "json_object"}}': "the key 'type' occurs twice",
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}": "too many digits",
    b'{"prompt": "a", "user": ' + b"[" * 10**5 + b"]" * 10**5 + b"}": "nested too deeply",
}
ENDS = [None, True, 0, -1, 0.5, 2**31, 2**63, -(2**64), 10**400, 1e308, -1e308, "", "x", "\0", "NaN", "x" * 10**5]
ENDS += [[], [None], [[]], {}, {"a": None}, {"": {}}, {"x" * 10**4: 1}, [1, "a"], [2**70], ["x"] * 1000]


@pytest.mark.parametrize("url", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize(("body", "reason"), BODIES.items())
def test_bodies(call, engine, url, body, reason):
    error = error_of(call("POST", url, content=body, headers=JSON))
    assert reason in error["message"] and len(error["message"]) < 200
    assert not engine.prompts


def test_harmless_oddities(call):
    for body in (b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "\\ud83d\\ude00"}', b' {"prompt": "\\u0000"}\n'):
        assert call("POST", "/v1/completions", content=body, headers=JSON).json()["choices"][0]["text"] == REPLY


GOOD = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
}


@pytest.mark.parametrize("url", GOOD)
def test_every_parameter_with_values_from_the_ends_of_every_type(call, url):
    model, good = GOOD[url]
    # What all have is tried with chats.
    names = {*model.model_fields} - ({*ChatRequest.model_fields} if url in OTHERS else set())
    for name in sorted(names | good.keys() | {"tools", "metadata", "no_such_parameter"}):
        for value in ENDS:
            answer = call("POST", url, json={**good, name: value})
            assert answer.status_code in (200, 400, 404), (name, value, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert len(error["message"]) < 1000, (name, value)


@pytest.mark.parametrize("levels", [300, 900])
def test_deep_values(call, levels):
    for deep in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels):
        schema = f'{{"type": "json_schema", "json_schema": {{"schema": {{"a": {deep}}}}}}}'
        for name, value in (("metadata", deep), ("tools", deep), ("response_format", schema), ("stop", deep)):
            body = f'{{"prompt": "a", "{name}": {value}}}'
            answer = call("POST", "/v1/completions", content=body.encode(), headers=JSON)
            assert answer.status_code in (200, 400), (name, answer.text)


@pytest.mark.parametrize("length", ["-1", "x", "9" * 5000, "1e3"])
def test_content_length(call, length):
    assert call("POST", "/v1/completions", content=b"{}", headers={**JSON, "Content-Length": length}).status_code == 413


def test_batch_lines(run, engine):
    good = json.dumps(
        {"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    ).encode()
    bad = [*BODIES, good.replace(b"good", b"\\ud800")]
    run.files.input.write_bytes(b"\n".join([*bad, good]))
    assert run(None) == 0
    found = records(run.files.output)
    assert sum(record["error"] is not None for record in found) == len(found) - 1 == len(bad)

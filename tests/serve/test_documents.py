"""Documents in messages of all three APIs: their text is in the prompt, wherever they are and however they are sent."""

from __future__ import annotations

import base64

import pytest
from fake_engine import REPLY
from page_files import pdf
from test_serve_errors import error_of

PDF = base64.b64encode(pdf("Rome is sunny")).decode()
ASK = {"type": "text", "text": "Well?"}
NOTE = base64.b64encode(b"Oslo is windy").decode()


@pytest.fixture
def send(call, engine):
    engine.max_model_len = 4_000
    return call


def chat(**file):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "file", "file": file}, ASK]}]}


def message(source, **more):
    block = {"type": "document", "source": source, **more}
    return "/v1/messages", {"messages": [{"role": "user", "content": [block, ASK]}], "max_tokens": len(REPLY)}


def response(**file):
    parts = [{"type": "input_file", **file}, {"type": "input_text", "text": "Well?"}]
    return "/v1/responses", {"input": [{"role": "user", "content": parts}]}


SENT = [
    (*chat(file_data=PDF, filename="w.pdf"), "<source>w.pdf</source>", "Rome is sunny"),
    (*chat(file_data=f"data:application/pdf;base64,{PDF}"), "<document>", "Rome is sunny"),
    (*chat(file_data=NOTE), "<document>", "Oslo is windy"),
    (
        *message({"type": "base64", "media_type": "application/pdf", "data": PDF}, title="W"),
        "<source>W<",
        "Rome is sunny",
    ),
    (*message({"type": "text", "media_type": "text/plain", "data": "Oslo"}, context="C"), "<context>C<", "Oslo"),
    (*message({"type": "content", "content": [{"type": "text", "text": "Bern"}]}), "<document>", "Bern"),
    (*response(file_data=PDF, filename="w.pdf"), "<source>w.pdf</source>", "Rome is sunny"),
]


@pytest.mark.parametrize("url, body, about, text", SENT)
def test_the_text_of_a_document_is_in_the_prompt(send, engine, url, body, about, text):
    answer = send("POST", url, json=body)
    assert answer.status_code == 200, answer.text
    (prompt,) = engine.prompts
    assert (
        about in prompt
        and f"<document_content>\n{text}\n</document_content>" in prompt
        and prompt.index(text) < prompt.index("Well?")
    )


def test_long_bodies_have_documents_too(send, engine):
    url, body = chat(file_data=PDF)
    assert send("POST", url, json={**body, "padding": "x" * 2**19}).status_code == 200
    assert "Rome is sunny" in engine.prompts[0]


def test_the_result_of_a_tool_may_be_a_document(send, engine):
    source = {"type": "text", "media_type": "text/plain", "data": "sunny"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document", "source": source}]}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    turns = [("user", "Hi"), ("assistant", [use]), ("user", [result])]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert send("POST", "/v1/messages", json={"messages": messages, "max_tokens": 9}).status_code == 200
    assert "sunny" in engine.prompts[0]


@pytest.mark.parametrize(
    "url, body, reason",
    [
        (*chat(), "file_data"),
        (*chat(file_data=PDF, file_id="file-1"), "file_data"),
        (*chat(file_data="%%%"), "base64"),
        (*chat(file_data=base64.b64encode(b"\0\1").decode()), "neither a PDF nor text"),
        (*chat(file_data=base64.b64encode(b"%PDF-1.4 broken").decode()), "PDF"),
        (*response(file_url="http://127.0.0.1/x"), "file_data"),
        (*message({"type": "url", "url": "http://127.0.0.1/x"}), "URLs"),
        (*message({"type": "base64", "media_type": "image/png", "data": PDF}), "media_type"),
    ],
)
def test_what_cannot_be_read_is_refused(send, engine, url, body, reason):
    answer = send("POST", url, json=body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    assert not engine.prompts


def test_an_unknown_file_is_not_found(send):
    url, body = chat(file_id=f"file-{'0' * 32}")
    assert error_of(send("POST", url, json=body), 404)["code"] == "file_not_found"
    url, body = chat(file_id="../../etc/passwd")
    assert error_of(send("POST", url, json=body), 404)["code"] == "file_not_found"


def test_documents_count_as_text(send, monkeypatch):
    big = base64.b64encode(b"a" * (2**23 - 10)).decode()
    url, body = chat(file_data=big)
    body["messages"][0]["content"].append({"type": "file", "file": {"file_data": big}})
    assert "characters are too many" in error_of(send("POST", url, json=body), 400)["message"]

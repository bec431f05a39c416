"""Shapes of /v1/chat/completions."""

from __future__ import annotations

from fake_engine import REPLY
from replies import events


def test_answer(post, engine):
    body = post("chat").json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    no_parts = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    nulls = dict.fromkeys(("logprobs", "stop_reason", "token_ids"))
    message = {"role": "assistant", "content": REPLY, **no_parts}
    assert body["choices"] == [
        {"index": 0, "message": message, "finish_reason": "stop", "matched_stop": ord(REPLY[-1]), **nulls}
    ]
    assert body["prompt_logprobs"] is None and body["prompt_token_ids"] is None
    assert engine.prompts == ["<user>Hi<assistant>"]
    assert body["usage"]["prompt_tokens"] == len(engine.prompts[0])


def test_content_parts_roles_and_an_answer_sent_back(post, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    earlier = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []}
    earlier["provider_specific_fields"] = {"refusal": None}
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": "Jo"}, earlier]
    assert post("chat", messages=messages).status_code == 200
    assert engine.prompts == ["<system>s<user>a\nb<assistant>c<assistant>"]


def test_both_names_of_the_limit(post, engine):
    for name in ("max_tokens", "max_completion_tokens"):
        choice = post("chat", **{name: 3}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (REPLY[:3], "length")
    assert post("chat", max_tokens=3, max_completion_tokens=4).json()["error"]["param"] == "max_tokens"


def test_logprobs(post):
    logprobs = post("chat", max_tokens=1, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    top = [{"token": "H", "logprob": -0.5, "bytes": [72]}, {"token": "I", "logprob": -1.5, "bytes": [73]}]
    assert logprobs == {"content": [{**top[0], "top_logprobs": top}], "refusal": None}
    alone = post("chat", max_tokens=1, logprobs=True).json()["choices"][0]["logprobs"]
    assert alone["content"][0]["top_logprobs"] == []
    whole = post("chat", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]).decode() for entry in whole] == list(REPLY)


def test_stream_begins_with_the_role(post):
    chunks = events(post("chat", stream=True, stream_options={"include_usage": True}))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert "".join(choice["delta"]["content"] for choice in choices) == REPLY
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == len(REPLY)


def test_streamed_logprobs(post):
    choices = [chunk["choices"][0] for chunk in events(post("chat", stream=True, logprobs=True))]
    tokens = [entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == REPLY

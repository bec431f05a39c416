"""Answers that the client has begun: vLLM's ``continue_final_message``, Anthropic's last message of the assistant."""

from __future__ import annotations

import pytest
from fake_engine import REPLY
from test_serve_errors import error_of

BEGUN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So, "}]
PREFILLS = (
    ("/v1/chat/completions", {"continue_final_message": True}),
    ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": False}),
    ("/v1/messages", {"max_tokens": len(REPLY)}),
)


@pytest.mark.parametrize("url, options", PREFILLS)
def test_the_model_goes_on_from_the_last_message(call, engine, url, options):
    answer = call("POST", url, json={"messages": BEGUN, **options}).json()
    assert engine.prompts == ["<user>Hi<assistant>So, "]
    said = answer["content"][0]["text"] if url == "/v1/messages" else answer["choices"][0]["message"]["content"]
    assert said == REPLY  # without what the client has begun


def test_a_prompt_without_the_beginning_of_an_answer(call, engine):
    assert call("POST", "/v1/chat/completions", json={"messages": BEGUN, "add_generation_prompt": False}).is_success
    assert engine.prompts == ["<user>Hi<assistant>So, "]
    tokens = call("POST", "/tokenize", json={"messages": BEGUN, "continue_final_message": True}).json()["tokens"]
    assert "".join(map(chr, tokens)) == "<user>Hi<assistant>So, "


@pytest.mark.parametrize(
    "options, param",
    [
        ({"continue_final_message": True, "messages": BEGUN[:1]}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
    ],
)
def test_what_cannot_be_continued_is_refused(call, options, param):
    answer = call("POST", "/v1/chat/completions", json={"messages": BEGUN, **options})
    assert error_of(answer, 400)["param"] == param


def test_a_real_template_ends_where_the_message_does(tokenizer):
    for text in ("So, ", "<|im_end|> ", "a\n"):
        chat = [BEGUN[0], {"role": "assistant", "content": text}]
        whole = tokenizer.decode(tokenizer.encode_chat(chat, False), skip_special_tokens=False)
        ids = tokenizer.encode_chat(chat, False, continue_final_message=True)
        begun = tokenizer.decode(ids, skip_special_tokens=False)
        assert begun.endswith(f"assistant\n{text}") and whole.startswith(begun)
        end = tokenizer.backend.token_to_id("<|im_end|>")
        assert ids.count(end) == 2  # the template's own, of system and user


def test_a_template_that_leaves_the_message_out(tokenizer):
    from shadowkv.models.tokenization.tokenizer import Tokenizer

    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    forgetful = Tokenizer(tokenizer.backend, special_tokens={}, chat_template=template)
    with pytest.raises(ValueError, match="leaves the last message out"):
        forgetful.encode_chat(BEGUN, False, continue_final_message=True)

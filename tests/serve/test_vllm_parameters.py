"""Parameters of vLLM's completions and chats: none is dropped that changes an answer, and what they do to answers."""

from __future__ import annotations

import pytest
from fake_engine import REPLY, FakeEngine
from replies import events
from test_serve_errors import error_of

from shadowkv.engine.sampling_params import RepetitionDetectionParams
from shadowkv.serve.bodies.parameters import IGNORED, NEUTRAL, UNSUPPORTED
from shadowkv.serve.openai.protocol import ChatRequest, CompletionRequest, TokenizeRequest

BOTH = (
    ("model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop")
    + (
        "response_format",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "use_beam_search",
        "top_k",
        "min_p",
    )
    + ("repetition_penalty", "watermarking", "length_penalty", "stop_token_ids", "include_stop_str_in_output")
    + ("ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens")
    + ("truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words", "echo")
    + ("add_special_tokens", "structured_outputs", "priority", "request_id", "session_id", "return_token_ids")
    + ("return_tokens_as_token_ids", "return_weight_versions", "routed_experts_prompt_start", "return_token_offsets")
    + ("mm_payload", "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs")
    + ("repetition_detection", "stream_interval", "thinking_token_budget")
)
VLLM = {
    CompletionRequest: (*BOTH, "prompt", "suffix", "prompt_embeds"),
    ChatRequest: (
        *BOTH,
        *("messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "reasoning_effort"),
        *("include_reasoning", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "documents"),
        *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text"),
    ),
    TokenizeRequest: (
        *("model", "prompt", "add_special_tokens", "return_token_strs", "messages", "add_generation_prompt", "tools"),
        *("continue_final_message", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
    ),
}
"""Fields of vLLM 0.33's requests."""

OPENAI = {
    CompletionRequest: ("best_of", "suffix"),
    ChatRequest: (
        *("audio", "function_call", "functions", "metadata", "modalities", "moderation", "prediction", "store"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "verbosity"),
        "web_search_options",
    ),
    TokenizeRequest: (),
}
"""Fields of the OpenAI API that vLLM's requests have not."""


@pytest.mark.parametrize("body", VLLM)
def test_every_parameter_of_vllm_and_openai_is_known(body):
    known = body.model_fields.keys() | IGNORED | NEUTRAL.keys() | UNSUPPORTED
    assert not {*VLLM[body], *OPENAI[body]} - known


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [5] * 129}, "logprob_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": 5000, "min_count": 2}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"min_pattern_size": 1}}, "repetition_detection.min_pattern_size"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 201}, "truncate_prompt_tokens"),
        ({"watermarking": True}, "watermarking"),
        ({"return_weight_versions": True}, "return_weight_versions"),
        ({"return_token_offsets": True}, "return_token_offsets"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_cannot_be_done_is_refused_by_name(post, engine, endpoint, body, param):
    assert error_of(post(endpoint, **body))["param"] == param
    assert not engine.prompts


@pytest.mark.parametrize(
    "body, param",
    [
        ({"verbosity": "low"}, "verbosity"),
        ({"return_prompt_text": True}, "return_prompt_text"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_what_cannot_be_done_in_a_chat_is_refused_by_name(post, engine, body, param):
    assert error_of(post("chat", **body))["param"] == param
    assert not engine.prompts


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_parameters_reach_the_engine(post, engine, endpoint):
    asked = {
        "bad_words": ["foo", "bar"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "thinking_token_budget": 7,
    }
    detection = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    logprobs = {"logprobs": True if endpoint == "chat" else 2, "logprob_token_ids": [9]}
    ignored = {"session_id": "a", "stream_interval": 5}
    body = {**asked, **logprobs, **ignored, "allowed_token_ids": [7, 8], "repetition_detection": detection}
    assert post(endpoint, **body).status_code == 200
    (params,) = engine.params
    found = {name: getattr(params, name) for name in asked}
    assert found == {**asked, "bad_words": ("foo", "bar")}
    assert (params.allowed_token_ids, params.logprob_token_ids) == ((7, 8), (9,))
    assert params.repetition_detection == RepetitionDetectionParams(4, 2, 3)


def test_token_ids_of_a_completion(post):
    ids, prompt = [ord(character) for character in REPLY], [1, *map(ord, "Hi")]
    (choice,) = post("completions", return_token_ids=True).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, prompt)
    chunks = [chunk["choices"][0] for chunk in events(post("completions", return_token_ids=True, stream=True))]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == ids
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


def test_token_ids_of_a_chat(post):
    ids, prompt = [ord(character) for character in REPLY], [*map(ord, "<user>Hi<assistant>")]
    answer = post("chat", return_token_ids=True).json()
    assert (answer["choices"][0]["token_ids"], answer["prompt_token_ids"]) == (ids, prompt)
    chunks = events(post("chat", return_token_ids=True, stream=True))
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == ids
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


def test_tokens_as_token_ids(post):
    names = [f"token_id:{ord(character)}" for character in REPLY]
    (choice,) = post("completions", logprobs=1, return_tokens_as_token_ids=True).json()["choices"]
    assert choice["logprobs"]["tokens"] == names
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[name] for name in names]
    (choice,) = post("chat", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [step["token"] for step in content] == [step["top_logprobs"][0]["token"] for step in content] == names
    assert bytes(content[0]["bytes"]).decode() == names[0]


def test_log_probabilities_of_a_prompt(post, engine):
    first, second = post("completions", prompt=["Hi", "Ho"], prompt_logprobs=2).json()["choices"]
    assert [params.prompt_logprobs for params in engine.params] == [2, 2]
    null, h, i = first["prompt_logprobs"]
    assert null is None and [*h] == [str(ord("H")), str(ord("I"))]
    assert h[str(ord("H"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "H"}
    assert i[str(ord("j"))] == {"logprob": -1.5, "rank": 2, "decoded_token": "j"}
    assert next(iter(second["prompt_logprobs"][2])) == str(ord("o"))
    answer = post("chat", prompt_logprobs=0).json()
    assert answer["prompt_logprobs"][1] == {
        str(ord("u")): {"logprob": -0.5, "rank": None, "decoded_token": "u"},
    }


def test_an_echo_has_as_many_alternatives_as_its_log_probabilities(post):
    (choice,) = post("completions", echo=True, logprobs=1, prompt_logprobs=3).json()["choices"]
    assert [top and len(top) for top in choice["logprobs"]["top_logprobs"][:3]] == [None, 1, 1]
    assert [score and len(score) for score in choice["prompt_logprobs"]] == [None, 3, 3]


def test_a_chat_echoes_the_message_that_it_continues(post):
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "An apple"}]
    body = {"messages": turns, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    engine_sees_no_end = {**body, "continue_final_message": False}  # the fake tokenizer has no open messages
    (choice,) = post("chat", **engine_sees_no_end).json()["choices"]
    assert choice["message"]["content"] == f"An apple{REPLY}"
    deltas = [chunk["choices"][0]["delta"] for chunk in events(post("chat", stream=True, **engine_sees_no_end))]
    assert "".join(delta.get("content", "") for delta in deltas) == f"An apple{REPLY}"
    assert [delta.get("role") for delta in deltas[:3]] == ["assistant", "assistant", None]
    (choice,) = post("chat", echo=True).json()["choices"]  # the last message is the user's
    assert choice["message"]["content"] == REPLY


@pytest.mark.parametrize(
    "body, seen",
    [
        ({"truncate_prompt_tokens": 3}, "hat"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "\x01wh"),
        ({"truncate_prompt_tokens": 100}, "\x01what"),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False, "truncation_side": "right"}, "wha"),
    ],
    ids=str,
)
def test_a_prompt_is_cut(post, engine, body, seen):
    (choice,) = post("completions", prompt="what", echo=True, **body).json()["choices"]
    assert engine.prompts == [seen] and choice["text"].endswith(REPLY)


def test_a_prompt_is_cut_to_what_the_context_has_room_for(post, engine):
    text = "0123456789" * 50
    assert post("completions", prompt=text, truncate_prompt_tokens=-1, max_tokens=20).status_code == 200
    assert engine.prompts == [text[-(engine.max_model_len - 20) :]]
    engine.prompts.clear()
    turns = [{"role": "user", "content": text}]
    assert post("chat", messages=turns, truncate_prompt_tokens=5).status_code == 200
    assert engine.prompts == ["tant>"]
    engine.prompts.clear()
    assert post("chat", messages=turns, truncate_prompt_tokens=-1).status_code == 200  # of the server's default length
    assert [len(prompt) for prompt in engine.prompts] == [engine.max_model_len - engine.default_max_tokens]


def test_the_ids_of_requests(post):
    assert post("completions", request_id="mine").json()["id"] == "cmpl-mine"
    assert post("chat", request_id="mine").json()["id"] == "chatcmpl-mine"


def test_what_has_ended_an_answer(post, engine):
    engine.stop_string = "."
    (choice,) = post("completions").json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ".")
    last = events(post("chat", stream=True))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", ".")


def test_thoughts_by_both_names_and_none_where_none_are_wanted(ask):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?", "reasoning": "A greeting."}]
    body = {"messages": [*turns, {"role": "user", "content": "Go on."}]}
    message = ask("/v1/chat/completions", "<think>Hm.</think>Hi.", **body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm." and message["content"] == "Hi."
    assert ask.engine.tokenizer.rendered[0][1]["reasoning_content"] == "A greeting."
    answer = ask("/v1/chat/completions", "<think>Hm.</think>Hi.", include_reasoning=False, **body)
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning"] is None and "reasoning_content" not in message and message["content"] == "Hi."


def test_thoughts_by_both_names_must_be_the_same(post):
    turn = {"role": "assistant", "content": "Yes?", "reasoning": "A", "reasoning_content": "B"}
    error = error_of(post("chat", messages=[{"role": "user", "content": "Hi"}, turn]))
    assert error["param"] == "messages[1].reasoning"


def test_roles_of_a_templates_own(post, engine):
    assert post("chat", messages=[{"role": "critic", "content": "Hi"}]).status_code == 200
    assert engine.prompts == ["<critic>Hi<assistant>"]
    assert error_of(post("chat", messages=[{"role": "", "content": "Hi"}]))["param"] == "messages[0].role"


def test_continuous_usage(post):
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for endpoint in ("chat", "completions"):
        usages = [chunk["usage"] for chunk in events(post(endpoint, n=2, **options))]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts[-1] == 2 * len(REPLY) and max(counts[:-1]) == len(REPLY) and 1 in counts
        assert counts.count(0) == (2 if endpoint == "chat" else 0)  # the chunks of the roles
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    alone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in events(post("chat", **alone)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_and_names_of_tokens_by_the_servers_flags(path, client_of):
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    send = client_of(FakeEngine(), enable_force_include_usage=True, return_tokens_as_token_ids=True).post
    chunks = events(send(path, **body, stream=True))
    assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks) and not chunks[-1]["choices"]
    logprobs = {"logprobs": True} if "chat" in path else {"logprobs": 0}
    assert f'"token_id:{ord(REPLY[0])}"' in send(path, **body, **logprobs).text
    assert "token_id:" not in send(path, **body, **logprobs, return_tokens_as_token_ids=False).text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answers_say_how_long_they_took_by_the_servers_flag(path, client_of):
    send = client_of(FakeEngine(), enable_per_request_metrics=True).post
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    metrics = send(path, **body).json()["metrics"]
    assert set(metrics) == {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms"} | {
        "mean_itl_ms",
        "tokens_per_second",
    }
    *chunks, last = events(send(path, **body, stream=True, stream_options={"include_usage": True}, max_tokens=1))
    assert not any("metrics" in chunk for chunk in chunks)
    assert "mean_itl_ms" not in last["metrics"] and last["metrics"]["queue_time_ms"] >= 0


def test_a_requests_own_template_where_it_is_trusted(client_of, tokenizer):
    engine = FakeEngine()
    engine.tokenizer, engine.max_model_len = tokenizer, 2000
    send = client_of(engine, trust_request_chat_template=True).post
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": template}
    tokens = send("/tokenize", **body).json()["tokens"]
    assert tokenizer.decode(tokens) == "[Hi]"
    assert send("/v1/chat/completions", **body, return_token_ids=True).json()["prompt_token_ids"] == tokens
    broken = send("/v1/chat/completions", **{**body, "chat_template": "{% for %}"})
    assert broken.status_code == 400 and "not valid" in broken.json()["error"]["message"]
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
    assert send("/v1/chat/completions", **{**body, "chat_template": endless}).status_code == 400


def test_a_model_that_is_told_of_tools_in_words_calls_them(post, engine):
    engine.max_model_len = 2000
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    engine.reply = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
    (choice,) = post("chat", tools=[tool], max_tokens=100).json()["choices"]
    (called,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert called["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert "weather" in engine.prompts[0]
    engine.reply = "Hello."
    (choice,) = post("chat", tools=[tool], max_tokens=100).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "Hello."

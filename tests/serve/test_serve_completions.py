"""Shapes of /v1/completions."""

from __future__ import annotations

import pytest
from fake_engine import REPLY
from replies import events

from shadowkv import __version__
from shadowkv.engine.sampling_params import choice_seed


def test_answer(post, engine):
    body = post("completions", model="fake").json()
    assert body["object"] == "text_completion" and body["model"] == "fake" and body["id"].startswith("cmpl-")
    nulls = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"))
    assert body["choices"] == [
        {"index": 0, "text": REPLY, "finish_reason": "stop", "matched_stop": ord(REPLY[-1]), **nulls}
    ]
    assert body["system_fingerprint"] == f"shadowkv-{__version__}-{engine.fingerprint}"
    assert body["service_tier"] is None and body["kv_transfer_params"] is None
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(REPLY),
        "total_tokens": 3 + len(REPLY),
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    "prompt, seen",
    [
        ("Hi", ["\x01Hi"]),
        (["Hi", "Ho"], ["\x01Hi", "\x01Ho"]),
        ([72, 105], ["Hi"]),
        ([[72, 105], [72]], ["Hi", "H"]),
    ],
)
def test_prompt_forms(post, engine, prompt, seen):
    body = post("completions", prompt=prompt, max_tokens=4).json()
    assert engine.prompts == seen
    assert [choice["index"] for choice in body["choices"]] == list(range(len(seen)))
    assert {choice["text"] for choice in body["choices"]} == {REPLY[:4]}
    assert body["usage"]["prompt_tokens"] == sum(map(len, seen))
    assert body["usage"]["completion_tokens"] == 4 * len(seen)


def test_a_seed_that_requests_have_by_default(post, engine):
    engine.sampling_defaults = {"seed": 7}
    post("completions", prompt="Hi", n=2)
    post("completions", prompt="Hi", seed=8)
    assert [params.seed for params in engine.params] == [7, choice_seed(7, 1), 8]


def test_n_choices_of_a_seeded_request_have_their_own_seeds(post, engine):
    body = post("completions", prompt=["Hi", "Ho"], n=2, seed=7).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    first, second = choice_seed(7, 0), choice_seed(7, 1)
    assert [params.seed for params in engine.params] == [first, second, first, second]
    assert engine.prompts == ["\x01Hi", "\x01Hi", "\x01Ho", "\x01Ho"]
    assert body["usage"]["prompt_tokens"] == 6


def test_parameters_reach_the_engine(post, engine):
    asked = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "seed": 3,
        "logprobs": 2,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
    }
    assert post("completions", stop="x", stop_token_ids=[9], logit_bias={"5": 1}, **asked).status_code == 200
    (params,) = engine.params
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.logit_bias == {5: 1} and params.prompt_logprobs is None
    assert (params.stop, params.stop_token_ids) == (("x",), (9,))


def test_null_and_harmless_parameters_are_as_if_left_out(post, engine):
    empty = {
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "echo": False,
        "best_of": 1,
        "suffix": None,
    }
    body = post("completions", temperature=None, n=None, user="me", metadata={"a": 1}, store=True, **empty)
    assert body.status_code == 200
    assert engine.params[0].temperature == 1


def test_logprobs(post):
    logprobs = post("completions", max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["H", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"H": -0.5, "I": -1.5}, {"e": -0.5, "f": -1.5}],
        "text_offset": [0, 1],
    }


def test_stream(post):
    response = post("completions", stream=True, n=2, logprobs=0, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == REPLY
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(REPLY) - 1) + ["stop"]
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert offsets == list(range(len(REPLY)))
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 * len(REPLY)


def test_stream_without_usage(post):
    assert all("usage" not in chunk for chunk in events(post("completions", stream=True)))


def test_without_max_tokens_there_are_sixteen_or_as_many_as_fit(post, engine):
    engine.reply = "x" * 50
    for prompt, count in (("Hi", 16), ("x" * 190, 9)):
        choice = post("completions", prompt=["a", prompt]).json()["choices"][1]
        assert (len(choice["text"]), choice["finish_reason"]) == (count, "length")
    post("chat")
    assert engine.params[-1].max_tokens is None  # a chat has as many as the server reserves


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_what_a_request_does_not_say_is_sampled_as_the_model_advises(post, engine, endpoint):
    engine.sampling_defaults = {"temperature": 0.6, "top_k": 20}
    post(endpoint, top_p=0.5, top_k=None)
    post(endpoint, temperature=1.0, top_k=0)
    found = [(params.temperature, params.top_k, params.top_p) for params in engine.params]
    assert found == [(0.6, 20, 0.5), (1.0, 0, 1.0)]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_progress_of_a_prompt_comes_where_asked_for(post, call, endpoint):
    length = 3 if endpoint == "completions" else len("<user>Hi<assistant>")
    options = {"stream_options": {"include_usage": True}, "return_selections": True}
    found = events(post(endpoint, stream=True, return_progress=True, **options))
    reading = [chunk for chunk in found if "prompt_progress" in chunk]
    assert found[: len(reading)] == reading  # before the first token
    told = [chunk["prompt_progress"] for chunk in reading]
    assert [one["processed"] for one in told][-1] == length and {one["total"] for one in told} == {length}
    assert all(one.keys() == {"total", "cache", "processed", "time_ms"} and one["cache"] == 2 for one in told)
    assert told[-1]["time_ms"] == pytest.approx(2000, rel=0.01)
    empty = {"text": ""} if endpoint == "completions" else {"delta": {}}
    assert all(
        chunk["choices"] == [{"index": 0, **empty, "logprobs": None, "finish_reason": None}] and chunk["usage"] is None
        for chunk in reading
    )
    plain = events(post(endpoint, stream=True, **options))
    assert [chunk["choices"] for chunk in found[len(reading) :]] == [chunk["choices"] for chunk in plain]
    whole = post(endpoint, return_progress=True)  # not streamed: there is nothing to tell before the end
    assert "prompt_progress" not in whole.text and whole.json()["usage"]["completion_tokens"] == len(REPLY)
    metrics = call("GET", "/metrics").text  # the first token comes once for each
    assert 'time_to_first_token_seconds_count{model_name="fake"} 3.0' in metrics

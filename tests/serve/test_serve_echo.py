"""The prompt in the answer, with its log-probabilities: what evaluation harnesses ask of /v1/completions."""

from __future__ import annotations

import pytest
from fake_engine import REPLY
from replies import events


def ask(post, **body):
    answer = post("completions", echo=True, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_text(post, engine):
    body = ask(post, prompt=["Hi", [72, 111]], max_tokens=3, n=2)
    assert [choice["text"] for choice in body["choices"]] == ["HiHel"] * 2 + ["HoHel"] * 2
    assert engine.params[0].prompt_logprobs is None
    assert body["usage"]["completion_tokens"] == 12 and body["usage"]["prompt_tokens"] == 5


def test_scores_of_token_lists_as_lm_eval_asks_and_reads_them(post, engine):
    prompts = [[72, 105], [72, 111, 33]]
    body = ask(post, prompt=prompts, max_tokens=1, logprobs=1, temperature=0, seed=1234)
    assert {(params.prompt_logprobs, params.logprobs, params.seed) for params in engine.params} == {(1, 1, 1234)}
    for choice, prompt, context in zip(sorted(body["choices"], key=lambda c: c["index"]), prompts, (1, 2), strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [*map(chr, prompt), "H"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        scores, top = (logprobs[name][context:-1] for name in ("token_logprobs", "top_logprobs"))
        assert sum(scores) == -0.5
        assert [max(one.values()) for one in top] == scores
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_nothing_is_generated(post, engine, logprobs):
    body = ask(post, prompt="Hi", max_tokens=0, logprobs=logprobs)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["total_tokens"] == 3
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert len(choice["logprobs"]["top_logprobs"][1]) == max(1, logprobs)


def test_stream(post):
    choices = [c["choices"][0] for c in events(post("completions", prompt="Hi", echo=True, stream=True, logprobs=0))]
    assert "".join(choice["text"] for choice in choices) == "Hi" + REPLY
    assert choices[0]["text"] == "HiH" and choices[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choices[1]["logprobs"]["text_offset"] == [4]  # after the start token, of one character here

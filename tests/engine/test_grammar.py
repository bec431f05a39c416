"""Output that follows a JSON schema."""

from __future__ import annotations

import json

import pytest

from shadowkv import LLM, SamplingParams
from shadowkv.engine.request import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_follow_the_schema_beside_free_ones(llm: LLM, temperature: float) -> None:
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Describe Paris in JSON."}])
    bound = SamplingParams(max_tokens=80, temperature=temperature, seed=1, json_schema=json.dumps(SCHEMA))
    free = SamplingParams(max_tokens=12, temperature=0.0)
    answer, other = llm.generate([prompt, prompt], [bound, free])
    found = json.loads(answer.text)
    assert answer.finish_reason == "stop"
    assert set(found) == {"city", "people"}
    assert isinstance(found["people"], int)
    (alone,) = llm.generate([prompt], free)
    assert other.token_ids == alone.token_ids


@pytest.mark.parametrize("schema", ["{nope", '{"type": "nope"}'])
def test_a_schema_that_cannot_be_followed_is_refused(llm: LLM, schema: str) -> None:
    with pytest.raises(RequestError, match="schema") as caught:
        llm.engine.validate([5], SamplingParams(json_schema=schema))
    assert caught.value.param == "response_format"


def test_a_schema_and_ignore_eos_contradict(llm: LLM) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        llm.engine.validate([5], SamplingParams(json_schema="{}", ignore_eos=True))

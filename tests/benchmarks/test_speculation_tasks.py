"""Prompts of ``benchmarks.serving.speculation``, and the time that it counts for an answer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import speculation
from shadowkv import SamplingParams


class Words:
    """A tokenizer whose tokens are lengths of words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(messages[0]["content"])


@pytest.mark.parametrize(("task", "prompts", "most"), [("quote", 1, 20), ("edit", 1, 20), ("questions", 4, 20)])
def test_tasks_of_a_text(task: str, prompts: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only answers to questions may end before the maximum number of tokens."""
    monkeypatch.setattr(
        speculation, "haystack", lambda data: SimpleNamespace(sentences=["Extraordinarily many people."])
    )
    engine: Any = SimpleNamespace(tokenizer=Words())
    made = [*speculation.requests(engine, task, 100, most, 3)]
    assert len(made) == prompts
    for prompt, params in made:
        assert prompt.count(len("Extraordinarily")) == 34 and params.max_tokens == most
        assert params.ignore_eos == (task != "questions")
        assert (len(params.predicted_token_ids or ()) == 102) == (task == "edit")
    assert len({tuple(prompt) for prompt, _ in made}) == prompts


def test_an_answers_time_is_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token's time does not count. Steps can return several tokens."""
    clock = iter([100.0, 106.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    steps = [[], [5], [6, 7], [8]]

    class Engine:
        has_work = property(lambda self: bool(steps))

        def add_request(self, *given: Any) -> None:
            pass

        def step(self) -> list[Any]:
            tokens = steps.pop(0)
            return [SimpleNamespace(token_ids=tokens)] if tokens else []

    engine: Any = Engine()
    said, seconds = speculation.answer(engine, [1], SamplingParams())
    assert said == [5, 6, 7, 8] and seconds == 2.0

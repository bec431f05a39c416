"""The text of an answer from what the engine says of its tokens, one output at a time or several at once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.engine.answer_text import AnswerText
from shadowkv.engine.config import DEFAULT_MODEL
from shadowkv.engine.outputs import RequestTimes, TextOutput, TokenLogprobs, TokenOutput
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.models.loader import load_tokenizer
from shadowkv.models.tokenization.tokenizer import Tokenizer

TEXT = "Zwölf Boxkämpfer 💥 jagten 東京の猫 👩‍👩‍👧 über den Sylter Deich.\n\nEND of it"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Whose characters beyond ASCII are several tokens."""
    return load_tokenizer(DEFAULT_MODEL)


def outputs_of(tokens: Sequence[int], reason: str = "length", end: int | None = None) -> list[TokenOutput]:
    """What an engine says of an answer, a token in each; with an end token, if there is one, as its last."""
    whole = [*tokens, *([] if end is None else [end])]
    made = []
    for count, token in enumerate(whole, 1):
        output = TokenOutput("x", [token], None, 7, count, 2, RequestTimes(1.0, 2.0, 3.0, 3.0 + count))
        output.logprobs = [TokenLogprobs(token, -count / 8, {token: -count / 8})]
        made.append(output)
    made[0].prompt_logprobs = [None, TokenLogprobs(5, -1.0, {})]
    made[-1].finish_reason, made[-1].end_token = "stop" if end is not None else reason, end is not None
    return made


def read(tokenizer: Tokenizer, params: SamplingParams, outputs: list[TokenOutput], cuts: Iterable[int]) -> list[Any]:
    """What is read of the outputs, those between two cuts together, up to the answer's end."""
    text, parts = AnswerText(tokenizer, params), list[TextOutput]()
    for first, end in pairwise([0, *sorted({*cuts} - {0, len(outputs)}), len(outputs)]):
        assert not text.ended
        parts.append(text.read(outputs[first:end]))
        if text.ended:
            break
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert not any(part.prompt_logprobs or part.stop_string for part in parts[1:-1])
    last = parts[-1]
    return [
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        [step for part in parts for step in part.logprobs or ()],
        parts[0].prompt_logprobs,
        (last.finish_reason, last.stop_string, last.error),
        (last.prompt_tokens, last.completion_tokens, last.cached_tokens, last.times),
    ]


@pytest.mark.parametrize(
    ("stop", "text", "reason", "stop_string"),
    [
        ((), TEXT, "length", None),
        (("none of it",), TEXT, "length", None),
        (("END",), TEXT.partition("END")[0], "stop", "END"),
        (("の猫 👩‍👩‍👧",), TEXT.partition("の")[0], "stop", "の猫 👩‍👩‍👧"),
        (("Deich.\n\nE", "💥"), TEXT.partition("💥")[0], "stop", "💥"),
        (("of it",), TEXT.removesuffix("of it"), "stop", "of it"),
    ],
)
def test_an_answers_text_ends_before_its_stop_string(tokenizer, stop, text, reason, stop_string):
    outputs = outputs_of(tokenizer.encode(TEXT))
    params = SamplingParams(stop=stop, logprobs=0)
    one_by_one = read(tokenizer, params, outputs, range(len(outputs)))
    assert one_by_one[0] == text and one_by_one[4] == (reason, stop_string, None)
    assert len(one_by_one[1]) == len(one_by_one[2]) == one_by_one[5][1]
    assert read(tokenizer, params, outputs, []) == one_by_one


def test_an_end_token_is_no_text(tokenizer):
    (ended,) = tokenizer.encode("x")
    outputs = outputs_of(tokenizer.encode("Hello"), end=ended)
    for cuts in ([], range(9)):
        text, tokens, *_ = read(tokenizer, SamplingParams(), outputs, cuts)
        assert text == "Hello" and tokens[-1] == ended


def test_what_is_held_back_comes_with_the_end_and_not_with_an_error(tokenizer):
    tokens, params = tokenizer.encode("Hello E"), SamplingParams(stop=("END",))
    assert read(tokenizer, params, outputs_of(tokens), [])[0] == "Hello E"
    failed = [*outputs_of(tokens)[:-1], TokenOutput("x", [], "error", 7, len(tokens), 2, RequestTimes(1.0))]
    failed[-1].error = "not finite"
    for cuts in ([], range(len(failed))):
        found = read(tokenizer, params, failed, cuts)
        assert "Hello E".startswith(found[0]) and found[4] == ("error", None, "not finite")


def check_cuts(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...], cuts: list[int]) -> None:
    params, outputs = SamplingParams(stop=stop, logprobs=0), outputs_of(tokens)
    one_by_one = read(tokenizer, params, outputs, range(len(outputs)))
    assert read(tokenizer, params, outputs, cuts) == one_by_one
    whole = tokenizer.decode(tokens)
    ends = [place for one in stop if (place := whole.find(one)) >= 0]
    assert one_by_one[0] == whole[: min(ends, default=len(whole))]


@settings(max_examples=200)
@given(data=st.data())
def test_outputs_read_at_once_are_those_read_one_by_one(tokenizer, data):
    text = data.draw(st.text("ab \nöの💥", min_size=1, max_size=20))
    tokens = tokenizer.encode(text)
    stop = data.draw(st.lists(st.text("ab \nöの💥", min_size=1, max_size=4), max_size=3, unique=True).map(tuple))
    cuts = data.draw(st.lists(st.integers(0, len(tokens))))
    check_cuts(tokenizer, tokens, stop, cuts)


def test_so_are_tokens_that_are_no_text(tokenizer, drawn):
    draw = random.Random(drawn)
    pieces = [token for token in range(tokenizer.vocab_size) if "�" in tokenizer.decode([token])]
    for _ in range(100):
        tokens = [draw.choice(pieces) if draw.random() < 0.7 else draw.randrange(1000) for _ in range(40)]
        whole = tokenizer.decode(tokens)
        places = [draw.randrange(len(whole)) for _ in range(draw.randrange(3))]
        stop = tuple({whole[place : place + 3] for place in places if "�" not in whole[place : place + 3]})
        params, outputs = SamplingParams(stop=stop, logprobs=0), outputs_of(tokens)
        one_by_one = read(tokenizer, params, outputs, range(len(outputs)))
        assert read(tokenizer, params, outputs, draw.sample(range(40), 7)) == one_by_one
        if not stop:
            assert one_by_one[0] == whole


@pytest.mark.parametrize("stop", [(), ("END",)])
def test_how_far_a_prompt_has_come_is_no_part_of_the_text(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    params = SamplingParams(stop=stop)
    outputs = outputs_of(tokenizer.encode(TEXT, add_special_tokens=False))
    outputs[0].prefilled = 7
    reading = [TokenOutput("x", [], None, 7, 0, 2, RequestTimes(1.0, 2.0), prefilled=count) for count in (2, 5)]
    first = AnswerText(tokenizer, params).read(reading)
    assert (first.text, first.prefilled, first.is_progress) == ("", 5, True)
    told = AnswerText(tokenizer, params).read([*reading, *outputs])
    plain = AnswerText(tokenizer, params).read(outputs)
    assert told == plain and told.prefilled == 7 and told.prompt_logprobs and not told.is_progress

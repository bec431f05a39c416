"""The same samples against a server."""

from __future__ import annotations

import pytest
from stub_server import stub_server

from shadowkv.eval.records.policies import served_policy
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.running.remote import Remote


def sample(number: int, *turns: str) -> Sample:
    return Sample("t", str(number), turns, tuple(("blue",) for _ in turns), 5, "exact_match", 100)


def test_turns_send_the_conversation_and_the_limits() -> None:
    with stub_server(100) as (url, bodies):
        remote = Remote(url, None, len, 1)
        (found,) = remote.answers([(sample(0, "sky is blue", ", grass is green"), [served_policy("mine")])])
    assert [body["prompt"] for body in bodies] == ["sky is blue", "sky is blue blue, grass is green"]
    assert all((body["max_tokens"], body["temperature"], body["model"]) == (5, 0, "stub") for body in bodies)
    assert (found.predictions, found.score) == ([" blue", " green"], 0.5)
    assert (found.policy, found.kv, found.budget, found.attended_tokens) == ("mine", "mine", None, None)
    assert found.output_tokens == 6


def test_answers_that_the_server_does_not_count() -> None:
    with stub_server(100, usage=False) as (url, _):
        (found,) = Remote(url, None, len, 1).answers([(sample(0, "blue"), [served_policy("mine")])])
    assert found.output_tokens is None


def test_many_at_once() -> None:
    with stub_server(100) as (url, _):
        work = [(sample(number, "blue"), [served_policy("remote")]) for number in range(20)]
        found = list(Remote(url, "stub", len, 4).answers(work))
    assert sorted(int(p.id) for p in found) == list(range(20))


def test_what_the_server_does_not_take_is_not_sent() -> None:
    with stub_server(10) as (url, bodies):
        remote = Remote(url, None, len, 1)
        with pytest.raises(ValueError, match="sample 3 of t needs 11 tokens, the server takes at most 10"):
            list(remote.answers([(sample(3, "blabla"), [served_policy("remote")])]))
        assert not bodies
        with pytest.raises(ValueError, match="no model 'other'; it has stub"):
            Remote(url, "other", len, 1)


def test_a_server_that_is_not_there() -> None:
    with stub_server(10) as (url, _):
        pass
    with pytest.raises(ValueError, match="does not answer"):
        Remote(url, None, len, 1)

"""Tools with the openai client, the real engine and a small real model, whose template knows of no tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import agent
import client_matrix
import document_chat
import openai
import pytest
from http_server import http_server

from shadowkv.engine.config import EngineConfig
from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from tests.local_engine import LocalEngine

CITIES = ["Paris", "Rome", "Oslo"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]},
    },
}
NEXT = {"type": "function", "function": {"name": "next", "description": "The next city's weather"}}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    engine = LocalEngine(EngineConfig(max_model_len=1024, max_num_seqs=2, max_cached_seqs=2, device="cpu"))
    engine.start()
    app = build_app(engine, "small", ServerSettings(tool_call_parser="hermes"))
    try:
        with http_server(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        engine.shutdown(120)


def ask(client, messages=ASK, **options):
    options = {"tools": [WEATHER, NEXT], "tool_choice": "required", "max_tokens": 60, "temperature": 0, **options}
    return client.chat.completions.create(model="small", messages=messages, parallel_tool_calls=False, **options)


@pytest.mark.slow
def test_an_agent_of_six_turns(client):
    messages, ids, cached = [*ASK], set(), []
    for turn in range(6):
        answer = ask(client, messages, tools=[NEXT])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("next", {})
        ids.add(call.id)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": f"{turn + 10} degrees"}]
    assert len(ids) == 6
    assert cached[-1] > cached[1] > 0, "each turn begins with what earlier ones computed"
    last = ask(client, messages, tools=[NEXT], tool_choice="none", max_tokens=4).choices[0]
    assert last.message.content and not last.message.tool_calls


def test_the_model_chooses_among_tools_and_arguments(client):
    (call,) = ask(client).choices[0].message.tool_calls
    assert call.function.name in ("weather", "next")
    assert call.function.name == "next" or json.loads(call.function.arguments)["city"] in CITIES


def test_a_stream_equals_the_answer(client):
    (whole,) = ask(client, tool_choice=NAMED).choices[0].message.tool_calls
    assert json.loads(whole.function.arguments)["city"] in CITIES
    for _ in range(3):  # a server sends what has waited as one piece, and on a busy machine all can have waited
        name, pieces, reason = None, [], None
        for chunk in ask(client, stream=True, tool_choice=NAMED):
            reason = chunk.choices[0].finish_reason or reason
            for part in chunk.choices[0].delta.tool_calls or ():
                assert part.index == 0
                if name is None:
                    assert part.id and part.type == "function"
                    name = part.function.name
                pieces.append(part.function.arguments)
        assert (name, "".join(pieces)) == (whole.function.name, whole.function.arguments)
        assert reason == "tool_calls"
        if len(pieces) > 2:
            break
    assert len(pieces) > 2


def test_text_where_calls_are_read_has_its_special_tokens(client):
    (special,) = client.post("/../tokenize", body={"prompt": "<file_sep>"}, cast_to=object)["tokens"]
    options = {"max_tokens": 1, "logit_bias": {str(special): 100}}
    assert ask(client, tool_choice="auto", **options).choices[0].message.content == "<file_sep>"
    assert ask(client, tool_choice="none", **options).choices[0].message.content == ""


def test_a_schema_that_cannot_be_followed_names_the_tools(client):
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "endless", "parameters": endless}}
    for choice in ("required", {"type": "function", "function": {"name": "endless"}}):
        with pytest.raises(openai.BadRequestError, match="no finite JSON can satisfy") as caught:
            ask(client, tools=[tool], tool_choice=choice)
        assert caught.value.param == "tools"


@pytest.mark.parametrize("name", client_matrix.CLIENTS)
def test_clients(client, name):
    if name not in client_matrix.installed():
        pytest.skip(f"{name} is not installed")
    found = client_matrix.outcomes(name, str(client.base_url), "small")
    assert {*found.values()} <= {"yes", client_matrix.NOT_OFFERED} and "yes" in found.values(), found


@pytest.mark.slow
def test_fifteen_clients():
    if (python := os.environ.get("SHADOWKV_CLIENTS")) is None:
        pytest.skip("SHADOWKV_CLIENTS is no environment of scripts/clients.txt: make test-slow has one")
    script = Path(client_matrix.__file__)
    names = subprocess.run([python, script, "--names"], capture_output=True, text=True, check=True).stdout.split("\n")
    assert [name for name in names if name] == [*client_matrix.CLIENTS]
    with client_matrix.server() as url:
        done = subprocess.run([python, script, "--base-url", url], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_agent_of_the_examples(client, capsys):
    assert agent.run(client, "How warm is it in Rome?", "required", max_tokens=24)
    assert "temperature(" in capsys.readouterr().out


def test_the_document_chat_of_the_examples(client, capsys):
    document_chat.ask_all(client, "The lighthouse stands on a rock. " * 12, ["Where?", "Why?"], max_tokens=4)
    first, second = re.findall(r"\((\d+) of \d+ prompt tokens were cached\)", capsys.readouterr().out)
    assert int(second) > 64 > int(first)

"""What ``client_matrix.py`` has each client do: a chat, a stream, a tool's call, an answer in JSON, a document.

A client's function makes its cases; those that it has no way to ask for are left out.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

CASES = ("chat", "stream", "tools", "structured output", "document")
QUESTION = "What is the capital of France? Answer in one word."
Cases = dict[str, Callable[[], object]]


class Capital(BaseModel):
    """A country's capital."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """Today's weather in a city.

    Args:
        city: its name.
    """
    return f"sunny in {city}"


CITIES = ["Paris", "Rome", "Oslo"]
SCHEMA = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Today's weather in a city", "parameters": SCHEMA},
}
ASK = [{"role": "user", "content": QUESTION}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
DOCUMENT = base64.b64encode(b"The capital of France is Paris.").decode()
"""A document of plain text."""


def called(name: str, arguments: dict[str, Any]) -> str:
    """The tool's answer; raises AssertionError if the call does not match it."""
    assert name == "weather", name
    assert arguments["city"] in CITIES, arguments
    return weather(**arguments)


def said(text: str | None) -> None:
    """Checks that an answer is the right one."""
    assert text and "Paris" in text, text


def streamed(ask: Callable[[], Iterable[str | None]]) -> None:
    """Checks that an answer comes in pieces, and is the right one. A server sends what has waited as one piece, and on
    a busy machine all of a short answer can have waited. So the question is asked up to three times."""
    for _ in range(3):
        texts = [piece for piece in ask() if piece]
        said("".join(texts))
        if len(texts) > 1:
            return
    raise AssertionError("all in one piece, three times")


def is_capital(answer: Any) -> None:
    """Checks that an answer is an object of the type that was asked for."""
    assert isinstance(answer, Capital), answer


def file_part(kind: str = "file") -> dict[str, Any]:
    """A document as a part of a message of the OpenAI API."""
    about = {"filename": "france.txt", "file_data": f"data:text/plain;base64,{DOCUMENT}"}
    return {"type": kind, **about} if kind == "input_file" else {"type": kind, "file": about}


def run(work: Any) -> Any:
    """The result of a coroutine."""
    return asyncio.run(work)


def with_openai(url: str, model: str) -> Cases:
    """The openai package, chats."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    create = client.chat.completions.create

    def tools() -> None:
        options = {**OPTIONS, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        message = create(model=model, messages=ASK, **options).choices[0].message
        (call,) = message.tool_calls
        result = called(call.function.name, json.loads(call.function.arguments))
        turns = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        last = create(model=model, messages=turns, **OPTIONS, tools=[TOOL], tool_choice="none")
        assert last.choices[0].message.content

    def structured() -> None:
        answer = client.chat.completions.parse(model=model, messages=ASK, response_format=Capital, **OPTIONS)
        is_capital(answer.choices[0].message.parsed)

    def pieces() -> Iterator[str | None]:
        return (chunk.choices[0].delta.content for chunk in create(model=model, messages=ASK, stream=True, **OPTIONS))

    def document() -> None:
        parts = [file_part(), {"type": "text", "text": QUESTION}]
        answer = create(model=model, messages=[{"role": "user", "content": parts}], **OPTIONS)
        said(answer.choices[0].message.content)

    return {
        "chat": lambda: said(create(model=model, messages=ASK, **OPTIONS).choices[0].message.content),
        "stream": lambda: streamed(pieces),
        "tools": tools,
        "structured output": structured,
        "document": document,
    }


def with_openai_responses(url: str, model: str) -> Cases:
    """The openai package, responses: a conversation goes on by ``previous_response_id``."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    create, options = client.responses.create, {"temperature": 0, "max_output_tokens": 60}
    tool = {"type": "function", **TOOL["function"], "strict": True}

    def tools() -> None:
        first = create(model=model, input=QUESTION, tools=[tool], tool_choice="required", **options)
        call = first.output[0]
        result = called(call.name, json.loads(call.arguments))
        output = [{"type": "function_call_output", "call_id": call.call_id, "output": result}]
        last = create(model=model, input=output, previous_response_id=first.id, **options)
        assert last.output_text

    def pieces() -> Iterator[str | None]:
        for event in create(model=model, input=QUESTION, stream=True, **options):
            if event.type == "response.output_text.delta":
                yield event.delta

    def document() -> None:
        parts = [file_part("input_file"), {"type": "input_text", "text": QUESTION}]
        said(create(model=model, input=[{"role": "user", "content": parts}], **options).output_text)

    return {
        "chat": lambda: said(create(model=model, input=QUESTION, **options).output_text),
        "stream": lambda: streamed(pieces),
        "tools": tools,
        "structured output": lambda: is_capital(
            client.responses.parse(model=model, input=QUESTION, text_format=Capital, **options).output_parsed
        ),
        "document": document,
    }


def with_anthropic(url: str, model: str) -> Cases:
    """Anthropic's package."""
    import anthropic

    client = anthropic.Anthropic(base_url=url.rstrip("/").removesuffix("/v1"), api_key="none", max_retries=0)
    # Its newest version knows no temperature, and passes it on.
    about: dict[str, Any] = {"model": model, "max_tokens": 60, "extra_body": {"temperature": 0}}
    tool = {"name": "weather", "description": "Today's weather in a city", "input_schema": SCHEMA}

    def tools() -> None:
        first = client.messages.create(messages=ASK, tools=[tool], tool_choice={"type": "any"}, **about)
        use = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": called(use.name, use.input)}
        turns = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=turns, tools=[tool], tool_choice={"type": "none"}, **about)
        assert last.content[0].text

    def pieces() -> Iterator[str | None]:
        with client.messages.stream(messages=ASK, **about) as stream:
            yield from stream.text_stream

    def document() -> None:
        source = {"type": "text", "media_type": "text/plain", "data": "The capital of France is Paris."}
        parts = [{"type": "document", "source": source}, {"type": "text", "text": QUESTION}]
        said(client.messages.create(messages=[{"role": "user", "content": parts}], **about).content[0].text)

    return {
        "chat": lambda: said(client.messages.create(messages=ASK, **about).content[0].text),
        "stream": lambda: streamed(pieces),
        "tools": tools,
        "structured output": lambda: is_capital(
            client.messages.parse(messages=ASK, output_format=Capital, **about).parsed_output
        ),
        "document": document,
    }


def _with_langchain(chat: Any, any_tool: str, part: dict[str, Any], method: str) -> Cases:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    def tools() -> None:
        answer = chat.bind_tools([tool(weather)], tool_choice=any_tool).invoke(QUESTION)
        results = [
            ToolMessage(called(call["name"], call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
        ]
        last = chat.bind_tools([tool(weather)]).invoke([HumanMessage(QUESTION), answer, *results])
        assert last.content or last.tool_calls

    question = HumanMessage([part, {"type": "text", "text": QUESTION}])
    return {
        "chat": lambda: said(chat.invoke(QUESTION).text),
        "stream": lambda: streamed(lambda: (piece.text for piece in chat.stream(QUESTION))),
        "tools": tools,
        "structured output": lambda: is_capital(chat.with_structured_output(Capital, method=method).invoke(QUESTION)),
        "document": lambda: said(chat.invoke([question]).text),
    }


def with_langchain_openai(url: str, model: str) -> Cases:
    """LangChain's chat model for the OpenAI API."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, **OPTIONS)
    return _with_langchain(chat, "required", file_part(), "json_schema")


def with_langchain_anthropic(url: str, model: str) -> Cases:
    """LangChain's chat model for Anthropic's API."""
    from langchain_anthropic import ChatAnthropic

    base = url.rstrip("/").removesuffix("/v1")
    chat = ChatAnthropic(base_url=base, api_key="none", model=model, max_retries=0, **OPTIONS)
    source = {"type": "text", "media_type": "text/plain", "data": "The capital of France is Paris."}
    return _with_langchain(chat, "any", {"type": "document", "source": source}, "function_calling")


def with_litellm(url: str, model: str) -> Cases:
    """LiteLLM's openai/ provider."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one
    import litellm

    def ask(messages: list[Any] = ASK, **options: Any) -> Any:
        about = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "num_retries": 0}
        return litellm.completion(messages=messages, **about, **OPTIONS, **options)

    def tools() -> None:
        message = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls
        result = called(call.function.name, json.loads(call.function.arguments))
        turns = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        assert ask(turns, tools=[TOOL], tool_choice="none").choices[0].message.content

    def document() -> None:
        parts = [file_part(), {"type": "text", "text": QUESTION}]
        said(ask([{"role": "user", "content": parts}]).choices[0].message.content)

    return {
        "chat": lambda: said(ask().choices[0].message.content),
        "stream": lambda: streamed(lambda: (chunk.choices[0].delta.content for chunk in ask(stream=True))),
        "tools": tools,
        "structured output": lambda: is_capital(
            Capital.model_validate_json(ask(response_format=Capital).choices[0].message.content)
        ),
        "document": document,
    }


def with_llm(url: str, model: str) -> Cases:
    """Simon Willison's llm, configured for the server by extra-openai-models.yaml."""
    folder = Path(tempfile.mkdtemp(prefix="llm-"))
    about = {"model_name": model, "api_base": url, "supports_tools": True, "supports_schema": True}
    entry = {"model_id": "served", **about}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]), encoding="utf-8")  # JSON is YAML, too
    os.environ["LLM_USER_PATH"] = str(folder)
    import llm

    served = llm.get_model("served")

    def tools() -> None:
        # It cannot force a call: the model chooses, and this one never does.
        assert served.chain(QUESTION, tools=[weather], options=OPTIONS, stream=False).text()

    def text(**options: Any) -> str:
        answer: str = served.prompt(QUESTION, stream=False, **options, **OPTIONS).text()
        return answer

    return {
        "chat": lambda: said(text()),
        "stream": lambda: streamed(lambda: served.prompt(QUESTION, **OPTIONS)),
        "tools": tools,
        "structured output": lambda: is_capital(Capital.model_validate_json(text(schema=Capital))),
    }

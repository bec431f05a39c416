"""More of ``client_cases.py``: frameworks over the OpenAI API, which have their own loops of tools.

A yes in "tools" is a call that the client has read, or, where it has no way to force one, an answer to the offer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Literal

from client_cases import (
    ASK,
    DOCUMENT,
    OPTIONS,
    QUESTION,
    Capital,
    Cases,
    called,
    is_capital,
    run,
    said,
    streamed,
    weather,
)
from pydantic import BaseModel


class City(BaseModel):
    """Arguments of ``weather``."""

    city: Literal["Paris", "Rome", "Oslo"]


def with_instructor(url: str, model: str) -> Cases:
    """instructor, with JSON schemas and with tools."""
    import instructor
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def capital(mode: Any) -> None:
        create = instructor.from_openai(client, mode=mode).chat.completions.create
        is_capital(create(model=model, messages=ASK, response_model=Capital, max_retries=0, **OPTIONS))

    return {
        "tools": lambda: capital(instructor.Mode.TOOLS),
        "structured output": lambda: capital(instructor.Mode.JSON_SCHEMA),
    }


def with_pydantic_ai(url: str, model: str) -> Cases:
    """Pydantic AI's agents."""
    from pydantic_ai import Agent, BinaryContent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))

    def agent(**options: Any) -> Any:
        return Agent(served, model_settings=OPTIONS, retries=0, **options)

    async def pieces() -> list[str]:
        async with agent().run_stream(QUESTION) as answer:
            return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]

    document = BinaryContent(b"The capital of France is Paris.", media_type="text/plain")
    return {
        "chat": lambda: said(agent().run_sync(QUESTION).output),
        "stream": lambda: streamed(lambda: run(pieces())),
        "tools": lambda: is_capital(agent(output_type=Capital).run_sync(QUESTION).output),
        "structured output": lambda: is_capital(agent(output_type=NativeOutput(Capital)).run_sync(QUESTION).output),
        "document": lambda: said(agent().run_sync([QUESTION, document]).output),
    }


def with_llama_index(url: str, model: str) -> Cases:
    """LlamaIndex's OpenAILike."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    limits = {"max_tokens": OPTIONS["max_tokens"], "temperature": 0, "max_retries": 0, "context_window": 4096}
    kind = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
    served = OpenAILike(model=model, api_base=url, api_key="none", **kind, **limits)
    ask = [ChatMessage(role="user", content=QUESTION)]

    def tools() -> None:
        tool = FunctionTool.from_defaults(weather, name="weather", fn_schema=City)
        answer = served.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
        for call in served.get_tool_calls_from_response(answer):
            called(call.tool_name, call.tool_kwargs)

    return {
        "chat": lambda: said(served.chat(ask).message.content),
        "stream": lambda: streamed(lambda: (piece.delta for piece in served.stream_chat(ask))),
        "tools": tools,
        "structured output": lambda: is_capital(served.as_structured_llm(Capital).chat(ask).raw),
    }


def with_openai_agents(url: str, model: str) -> Cases:
    """OpenAI's Agents SDK, which speaks the responses API."""
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    def agent(choice: str | None = None, **options: Any) -> Any:
        served = OpenAIResponsesModel(model, AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        settings = ModelSettings(temperature=0, max_tokens=60, tool_choice=choice, store=True)
        return Agent("helper", model=served, model_settings=settings, **options)

    async def pieces() -> list[str]:
        events = Runner.run_streamed(agent(), QUESTION).stream_events()
        return [
            event.data.delta
            async for event in events
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]

    def tools() -> None:
        done = run(Runner.run(agent("required", tools=[function_tool(weather)]), QUESTION, max_turns=3))
        assert any(item.type == "tool_call_item" for item in done.new_items), done.new_items

    def document() -> None:
        part = {"type": "input_file", "filename": "f.txt", "file_data": f"data:text/plain;base64,{DOCUMENT}"}
        parts = [part, {"type": "input_text", "text": QUESTION}]
        said(run(Runner.run(agent(), [{"role": "user", "content": parts}])).final_output)

    return {
        "chat": lambda: said(run(Runner.run(agent(), QUESTION)).final_output),
        "stream": lambda: streamed(lambda: run(pieces())),
        "tools": tools,
        "structured output": lambda: is_capital(run(Runner.run(agent(output_type=Capital), QUESTION)).final_output),
        "document": document,
    }


def with_haystack(url: str, model: str) -> Cases:
    """Haystack's generator of chats."""
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def ask(**options: Any) -> Any:
        more = options.pop("generation", {})
        served = OpenAIChatGenerator(
            api_key=Secret.from_token("none"), model=model, api_base_url=url, max_retries=0, **options
        )
        (reply,) = served.run([ChatMessage.from_user(QUESTION)], generation_kwargs={**OPTIONS, **more})["replies"]
        return reply

    def pieces() -> Iterator[str | None]:
        texts: list[str] = []
        ask(streaming_callback=lambda chunk: texts.append(chunk.content))
        return iter(texts)

    def tools() -> None:
        reply = ask(tools=[create_tool_from_function(weather)], generation={"tool_choice": "required"})
        for call in reply.tool_calls:
            called(call.tool_name, call.arguments)
        assert reply.tool_calls

    return {
        "chat": lambda: said(ask().text),
        "stream": lambda: streamed(pieces),
        "tools": tools,
        "structured output": lambda: is_capital(
            Capital.model_validate_json(ask(generation={"response_format": Capital}).text)
        ),
    }


def with_smolagents(url: str, model: str) -> Cases:
    """smolagents' model of a server."""
    from smolagents import ChatMessage, MessageRole, OpenAIServerModel, tool

    served = OpenAIServerModel(model, api_base=url, api_key="none", client_kwargs={"max_retries": 0}, **OPTIONS)
    ask = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]

    def tools() -> None:
        answer = served.generate(ask, tools_to_call_from=[tool(_plain_weather)])
        for call in answer.tool_calls:
            assert call.function.name == "_plain_weather", call
        assert answer.tool_calls

    form = {"type": "json_schema", "json_schema": {"name": "capital", "schema": Capital.model_json_schema()}}
    return {
        "chat": lambda: said(served.generate(ask).content),
        "stream": lambda: streamed(lambda: (piece.content for piece in served.generate_stream(ask))),
        "tools": tools,
        "structured output": lambda: is_capital(
            Capital.model_validate_json(served.generate(ask, response_format=form).content)
        ),
    }


def _plain_weather(city: str) -> str:
    """Today's weather in a city.

    Args:
        city: its name.
    """
    return f"sunny in {city}"


def with_dspy(url: str, model: str) -> Cases:
    """DSPy, whose programs ask in words and read the answer's text: of the rest it sends nothing to a model it does not
    know."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import dspy

    served = dspy.LM(f"openai/{model}", api_base=url, api_key="none", cache=False, num_retries=0, **OPTIONS)
    return {"chat": lambda: said(served(QUESTION)[0])}


def with_autogen(url: str, model: str) -> Cases:
    """AutoGen's client."""
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    abilities = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    info = {**abilities, "family": "unknown"}
    ask = [UserMessage(content=QUESTION, source="user")]

    def client() -> Any:
        return OpenAIChatCompletionClient(
            model=model, base_url=url, api_key="none", model_info=info, max_retries=0, **OPTIONS
        )

    async def pieces() -> list[str]:
        return [piece async for piece in client().create_stream(ask) if isinstance(piece, str)]

    def tools() -> None:
        tool = FunctionTool(weather, description="Today's weather in a city")
        answer = run(client().create(ask, tools=[tool], tool_choice="required"))
        for call in answer.content:
            called(call.name, json.loads(call.arguments))

    return {
        "chat": lambda: said(run(client().create(ask)).content),
        "stream": lambda: streamed(lambda: run(pieces())),
        "tools": tools,
        "structured output": lambda: is_capital(
            Capital.model_validate_json(run(client().create(ask, json_output=Capital)).content)
        ),
    }

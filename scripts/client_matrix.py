"""Which clients can do what: queries a server of the small real model with each one installed; makes docs/clients.md.

    python scripts/client_matrix.py --out docs/clients.md   # starts its own server
    clients/bin/python scripts/client_matrix.py --base-url http://localhost:8000/v1   # another environment's clients

The page's further sections are kept as they are.

A yes means the client parsed the answer correctly; the model's quality is not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

CASES = ("chat", "stream", "tools", "structured output")
QUESTION = "What is the capital of France? Answer in one word."
MAX_REASON_CHARS = 120

Cases = dict[str, Callable[[], object]]


class Capital(BaseModel):
    """A country's capital."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """Today's weather in a city."""
    return f"sunny in {city}"


CITIES = ["Paris", "Rome", "Oslo"]
SCHEMA = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Today's weather in a city", "parameters": SCHEMA},
}
ASK = [{"role": "user", "content": QUESTION}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 60}


def _called(name: str, arguments: dict[str, Any]) -> str:
    """The tool's answer; raises AssertionError if the call does not match it."""
    assert name == "weather", name
    assert arguments["city"] in CITIES, arguments
    return weather(**arguments)


def _text(pieces: Iterator[str | None] | list[str | None]) -> None:
    said = [piece for piece in pieces if piece]
    assert "Paris" in "".join(said), said


def _stream(pieces: Iterator[str | None]) -> None:
    said = list(pieces)
    assert len([piece for piece in said if piece]) > 1, "all in one piece"
    _text(said)


def _cases(
    text: Callable[[], str | None],
    pieces: Callable[[], Iterator[str | None]],
    tools: Callable[[], object],
    structured: Callable[[], object],
) -> Cases:
    """A chat's text, the pieces of a stream, and cases that check by themselves."""
    return dict(zip(CASES, (lambda: _text([text()]), lambda: _stream(pieces()), tools, structured)))


def with_openai(url: str, model: str) -> Cases:
    """The openai package."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    create = client.chat.completions.create

    def tools() -> None:
        options = {**OPTIONS, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        message = create(model=model, messages=ASK, **options).choices[0].message
        (call,) = message.tool_calls
        result = _called(call.function.name, json.loads(call.function.arguments))
        turns = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        last = create(model=model, messages=turns, **OPTIONS, tools=[TOOL], tool_choice="none")
        assert last.choices[0].message.content

    def structured() -> None:
        answer = client.chat.completions.parse(model=model, messages=ASK, response_format=Capital, **OPTIONS)
        assert isinstance(answer.choices[0].message.parsed, Capital)

    def pieces() -> Iterator[str | None]:
        return (chunk.choices[0].delta.content for chunk in create(model=model, messages=ASK, stream=True, **OPTIONS))

    return _cases(
        lambda: create(model=model, messages=ASK, **OPTIONS).choices[0].message.content, pieces, tools, structured
    )


def with_langchain(url: str, model: str) -> Cases:
    """LangChain's chat model for the OpenAI API."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, **OPTIONS)

    def tools() -> None:
        bound = chat.bind_tools([tool(weather)], tool_choice="required", parallel_tool_calls=False)
        answer = bound.invoke(QUESTION)
        (call,) = answer.tool_calls
        result = ToolMessage(_called(call["name"], call["args"]), tool_call_id=call["id"])
        last = chat.bind_tools([tool(weather)], tool_choice="none")
        assert last.invoke([HumanMessage(QUESTION), answer, result]).content

    def structured() -> None:
        assert isinstance(chat.with_structured_output(Capital).invoke(QUESTION), Capital)

    return _cases(
        lambda: chat.invoke(QUESTION).content,
        lambda: (piece.content for piece in chat.stream(QUESTION)),
        tools,
        structured,
    )


def with_litellm(url: str, model: str) -> Cases:
    """LiteLLM's openai/ provider."""
    import litellm

    def ask(messages: list[Any] = ASK, **options: Any) -> Any:
        about = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "num_retries": 0}
        return litellm.completion(messages=messages, **about, **OPTIONS, **options)

    def tools() -> None:
        message = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls
        result = _called(call.function.name, json.loads(call.function.arguments))
        turns = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        assert ask(turns, tools=[TOOL], tool_choice="none").choices[0].message.content

    return _cases(
        lambda: ask().choices[0].message.content,
        lambda: (chunk.choices[0].delta.content for chunk in ask(stream=True)),
        tools,
        lambda: Capital.model_validate_json(ask(response_format=Capital).choices[0].message.content),
    )


def with_llm(url: str, model: str) -> Cases:
    """Simon Willison's llm, configured for the server by extra-openai-models.yaml."""
    folder = Path(tempfile.mkdtemp(prefix="llm-"))
    entry = {
        "model_id": "served",
        "model_name": model,
        "api_base": url,
        "supports_tools": True,
        "supports_schema": True,
    }
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]), encoding="utf-8")  # JSON is YAML, too
    os.environ["LLM_USER_PATH"] = str(folder)
    import llm

    served = llm.get_model("served")

    def tools() -> None:
        # It cannot force a call: the model chooses, and this one never does.
        assert served.chain(QUESTION, tools=[weather], options=OPTIONS, stream=False).text()

    def said(**options: Any) -> str:
        text: str = served.prompt(QUESTION, stream=False, **options, **OPTIONS).text()
        return text

    return _cases(
        said,
        lambda: iter(served.prompt(QUESTION, **OPTIONS)),
        tools,
        lambda: Capital.model_validate_json(said(schema=Capital)),
    )


CLIENTS: dict[str, Callable[[str, str], Cases]] = {
    "openai": with_openai,
    "langchain-openai": with_langchain,
    "litellm": with_litellm,
    "llm": with_llm,
}
NOTES = {("llm", "tools"): "offered with `tool_choice` auto, the only one it supports"}


def installed() -> dict[str, str]:
    """Versions of the clients that are installed."""
    versions = {}
    for name in CLIENTS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def outcomes(client: str, url: str, model: str) -> dict[str, str]:
    """Each case's ``yes``, or ``no`` and why."""
    cases, results = CLIENTS[client](url, model), {}
    for name, case in cases.items():
        try:
            case()
            results[name] = "yes"
        except Exception as error:  # whatever the client raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            results[name] = f"no: {reason[:MAX_REASON_CHARS]}"
    return results


def page(rows: dict[str, dict[str, str]], versions: dict[str, str], model: str) -> str:
    """The table to read."""
    lines = [
        "# Clients",
        "",
        f"What clients of the OpenAI API could do with a server of `{model}` on {date.today().isoformat()}; "
        "`python scripts/client_matrix.py --out docs/clients.md` tests the installed ones again and writes this page.",
        "",
        f"| client | version | {' | '.join(CASES)} |",
        f"| --- | --- |{' --- |' * len(CASES)}",
    ]
    for client, results in rows.items():
        cells = [_cell(client, case, results[case]) for case in CASES]
        lines.append(f"| {client} | {versions[client]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", (__doc__ or "").strip().split("\n\n")[-1].replace("\n", " "), ""])


def kept_sections(path: Path) -> str:
    """What the page that ``path`` has says after the table, from its first heading on."""
    _, heading, rest = path.read_text(encoding="utf-8").partition("\n## ") if path.exists() else ("", "", "")
    return heading + rest


def _cell(client: str, case: str, outcome: str) -> str:
    note = NOTES.get((client, case))
    return f"{outcome} ({note})" if note and outcome == "yes" else outcome.replace("|", "\\|")


@contextmanager
def server() -> Iterator[str]:
    """A server of the default model; its base URL."""
    flags = ["--port", "0", "--max-model-len", "2048", "--batch", "4", "--tool-call-parser", "hermes"]
    command = [sys.executable, "-m", "shadowkv.serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ready: "):
                    yield line.removeprefix("ready: ").strip()
                    return
            raise SystemExit("error: the server did not start")
        finally:
            process.terminate()


def main() -> int:
    """Command line; returns the exit status: 1 if any case is a no."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", metavar="URL", help="a server with --tool-call-parser hermes (default: our own)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there (default: print it)")
    args = parser.parse_args()
    versions = installed()
    if args.base_url is None:
        with server() as url:
            rows = {client: outcomes(client, url, args.model) for client in versions}
    else:
        rows = {client: outcomes(client, args.base_url, args.model) for client in versions}
    text = page(rows, versions, args.model)
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text + kept_sections(args.out), encoding="utf-8")
    return 0 if all(outcome == "yes" for results in rows.values() for outcome in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""An agent: the model calls tools until it has what it needs, then answers.

    shadowkv serve --model Qwen/Qwen3-8B &
    python examples/agent.py "Which of Paris, Rome and Oslo is the warmest today?"

The small default model's chat template knows no tools, so that it cannot choose when to call one: with it pass
``--tool-choice required``, by which the first turn must call.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import openai

TEMPERATURES = {"Paris": 19, "Rome": 27, "Oslo": 11}
MAX_TURNS = 8


def temperature(city: str) -> str:
    """What the tool answers."""
    return f"{TEMPERATURES[city]} degrees in {city}"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "Today's temperature in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": list(TEMPERATURES)}},
                "required": ["city"],
            },
        },
    }
]


def run(client: openai.OpenAI, task: str, tool_choice: str = "auto", max_tokens: int = 256) -> str:
    """The agent's answer; what it calls on the way is printed."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": task}]
    for turn in range(MAX_TURNS):
        last = turn == MAX_TURNS - 1
        choice = "none" if last else tool_choice
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=max_tokens, temperature=0
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = temperature(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        tool_choice = "auto" if tool_choice == "auto" else "none"
    return str(message.content)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--tool-choice", choices=["auto", "required"], default="auto")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    args = parser.parse_args(argv)
    with openai.OpenAI(base_url=args.base_url, api_key="none") as client:
        print(run(client, args.task, args.tool_choice))


if __name__ == "__main__":
    main()

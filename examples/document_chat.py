"""Questions about one document, whose prompt is computed once: later questions find it in the prefix cache.

shadowkv serve --kv-offload-gib 8 &        # the document then outlives what runs beside it
python examples/document_chat.py README.md "What is this about?" "Which models does it serve?"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import openai


def ask_all(client: openai.OpenAI, document: str, questions: list[str], max_tokens: int = 128) -> None:
    """Prints each question's answer, and how much of its prompt was found in the cache."""
    model = client.models.list().data[0].id
    # The document comes first: only the start of a prompt can be shared.
    messages: list[Any] = [{"role": "system", "content": f"Answer from this document.\n\n{document}"}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, temperature=0)
        text, usage = answer.choices[0].message.content, answer.usage
        print(f"> {question}\n{text}")
        print(f"  ({usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached)\n")
        messages.append({"role": "assistant", "content": text})


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    args = parser.parse_args(argv)
    with openai.OpenAI(base_url=args.base_url, api_key="none") as client:
        ask_all(client, args.document.read_text(encoding="utf-8"), args.questions)


if __name__ == "__main__":
    main()

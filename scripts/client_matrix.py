"""Which clients can do what: queries a server of the small real model with each one installed; makes docs/clients.md.

    python scripts/client_matrix.py --out docs/clients.md   # starts its own server
    build/clients/bin/python scripts/client_matrix.py --base-url http://localhost:8000/v1   # of scripts/clients.txt

The page's further sections are kept as they are.

"yes" means that the client parsed the answer correctly; the model's quality is not judged. "–" means that the client
cannot ask for it, or that another row covers it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from client_cases import (
    CASES,
    Cases,
    with_anthropic,
    with_langchain_anthropic,
    with_langchain_openai,
    with_litellm,
    with_llm,
    with_openai,
    with_openai_responses,
)
from client_frameworks import (
    with_autogen,
    with_dspy,
    with_haystack,
    with_instructor,
    with_llama_index,
    with_openai_agents,
    with_pydantic_ai,
    with_smolagents,
)

MAX_REASON_CHARS = 200

CLIENTS: dict[str, tuple[str, Callable[[str, str], Cases]]] = {
    "openai, chats": ("openai", with_openai),
    "openai, responses": ("openai", with_openai_responses),
    "anthropic": ("anthropic", with_anthropic),
    "langchain-openai": ("langchain-openai", with_langchain_openai),
    "langchain-anthropic": ("langchain-anthropic", with_langchain_anthropic),
    "litellm": ("litellm", with_litellm),
    "llm": ("llm", with_llm),
    "instructor": ("instructor", with_instructor),
    "pydantic-ai": ("pydantic-ai-slim", with_pydantic_ai),
    "llama-index": ("llama-index-llms-openai-like", with_llama_index),
    "openai-agents": ("openai-agents", with_openai_agents),
    "haystack": ("haystack-ai", with_haystack),
    "smolagents": ("smolagents", with_smolagents),
    "dspy": ("dspy", with_dspy),
    "autogen": ("autogen-ext", with_autogen),
}
"""By name: the package, and what makes its cases."""

NOTES = {("llm", "tools"): "offered with `tool_choice` auto, the only one it supports"}
NOT_OFFERED = "–"
"""A case that a client has no way to ask for, or that is another's of these."""


def installed() -> dict[str, str]:
    """Versions of the clients that are installed."""
    versions = {}
    for name, (package, _) in CLIENTS.items():
        try:
            versions[name] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def outcomes(client: str, url: str, model: str) -> dict[str, str]:
    """Each case's ``yes``, or ``no`` and why, or that there is none."""
    cases, results = CLIENTS[client][1](url, model), dict.fromkeys(CASES, NOT_OFFERED)
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
        f"{len(rows)} clients of the OpenAI and Anthropic APIs, tested against a server of `{model}` on "
        f"{date.today().isoformat()}. `make test-slow` tests them again. "
        "`python scripts/client_matrix.py --out docs/clients.md` writes this table.",
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
    flags = ["--port", "0", "--max-model-len", "4096", "--batch", "4", "--tool-call-parser", "hermes"]
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
    parser.add_argument("--names", action="store_true", help="print which clients are installed, and nothing else")
    args = parser.parse_args()
    versions = installed()
    if args.names:
        print("\n".join(versions))
        return 0
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
    return 0 if not any(outcome.startswith("no") for results in rows.values() for outcome in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

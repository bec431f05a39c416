"""One request, computed by a prefill server and answered by a decode server that shares its directory.

shadowkv serve --port 8100 --role prefill --kv-disk-dir /shared/segments &
shadowkv serve --port 8200 --role decode --kv-disk-dir /shared/segments &
python examples/split_prefill.py README.md "What is this about?"
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import httpx

CHATS = "/v1/chat/completions"


def prefill(http: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """What the decode server is to be told: which segments hold the prompt; None where it has to compute it."""
    asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    try:
        answer = http.post(url + CHATS, json=asked)
        answer.raise_for_status()
    except httpx.HTTPError as error:  # down, or killed meanwhile: nothing is lost but time
        print(f"  (the prefill server has not answered: {error})")
        return None
    return answer.json()["kv_transfer_params"]


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    parser.add_argument("--prefill-url", default="http://localhost:8100")
    parser.add_argument("--decode-url", default="http://localhost:8200")
    args = parser.parse_args(argv)
    prompt = f"{args.document.read_text(encoding='utf-8')}\n\n{args.question}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 128, "temperature": 0}
    with httpx.Client(timeout=600) as http:
        began = time.monotonic()
        body["kv_transfer_params"] = prefill(http, args.prefill_url, body)
        prefilled = time.monotonic() - began
        answer = http.post(args.decode_url + CHATS, json=body)
    answer.raise_for_status()
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(answer.json()["choices"][0]["message"]["content"])
    print(f"  (prefill: {prefilled:.2f} s; {cached} of {usage['prompt_tokens']} prompt tokens came from there)")


if __name__ == "__main__":
    main()

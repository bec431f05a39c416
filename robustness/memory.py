"""Sends odd bodies to a live server, and says what memory its processes take as they come.

The bodies are those of ``fuzz.py``. The process for HTTP must not grow with what is sent; the engine's and those for
long bodies and schemas are started, and load their libraries, once.

    python -m robustness.memory --bodies 12000 --out benchmarks/results/cpu/memory.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from robustness.fuzz import SERVER, VOCAB, Cases
from robustness.live_server import resident_bytes, server_at, start_server, stop_server
from robustness.tiny_model import tiny_model
from shadowkv.eval.provenance import provenance

AT_ONCE = 8
LOOKS = 6
"""At the memory, while bodies are sent."""
MAX_MIB = 32
"""That the process for HTTP may grow by after the first look."""


async def send(url: str, bodies: int, seed: int) -> dict[str, Any]:
    """What processes take in MiB, by the number of bodies sent, and how many answers had each status."""
    server, statuses, looks = server_at(url), Counter[str](), []
    turns = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        cases = Cases((await client.get("/openapi.json")).json(), seed)

        async def one(number: int) -> None:
            case = cases.make(number)
            kind = {} if case.content_type is None else {"content-type": case.content_type}
            async with turns:
                try:
                    answer = await client.post(case.path, content=case.raw, headers=kind)
                except httpx.LocalProtocolError:  # no header can have such a content type
                    statuses["not sent"] += 1
                else:
                    statuses[str(answer.status_code)] += 1

        def look(sent: int) -> None:
            looks.append({"bodies": sent, **{name: size >> 20 for name, size in resident_bytes(server).items()}})
            print(looks[-1], flush=True)

        look(0)
        each = bodies // LOOKS
        for number in range(LOOKS):
            await asyncio.gather(*map(one, range(number * each, (number + 1) * each)))
            look((number + 1) * each)
    return {"mib": looks, "statuses": dict(sorted(statuses.items()))}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=12_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    args = parser.parse_args()
    with tiny_model(vocab_size=VOCAB) as folder:
        process, url = start_server({"model": folder, **SERVER, "disable_uvicorn_access_log": True})
        try:
            found = asyncio.run(send(url, args.bodies, args.seed))
        finally:
            stop_server(process)
    if args.out is not None:
        args.out.write_text(json.dumps({**provenance(), **found}, indent=1) + "\n", encoding="utf-8")
    grown = found["mib"][-1]["http"] - found["mib"][1]["http"]
    failed = {status: count for status, count in found["statuses"].items() if status.startswith("5")}
    print(f"HTTP's process grew by {grown} MiB after the first look; {found['statuses']}")
    return 1 if grown > MAX_MIB or failed else 0


if __name__ == "__main__":
    sys.exit(main())

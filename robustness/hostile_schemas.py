"""Asks a live server for JSON by schemas that never compile, and measures how long others wait for theirs.

Nine clients at a time send ever new hostile schemas. Meanwhile others ask, over and over, for JSON by a schema whose
grammar is kept and by plain schemas that are new, each of a client of its own. Then the server is told to end while
nine hostile ones are tried. The same without hostile clients comes first.

    python -m robustness.hostile_schemas --out benchmarks/results/cpu/hostile_schemas.json
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from robustness.live_server import start_server
from shadowkv.eval.provenance import provenance

AT_ONCE = 9
MAX_SECONDS, MAX_TO_END = 1.0, 12.0
"""What must hold: of others' JSON at the 99th percentile, and from SIGTERM to the end."""
PAUSE = 0.1
"""Seconds between two requests of one of the others."""


def pattern(text: str) -> dict[str, Any]:
    """A schema of strings that match ``text``."""
    return {"type": "string", "pattern": text}


def hostile(number: int) -> dict[str, Any]:
    """A schema that takes longer than anybody waits; each number has its own."""
    some = number % 40
    kinds = [
        pattern(f"(.{{0,3}}a?){{0,{20 + some}}}"),
        pattern(f"(.{{0,4}}b?){{0,{20 + some}}}c"),
        pattern(f".{{0,{60 + some}}}" * 4),
        pattern(f"(.{{0,{60 + some}}}x){{4}}"),
        pattern("[a-z]?" * (290 + some)),
        pattern("(a|b)?" * (290 + some)),
        pattern(f"(.?.?){{{100 + some}}}"),
        pattern(f"(.?.?.?){{{70 + some}}}z"),
        pattern(f"((.{{0,9}}){{0,9}}){{0,{9 + some}}}"),
        {"type": "object", "propertyNames": pattern(f"(.{{0,3}}a?){{0,{20 + some}}}")},
        {"type": "object", "patternProperties": {f"(.{{0,3}}a?){{0,{20 + some}}}": {"type": "integer"}}},
        {"type": "array", "items": pattern(f".{{0,{60 + some}}}" * 4)},
        {
            "type": "object",
            "properties": {f"p{i}": {} for i in range(300 + some)},
            "minProperties": 100,
            "maxProperties": 200,
        },
    ]
    return kinds[number % len(kinds)]


def plain(number: int) -> dict[str, Any]:
    """A small schema without a pattern that nobody has asked for."""
    return {"type": "object", "properties": {f"name_{number}": {"type": "integer"}}, "required": [f"name_{number}"]}


def kept(number: int) -> dict[str, Any]:
    """A schema with a pattern, always the same."""
    return pattern("[a-c]{1,3}")


class Clients:
    """Threads that ask until they are told to stop, and what they were answered."""

    def __init__(self, url: str) -> None:
        self._url, self._stop, self._threads = url, threading.Event(), list[threading.Thread]()
        self.numbers, self.answers, self.seconds = count(), Counter[str](), dict[str, list[float]]()

    def start(self, name: str, schema: Callable[[int], dict[str, Any]], pause: float) -> None:
        """One more of them; its requests' seconds are kept under its name."""
        thread = threading.Thread(target=self._ask, args=(name, schema, pause), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask(self, name: str, schema: Callable[[int], dict[str, Any]], pause: float) -> None:
        with httpx.Client(base_url=self._url, timeout=300) as client:
            while not self._stop.is_set():
                form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(next(self.numbers))}}
                began = time.monotonic()
                try:
                    status = str(
                        client.post(
                            "/v1/completions", json={"prompt": "a", "max_tokens": 8, "response_format": form}
                        ).status_code
                    )
                except httpx.HTTPError as error:
                    status = type(error).__name__
                self.seconds.setdefault(name, []).append(time.monotonic() - began)
                self.answers[f"{name} {status}"] += 1
                self._stop.wait(pause)

    def stop(self) -> None:
        """Lets each end with its answer."""
        self._stop.set()

    def figures(self) -> dict[str, Any]:
        """By name: how many were answered, and the median, 99th percentile and most of their seconds."""
        return {
            name: {
                "requests": len(seconds),
                "p50_s": round(statistics.median(seconds), 3),
                "p99_s": round(sorted(seconds)[int(0.99 * (len(seconds) - 1))], 3),
                "most_s": round(max(seconds), 3),
            }
            for name, seconds in sorted(self.seconds.items())
        }


def others(url: str) -> Clients:
    """Two clients whose JSON is like anybody's."""
    clients = Clients(url)
    clients.start("kept pattern", kept, PAUSE)
    clients.start("new plain schema", plain, PAUSE)
    return clients


def measure(model: str, seconds: float) -> Iterator[tuple[str, Any]]:
    """Figures and their names, as they come."""
    process, url = start_server({"model": model, "max_model_len": 2048, "disable_uvicorn_access_log": True})
    with process:
        for name, attackers in (("without", 0), ("with nine hostile clients", AT_ONCE)):
            hostiles, clients = Clients(url), others(url)
            for _ in range(attackers):
                hostiles.start("hostile", hostile, 0.0)
            time.sleep(seconds)
            clients.stop()
            yield name, clients.figures() | {"answers": dict(clients.answers + hostiles.answers)}
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        try:
            process.wait(120)
        finally:
            process.kill()
            hostiles.stop()
        yield "seconds from SIGTERM to the end", round(time.monotonic() - began, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="without and with them (default: %(default)g each)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, figure in measure(args.model, args.seconds):
        figures[name] = figure
        print(name, json.dumps(figure, indent=1), flush=True)
    attacked = figures["with nine hostile clients"]
    bad = [name for name in ("kept pattern", "new plain schema") if attacked[name]["p99_s"] > MAX_SECONDS]
    bad += [answer for answer in attacked["answers"] if answer.split()[-1] not in ("200", "504", "400")]
    if figures["seconds from SIGTERM to the end"] > MAX_TO_END:
        bad.append("the end")
    if args.out is not None:
        args.out.write_text(json.dumps({**provenance(), **figures}, indent=1) + "\n", encoding="utf-8")
    print("wrong: " + ", ".join(bad) if bad else "as it must be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

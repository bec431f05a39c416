"""Sends bodies to the server's application that are right, nearly right, and garbage; nothing may break.

They are made from the server's own OpenAPI schema, then changed: types swapped, numbers pushed to their bounds, keys
dropped, added, doubled, trees nested too deep, texts cut, bytes flipped, the wrong content type. Each one depends only
on the seed and its number. A small real engine answers, in this process. Every answer must be well-formed, with no
status 5xx except a full queue's 503, and no 200 for what ``judge.py`` considers nonsense; and the server must still be
healthy afterwards.

    python -m robustness.fuzz --bodies 100000
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import itertools
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from fastapi import FastAPI

from robustness.judging.judge import Judge
from robustness.judging.native import GENERATE
from robustness.judging.rules import CHAT_BATCH, INVOCATIONS, NEUTRAL, WITH_EFFECT, WITHOUT_EFFECT
from robustness.live_server import resident_bytes
from robustness.tiny_model import ENGINE, tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.process.client import EngineClient
from shadowkv.engine.process.launch import EngineProcess
from shadowkv.eval.provenance import provenance
from shadowkv.serve.app import build_app

VOCAB = 256
"""Every byte is a token: the model can write whatever a JSON schema asks for."""
SERVER = {
    **ENGINE,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_queued_seqs": 256,
    "default_max_tokens": 4,
    "kv_offload_gib": 0.0625,
}
IN_FLIGHT = 24
ANSWER_SECONDS = 60
EXAMPLES, MAX_FAULTS = 3, 1000
"""Reported faults: the first ones are informative enough."""
MODEL = "tiny"
"""The model's name on the server."""

UPLOAD = "/v1/files"
"""The route that takes forms."""

A_FILE = f"file-{'0' * 32}"
"""Stands for a file that the server has."""

OPTIONAL = 0.08
"""Probability that a body has an optional parameter."""
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    {"enum": ["x", 1, None]},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    {"anyOf": [{"type": "null"}, {"allOf": [{"type": "string", "minLength": 1, "maxLength": 3}]}, {"const": 1.5}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}}},
    {"$ref": "#"},
    {},
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALL_ITEM = {"call_id": "c1", "name": "f", "arguments": "{}"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hi"}}
MESSAGE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMAS[0]}}
TYPICAL: dict[str, tuple[Any, ...]] = {
    "model": (MODEL,),
    "n": (1, 2, 3),
    "best_of": (1, 2),
    "max_tokens": (1, 2, 5),
    "max_completion_tokens": (1, 2, 5),
    "min_tokens": (0, 1),
    "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1),
    "top_k": (-1, 0, 5),
    "min_p": (0, 0.1),
    "repetition_penalty": (1, 1.2),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (2, 0),
    "logit_bias": ({"65": 5, "3": -100}, {}, [[65, 1.5], ["ab", False]]),
    "stop": ("a", ["x", "yz"]),
    "stop_token_ids": ([5], []),
    "seed": (0, -1, 2**63 - 1),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        *({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS),
    ),
    "prompt": (
        "abc",
        "Hello, ",
        ["a", "b"],
        [1, 2, 3],
        [[1, 2], [3]],
        "x" * 520,
        {"prompt_string": "abc"},
        [1, "ab", 2],
    ),
    "messages": (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "What is it?"}]}],
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2", "tool_call_id": "c1"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}],
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "SGk="}}]}],
        [{"role": "user", "content": [DOCUMENT, {"type": "text", "text": "Hi"}]}],
        [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [{**RESULT, "content": "2"}]}],
    ),
    "tools": (
        *([TOOL], [{"type": "function", "function": {"name": "g"}}, TOOL]),
        *([{"type": "function", **TOOL["function"]}], [{"name": "f", "input_schema": SCHEMAS[0]}]),
    ),
    "input": (
        *("Hi", [{"role": "user", "content": "Hi"}], [{"type": "function_call", **CALL_ITEM}], {"a": 1}),
        [
            {
                "role": "user",
                "content": [{"type": "input_file", "file_data": "SGk="}, {"type": "input_text", "text": "?"}],
            }
        ],
        [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", **CALL_ITEM},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
    ),
    "max_output_tokens": (1, 2, 5),
    "reasoning": ({"effort": "low"},),
    "tool_choice": (
        *("none", "auto", "required", {"type": "function", "function": {"name": "f"}}),
        *({"type": "function", "name": "f"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "auto"}),
    ),
    "structured_outputs": (
        *({"json": schema} for schema in SCHEMAS),
        *(
            {"regex": "[a-c]{1,3}"},
            {"choice": ["a", "b\n"]},
            {"grammar": 'root ::= "a" root | "b"'},
            {"json_object": True},
        ),
        *({"regex": "(a"}, {"grammar": "root ::= root"}, {"structural_tag": {"type": "structural_tag"}}, {}),
    ),
    "guided_regex": ("[a-c]+", "(.{0,3}a?){0,20}", "("),
    "guided_choice": (["a", "b"], []),
    "guided_grammar": ('root ::= "a"', "x"),
    "regex": ("[a-c]+", ""),
    "ebnf": ('root ::= "a"', 1),
    "grammar": ('root ::= "a"', ""),
    "sampling_params": (
        *({"max_new_tokens": 2}, {"max_new_tokens": 3, "n": 2, "temperature": 0}),
        *({"max_new_tokens": 5, "regex": "[a-c]+"}, {"max_new_tokens": 2, "min_new_tokens": 2, "stop": "a"}, {}),
    ),
    "n_predict": (1, 2, 5, -1),
    "n_probs": (0, 2),
    "response_fields": (["content", "generation_settings/seed"], []),
    "json_schema": ({"type": "object"}, "{", []),
    "text": (
        {"format": {"type": "text"}},
        {"format": {"type": "json_object"}, "verbosity": "low"},
        *({"format": {"type": "json_schema", "name": "x", "schema": schema}} for schema in SCHEMAS),
    ),
    "output_config": ({"effort": "low"}, *({"format": {"type": "json_schema", "schema": one}} for one in SCHEMAS)),
    "thinking": ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}),
    "system": ("Be brief.", [{"type": "text", "text": "Be brief."}]),
    "stop_sequences": (["a"], []),
    "previous_response_id": ("resp-1",),
    "requests": ([{"custom_id": "a", "params": MESSAGE}], [{"custom_id": str(n), "params": {}} for n in range(3)]),
    "endpoint": ("/v1/chat/completions", "/v1/messages"),
    "input_file_id": (A_FILE,),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
    "arguments": ('{"a": 1}', "{}"),
    "parameters": (SCHEMAS[0],),
    "content": ("Hi", "What is it?", [{"type": "text", "text": "Hi"}], ""),
    "top_logprobs": (0, 2),
    "tokens": ([], [72, 105]),
    "name": ("a", "b.C-1_"),
}
"""What the schema does not say: meaningful values of its parameters."""

LONG_ENOUGH: tuple[Any, ...] = ("x" * 80, [5] * 100)
"""Prompts that can be saved."""

JUNK: tuple[Any, ...] = (
    *(None, True, False, "", "x", "0", "1e5", "null", [], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}),
    *(0, -1, 1, 2, 127, 128, 129, 2**31, 2**32, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("\ud800", "\udfff\ud800", "\0", "é", "日本語", "💥" * 40, "\u202e", "a" * 10_000, "../../etc/passwd", "{{7*7}}"),
    *([0] * 5_000, ["a"] * 500, {str(i): i for i in range(300)}, [[[[[[[[[]]]]]]]]], {"type": "text"}, [-1], [1.0]),
)
EXTRA_NAMES = (*NEUTRAL, *sorted(WITHOUT_EFFECT), *sorted(WITH_EFFECT))
EXTRA_NAMES += ("no_such_parameter", "", "\0", "\ud800", "__proto__", "self", "cls", "💥")
TYPES = (
    *(None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"),
    *("application/json; charset=utf-16", "application/problem+json", "APPLICATION/JSON", "application/jsonx", "\x00"),
)


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    content_type: str | None
    raw: bytes


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIKE = {CHAT_BATCH: (CHAT,), INVOCATIONS: (CHAT, TEXT)}
"""Routes whose bodies are those of others, or nearly."""

NOT_IN_BATCHES = ("n", "stream", "stream_options", "tools")


class Cases:
    """Makes requests for every route that takes a body.

    Args:
        openapi: the application's schema.
        seed: everything that a case depends on, together with its number.
    """

    def __init__(self, openapi: dict[str, Any], seed: int) -> None:
        self._named, self._seed = openapi["components"]["schemas"], seed
        posts = [(path, routes["post"]) for path, routes in openapi["paths"].items() if "post" in routes]
        contents = {path: post["requestBody"]["content"] for path, post in posts if "requestBody" in post}
        self.bodies = {
            path: kinds["application/json"] for path, kinds in contents.items() if "application/json" in kinds
        }
        self.has_uploads = UPLOAD in contents

    def make(self, number: int) -> Case:
        """The case with that number."""
        self._random = rng = random.Random(f"{self._seed} {number}")
        path, content = rng.choice([*self.bodies.items(), *((UPLOAD, None) for _ in range(self.has_uploads))])
        if content is None:
            return self._upload()
        if (like := LIKE.get(path)) is not None:
            content = self.bodies[rng.choice(like)]
        tree = self._valid(content["schema"])
        if path == CHAT_BATCH:
            tree = {name: value for name, value in tree.items() if name not in NOT_IN_BATCHES}
            tree["messages"] = [tree["messages"]] * rng.choice((1, 2))
        if path == GENERATE:
            tree.pop("text", None)
            tree.pop("input_ids", None)
            tree |= rng.choice(
                ({"text": "abc"}, {"text": ["a", "b"]}, {"input_ids": [1, 2]}, {"input_ids": [[1], [2]]})
            )
        if path == "/cache/save" and "messages" not in tree and rng.random() < 0.5:
            tree["prompt"] = rng.choice(LONG_ENOUGH)
        for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 2, 3))):
            tree = self._changed(tree)
        dumped = json.dumps(tree, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
        raw = dumped.encode("utf-8", "surrogatepass")
        if rng.random() < 0.15:
            raw = self._garbled(raw)
        return Case(path, rng.choice(TYPES) if rng.random() < 0.04 else "application/json", raw)

    def _upload(self) -> Case:
        """A form with a file, whole or not."""
        rng = self._random
        boundary = rng.choice(("x", "y" * 70, "z" * 300, "-"))
        content = rng.choice((b"", b"Hi", rng.randbytes(200), b"--x\r\n", b"a" * 2**17))
        parts = [(b'name="purpose"', b"batch"), (b'name="file"; filename="a.jsonl"', content)]
        parts += rng.choice(([], [], [(b'name="more"', b"1")] * 20, [parts[1]], [(b"name=", b"")]))
        rng.shuffle(parts)
        head = b"--" + boundary.encode()
        pieces = [head + b"\r\nContent-Disposition: form-data; " + name + b"\r\n\r\n" + text for name, text in parts]
        raw = b"\r\n".join((*pieces, head + b"--\r\n"))
        kind = f"multipart/form-data; boundary={boundary}" if rng.random() < 0.9 else rng.choice(TYPES)
        return Case(UPLOAD, kind, self._garbled(raw) if rng.random() < 0.5 else raw)

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _valid(self, schema: dict[str, Any], name: str = "") -> Any:
        """A value that follows the schema, though not always all of the server's requirements."""
        rng = self._random
        if name in TYPICAL and rng.random() < 0.8:
            return rng.choice(TYPICAL[name])
        if "$ref" in schema:
            return self._valid(self._named[schema["$ref"].rsplit("/", 1)[1]], name)
        if branches := schema.get("anyOf", schema.get("oneOf")):
            return self._valid(rng.choice(branches), name)
        if "const" in schema or "enum" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            required = schema.get("required", ())
            chosen = [item for item in schema["properties"].items() if item[0] in required or rng.random() < OPTIONAL]
            return {key: self._valid(value, key) for key, value in chosen}
        if kind == "array":
            return [self._valid(schema["items"]) for _ in range(rng.randrange(schema.get("minItems", 0), 4))]
        return rng.choice(
            {
                "string": ("a", "some text", "naïve", "\n"),
                "integer": (0, 1, 3, 20),
                "number": (0, 0.5, 1),
                "boolean": (True, False),
                "object": ({}, {"5": 1}),
            }.get(str(kind), (None,))
        )

    def _changed(self, tree: Any) -> Any:
        """``tree`` with one change at a random place."""
        rng = self._random
        tree = json.loads(json.dumps(tree))  # typical values are shared
        places = list(_places(tree))
        if not places or rng.random() < 0.02:
            return rng.choice(JUNK)
        parent, key = rng.choice(places)
        value, kind = parent[key], rng.randrange(8)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(EXTRA_NAMES)] = rng.choice([*JUNK, *NEUTRAL.values()])
        elif kind == 2:
            parent[key] = [value] * rng.choice((1, 2, 200))
        elif kind == 3:
            other, place = rng.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                parent[key], other[place] = other[place], json.loads(json.dumps(value))
        elif type(value) in (int, float) and abs(value) < 2**64 and kind < 6:
            sign = rng.choice((1, -1))
            near = value + sign, value + sign * 1e-9, -value, float(value), str(value)
            parent[key] = rng.choice((*near, sign * 2 ** rng.randrange(70)))
        else:
            parent[key] = rng.choice(JUNK)
        return tree

    def _garbled(self, raw: bytes) -> bytes:
        """``raw`` with a change that usually makes it invalid JSON."""
        rng = self._random
        at, length = rng.randrange(len(raw) + 1), rng.randrange(1, 20)
        colons = [i for i, byte in enumerate(raw) if byte == ord(":")] or [0]
        depth, colon = 10 ** rng.randrange(1, 6), rng.choice(colons) + 1
        deep = rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
        return rng.choice(
            (
                raw[:at],
                raw[:at] + raw[at + length :],
                raw[:at] + rng.randbytes(length) + raw[at:],
                raw[:at] + bytes((b ^ 1 << rng.randrange(8)) for b in raw[at : at + 1]) + raw[at + 1 :],
                rng.randbytes(10 * length),
                raw + raw,
                raw[:colon] + deep + b',"metadata":' + raw[colon:],
                raw[:colon] + b"9" * depth + b',"metadata":' + raw[colon:],
                raw.replace(b"{", b'{"n": 1, "prompt": 5, ', 1),  # doubled keys: the last one counts
                raw[:-1] + b', "n": 2, "model": "' + MODEL.encode() + b'"}',
                raw.replace(b'"', b"'"),
                b"\xef\xbb\xbf" + raw,
                raw.decode("utf-8", "replace").encode("utf-16"),
                raw.replace(b",", b",,", 1),
                raw[:-1] + b",}",
                b"/* */" + raw,
                b"",
            )
        )


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree that holds a value: its container and its key there. Of long lists only the first ten."""
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree[:10]))
    for key, value in items:
        yield tree, key
        yield from _places(value)


@dataclass
class Fuzz:
    """One run.

    Args:
        client: sends requests to the application.
        cases: the requests.
        judge: what answers are checked against.
        file: id of a file that the server has.
    """

    client: httpx.AsyncClient
    cases: Cases
    judge: Judge
    file: str = A_FILE
    statuses: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    async def run(self, bodies: int, seconds: float) -> None:
        """Sends requests until there have been enough, or time is up."""
        start, numbers = time.monotonic(), itertools.count()

        async def work() -> None:
            while time.monotonic() < start + seconds and self.faults.total() < MAX_FAULTS:
                if (number := next(numbers)) >= bodies:
                    break
                if number and number % max(1, bodies // 20) == 0:
                    passed = time.monotonic() - start
                    left = passed / number * (bodies - number)
                    progress = f"{number} of {bodies} bodies, {self.faults.total()} faults, {passed:.0f} s"
                    print(f"{progress}, about {left:.0f} s left", file=sys.stderr, flush=True)
                await self._one(number)

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))

    async def _one(self, number: int) -> None:
        case = self.cases.make(number)
        headers = {} if case.content_type is None else {"Content-Type": case.content_type}
        start, status = time.monotonic(), 0
        try:
            content = case.raw.replace(A_FILE.encode(), self.file.encode())
            sent = self.client.post(case.path, content=content, headers=headers)
            response = await asyncio.wait_for(sent, ANSWER_SECONDS)
            status = response.status_code
            reason = self.judge.nonsense(case.path, case.content_type, case.raw) if status == 200 else None
            fault = f"200 for nonsense: {reason}" if reason else self.judge.malformed(case.path, case.raw, response)
        except Exception as error:
            fault = f"no answer: {type(error).__name__}: {error}"
        self.slowest = max(self.slowest, (time.monotonic() - start, number))
        self.statuses[case.path][status] += 1
        if fault is not None:
            self.faults[fault] += 1
            if self.faults[fault] <= EXAMPLES:
                raw = case.raw[:500].decode("utf-8", "backslashreplace")
                self.examples.append({"number": number, "path": case.path, "fault": fault, "body": raw})


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1800, help="stop after (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary there, as JSON")
    return parser.parse_args(argv)


def fuzz(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a run, and whether it passed."""
    torch.set_num_threads(1)  # tiny tensors gain nothing from a second one
    with tiny_model(vocab_size=VOCAB) as folder:
        process = EngineProcess(EngineConfig(model=str(folder), kv_disk_dir=str(folder / "cache"), **SERVER))
        try:
            return asyncio.run(_fuzz(process.clients[0], args))
        finally:
            process.stop(10)


async def _fuzz(engine: EngineClient, args: argparse.Namespace) -> dict[str, Any]:
    app = build_app(engine, MODEL)
    try:
        return await _figures(app, engine, args)
    finally:  # as at the end of a server
        await app.state.drop()
        app.state.store.close()
        engine.disconnect()


async def _figures(app: FastAPI, engine: EngineClient, args: argparse.Namespace) -> dict[str, Any]:
    process = psutil.Process()
    # Uncaught exceptions become a status of 500, as behind a real server.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://fuzz") as client:

        async def known() -> Any:
            answer = await client.post("/v1/completions", json={"prompt": "abc", "temperature": 0})
            return answer.json()["choices"]

        before = await known()
        named = await client.post("/cache/save", json={"name": TYPICAL["name"][0], "prompt": "a" * 100})
        named.raise_for_status()  # a restore finds it, whichever bodies are answered first
        cases, judge = Cases(app.openapi(), args.seed), Judge(MODEL, engine.max_model_len, VOCAB)
        form = {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
        file = (await client.post(UPLOAD, **form)).raise_for_status().json()["id"]
        if cases.bodies.keys() != judge.rules.keys():
            raise SystemExit(f"the server takes {[*cases.bodies]}, but judge.py has rules for {[*judge.rules]}")
        run = Fuzz(client, cases, judge, file)
        start, memory = time.monotonic(), sum(resident_bytes(process).values())
        await run.run(args.bodies, args.seconds)
        seconds = time.monotonic() - start
        healthy = (await client.get("/health")).status_code == 200 and await known() == before
        stats = await engine.stats()
    bodies = sum(sum(counts.values()) for counts in run.statuses.values())
    left = stats.running + stats.waiting
    return {
        "ok": not run.faults and healthy and not left and bodies == args.bodies,
        "bodies": bodies,
        "seconds": round(seconds, 1),
        "seed": args.seed,
        "statuses": {path: dict(sorted(counts.items())) for path, counts in sorted(run.statuses.items())},
        "faults": dict(run.faults.most_common()),
        "examples": run.examples,
        "slowest, s": round(run.slowest[0], 2),
        "slowest number": run.slowest[1],
        "healthy afterwards": healthy,
        "requests left over": left,
        "memory": {"first MiB": memory >> 20, "last MiB": sum(resident_bytes(process).values()) >> 20},
    }


def main() -> int:
    """Command line; returns the exit status."""
    faulthandler.enable()  # a crash in native code reports its place
    args = parse()
    summary = fuzz(args)
    codes = sorted({status for counts in summary["statuses"].values() for status in counts})
    print(f"{'status':24}", *(f"{code or 'none':>8}" for code in codes))
    for path, counts in summary["statuses"].items():
        print(f"{path:24}", *(f"{counts.get(code, 0):8}" for code in codes))
    for name, value in summary.items():
        if name not in ("statuses", "examples"):
            print(f"{name:24} {value}")
    for example in summary["examples"]:
        print(example)
    if args.out:
        args.out.write_text(json.dumps(provenance() | summary, indent=1) + "\n", encoding="utf-8")
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""The fuzzer's judge: which bodies are nonsense, and which answers are not well-formed.

Written from the API's documents (OpenAI's, vLLM's for its extra parameters, docs/design/server.md for limits), not from
the server's code. It is lenient where they leave room: it need not find all nonsense, but what it finds must not be
answered with 200.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from robustness.judging.native import (
    APPLY_TEMPLATE,
    ASKS,
    GENERATE,
    KINDS,
    LLAMA,
    as_completion,
    ill_formed_native,
    native_rules,
)
from robustness.judging.rules import (
    CHAT_BATCH,
    COUNT_CHAT,
    INVOCATIONS,
    OTHER_NAMES,
    Rule,
    given,
    integer,
    loads,
    route_rules,
    sampling_rules,
    shared_rules,
    some,
    text,
)

ENDS = (["stop"], ["length"], ["tool_calls"])
"""Finish reasons of a choice, in all of its chunks."""

MESSAGES = "/v1/messages"
CONVERSATIONS = ("/v1/responses", MESSAGES)
FILES = "/v1/files"
BATCHES = ("/v1/batches", f"{MESSAGES}/batches")
"""Routes of APIs other than that of chats."""

STOPS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
"""Reasons for which a message ends."""

PAGE = 64
"""Tokens that are saved together."""


@dataclass(frozen=True)
class Judge:
    """Knows what is served: the model's name, its longest sequence and its number of tokens; each byte is a token."""

    model: str
    limit: int
    vocab: int

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """By route, what a body has to be, parameter by parameter."""
        sampling = sampling_rules(shared_rules(self.model, self.vocab), self.vocab)
        return {**route_rules(self.model, self.vocab), **native_rules(sampling, self.vocab)}

    # -- requests --------------------------------------------------------------------------------------------------

    def nonsense(self, path: str, content_type: str | None, raw: bytes) -> str | None:
        """Why this request must not be answered with 200, if that is so."""
        if path == FILES:
            return None if (content_type or "").lower().startswith("multipart/form-data") else "no form"
        kind = (content_type or "").split(";")[0].strip().lower()
        if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
            return "the content type is not JSON"
        try:
            body = loads(raw)
        except (ValueError, RecursionError):
            return "the body is not JSON"
        path = _route(path, body)
        if not self.rules[path](body):
            return "a parameter's type or range"
        body = dict(given(body))
        texts = "prompt" in body, "content" in body, bool(body.get("messages"))  # content is llama.cpp's name
        if path == "/tokenize" and sum(texts) != 1:
            return "not one of prompt, content and messages"
        if path == "/tokenize" and "prompt" in body and "parse_special" in body:
            return "parse_special for a prompt"
        if path == GENERATE and ("text" in body) == ("input_ids" in body):
            return "neither or both of text and input_ids"
        if path in ASKS:
            return self._contradiction(as_completion(path, body), chat=False)
        if path == "/cache/save":
            return self._unsavable(body)
        if path == CHAT_BATCH:
            found = [self._contradiction({**body, "messages": chat}, True) for chat in body["messages"]]
            return next(filter(None, found), None)
        if path.endswith("completions"):
            return self._contradiction(body, "messages" in body)
        if path == "/v1/responses":
            return self._response_contradiction(body)
        return self._message_contradiction(body) if path == MESSAGES else None

    def _response_contradiction(self, body: dict[str, Any]) -> str | None:
        """Contradictions in a request for a response."""
        form = ((body.get("text") or {}).get("format") or {}).get("type", "text")
        if body.get("background") and (body.get("stream") or body.get("store") is False):
            return "in the background, and streamed or not kept"
        if body.get("top_logprobs") and "message.output_text.logprobs" not in body.get("include", []):
            return "top_logprobs without log-probabilities"
        return self._of_conversation(body, form in ("json_object", "json_schema"), body.get("tool_choice", "auto"))

    def _message_contradiction(self, body: dict[str, Any]) -> str | None:
        """Contradictions in a request for a message."""
        choice = (body.get("tool_choice") or {}).get("type", "auto")
        constrained = (body.get("output_config") or {}).get("format") is not None
        named = (body.get("tool_choice") or {}).get("name") is not None
        wrong = self._of_conversation(body, constrained, choice)
        return wrong or ("a name without a tool's choice" if named != (choice == "tool") else None)

    @staticmethod
    def _of_conversation(body: dict[str, Any], constrained: bool, choice: Any) -> str | None:
        """What both have: ``choice`` says whether tools are called, ``constrained`` whether JSON follows a schema."""
        asked = body.get("max_output_tokens", body.get("max_tokens"))
        forced = choice not in ("none", "auto")
        fixed = body.get("min_tokens", 0) > 0 or body.get("ignore_eos", False)
        wrong = {
            "calls of no tools": forced and not body.get("tools"),
            "calls or JSON of a given length": (forced or constrained) and fixed,
            "calls or JSON": bool(body.get("tools")) and choice != "none" and constrained,
            "min_tokens above the longest answer": asked is not None and body.get("min_tokens", 0) > asked,
        }
        return next((reason for reason, is_so in wrong.items() if is_so), None)

    def _unsavable(self, body: dict[str, Any]) -> str | None:
        """Contradictions in a prompt to be saved: it needs a page, and a token after that."""
        if ("prompt" in body) == ("messages" in body):
            return "neither or both of prompt and messages"
        if body.get("parse_special") and "prompt" in body:
            return "parse_special for a prompt"
        longest = max(map(self._length, prompts(body)))
        if "prompt" in body and longest < PAGE:
            return "nothing that can be shared"
        return "longer than the context" if longest + 1 > self.limit else None

    def _contradiction(self, body: dict[str, Any], chat: bool) -> str | None:
        """Contradictions in a request for text."""
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body]
        limits += [most for most in (body.get("n_predict"),) if most not in (None, -1)]  # llama.cpp's name
        least = 0 if body.get("echo") and not chat else 1
        asked = min(limits, default=1)
        cut = body.get("truncate_prompt_tokens", self.limit + 1)  # -1: to what fits
        rules = [body[name] for name in ("structured_outputs", *OTHER_NAMES) if name in body]
        formatted = body.get("response_format", {}).get("type", "text") != "text"
        constrained = bool(rules) or formatted
        last = (body["messages"][-1] if chat else {}).get("role")
        choice = body.get("tool_choice", "auto") if chat else "none"
        forced = choice not in ("none", "auto")
        wrong = {
            "best_of is not n": body.get("best_of", body.get("n", 1)) != body.get("n", 1),
            "stream_options without stream": "stream_options" in body and not body.get("stream"),
            "two limits that differ": len(set(limits)) > 1,
            "nothing to generate": asked < least,
            "min_tokens above max_tokens": bool(limits) and body.get("min_tokens", 0) > asked,
            "JSON of a given length": constrained and (body.get("min_tokens", 0) > 0 or body.get("ignore_eos", False)),
            "several kinds of rules": len(rules) + formatted > 1,
            "nothing to continue": bool(body.get("continue_final_message")) and last != "assistant",
            "calls of no tools": forced and not body.get("tools"),
            "calls of a given length": forced and (body.get("min_tokens", 0) > 0 or body.get("ignore_eos", False)),
            "calls or JSON": bool(body.get("tools")) and choice != "none" and constrained,
            "top_logprobs without logprobs": chat and body.get("top_logprobs", 0) != 0 and not body.get("logprobs"),
            "longer than the context": min(cut, max(map(self._length, prompts(body)))) + asked > self.limit,
            "empty": not chat and min(map(self._length, prompts(body))) == 0,
        }
        return next((reason for reason, is_so in wrong.items() if is_so), None)

    @staticmethod
    def _length(prompt: str | list[int]) -> int:
        """Tokens of a prompt; for a chat a lower bound: its template adds some."""
        return len(prompt) if isinstance(prompt, list) else len(prompt.encode())

    # -- answers ---------------------------------------------------------------------------------------------------

    def malformed(self, path: str, raw: bytes, response: httpx.Response) -> str | None:
        """What is wrong with a response's form, if anything is."""
        try:
            if path.startswith(CONVERSATIONS) or path in BATCHES:
                return ill_formed(path, loads(raw) if response.status_code == 200 else {}, response)
            if response.status_code == 200:
                return self._answer(path, None if path == FILES else loads(raw), response)
            error = loads(response.content)["error"]
            counts = {"n_prompt_tokens", "n_ctx"} if _is_too_long(error) else set[str]()
            if {*error} - counts != {"message", "type", "param", "code"} or not error["message"]:
                return "an error of another shape"
            if path in LLAMA and (error["code"] != response.status_code or error["type"] not in KINDS):
                return "an error that is not llama.cpp's"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            return f"an answer that cannot be read: {type(problem).__name__}: {problem}"
        if response.status_code >= 500:
            full = response.status_code == 503 and "retry-after" in response.headers
            return None if full else f"{response.status_code}: {error['message']}"
        return None if path in LLAMA or error["type"] == "invalid_request_error" else "an error of another type"

    def _answer(self, path: str, body: Any, response: httpx.Response) -> str | None:
        path = _route(path, body)
        if path == FILES:
            return None if loads(response.content)["id"].startswith("file-") else "no file"
        if path == COUNT_CHAT:
            return None if integer(1)(loads(response.content)["input_tokens"]) else "no count"
        if path in (*ASKS, APPLY_TEMPLATE):
            return ill_formed_native(path, body, response)
        if path == "/detokenize":
            return None if text(loads(response.content)["prompt"]) else "no text"
        if path.startswith("/cache/"):
            found = loads(response.content)
            fine = {*found} == {"name", "tokens", "bytes", "seconds"} and found["tokens"] % PAGE == 0 < found["tokens"]
            return None if fine and found["name"] == body["name"] else "not what was saved"
        if path == "/tokenize":
            found = loads(response.content)
            tokens = [token["id"] if body.get("with_pieces") else token for token in found["tokens"]]
            fine = some(integer(0, self.vocab - 1))(tokens) and (found.get("count", len(tokens)) == len(tokens))
            return None if fine else "no tokens"
        events = stream_events(response.text) if body.get("stream") else [loads(response.content)]
        failed = next((event["error"] for event in events if "error" in event), None)
        if failed is not None:
            return None if failed["code"] == "queue_full" else f"a stream that failed: {failed['message']}"
        said, ends, steps = defaultdict[int, str](str), defaultdict[int, list[str]](list), defaultdict[int, int](int)
        for choice in (choice for event in events for choice in event["choices"]):
            part = choice.get("delta") or choice.get("message") or {}
            said[choice["index"]] += choice.get("text") or part.get("content") or ""
            ends[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
            scores = choice["logprobs"] or {}
            steps[choice["index"]] += len(scores.get("tokens") or scores.get("content") or ())
        of_chats = {"/v1/chat/completions": 1, CHAT_BATCH: len(body.get("messages") or ())}
        count = (body.get("n") or 1) * (of_chats[path] if path in of_chats else len(prompts(body)))
        if sorted(said) != list(range(count)) or not all(end in ENDS for end in ends.values()):
            return f"choices {sorted(said)} that end with {list(ends.values())}"
        if body.get("logprobs") not in (None, False) and min(steps.values()) == 0 and body.get("max_tokens") != 0:
            return "no log-probabilities"
        usage = [event["usage"] for event in events if event.get("usage")]
        if any(counts["prompt_tokens"] + counts["completion_tokens"] != counts["total_tokens"] for counts in usage):
            return "a usage that does not add up"
        form = (body.get("response_format") or {}).get("type")
        stops = "stop", "stop_token_ids", "include_stop_str_in_output"
        if form in ("json_object", "json_schema") and not any(map(body.get, stops)):
            for index, end in ends.items():
                if end == ["stop"] and not body.get("echo"):
                    loads(said[index].encode())  # raises if it cannot be read
        return None


def _is_too_long(error: dict[str, Any]) -> bool:
    return error.get("code") == "context_length_exceeded" or error["type"] == "exceed_context_size_error"


def _route(path: str, body: Any) -> str:
    """The route that answers a body: ``/invocations`` has no answers of its own."""
    if path != INVOCATIONS:
        return path
    is_chat = isinstance(body, dict) and body.get("messages") is not None
    return "/v1/chat/completions" if is_chat else "/v1/completions"


def prompts(body: dict[str, Any]) -> list[Any]:
    """Every prompt of a valid body; of a chat, all of its text."""
    if "messages" in body:
        contents = [message.get("content") or "" for message in body["messages"]]
        return ["".join(c if isinstance(c, str) else "".join(part.get("text") or "" for part in c) for c in contents)]
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and not all(map(integer(), prompt)) else [prompt]


def stream_events(content: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in content.split("\n\n") if line and not line.startswith(":")]
    if lines.pop() != "[DONE]":
        raise ValueError("the stream ended without [DONE]")
    return [loads(line.encode()) for line in lines]


# -- answers of responses and messages ---------------------------------------------------------------------------------


def ill_formed(path: str, body: dict[str, Any], response: httpx.Response) -> str | None:
    """What is wrong with the form of an answer of these routes, if anything; may raise ValueError or KeyError, too."""
    if response.status_code != 200:
        return _error(path, response)
    if path in BATCHES:
        return None if response.json()["id"] and "request_counts" in response.json() else "no batch"
    if path.endswith("/count_tokens"):
        return None if integer(1)(response.json()["input_tokens"]) else "no count"
    if not body.get("stream"):
        return _whole(path, response.json())
    events = _events(response.text)
    if path == MESSAGES:
        if events[-1]["type"] == "error":
            return None if events[-1]["error"]["type"] == "overloaded_error" else f"a stream that failed: {events[-1]}"
        fine = events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        return None if fine and events[-2]["delta"]["stop_reason"] in STOPS else "a stream without its ends"
    if [event["sequence_number"] for event in events] != [*range(len(events))]:
        return "events that are not counted"
    return (
        _whole(path, events[-1]["response"])
        if events[0]["type"] == "response.created"
        else "a stream without its start"
    )


def _whole(path: str, answer: dict[str, Any]) -> str | None:
    if path == MESSAGES:
        return None if answer["type"] == "message" and answer["stop_reason"] in STOPS else "no message"
    if answer["background"]:
        return None if answer["status"] == "queued" and answer["usage"] is None else "no response at work"
    fine = answer["object"] == "response" and answer["status"] in ("completed", "incomplete") and answer["output"]
    usage = answer["usage"]
    return None if fine and usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] else "no response"


def _error(path: str, response: httpx.Response) -> str | None:
    error = response.json()["error"]
    names = {"type", "message"} if path.startswith(MESSAGES) else {"type", "message", "param", "code"}
    counts = {"n_prompt_tokens", "n_ctx"} if error.get("code") == "context_length_exceeded" else set[str]()
    if set(error) - counts != names or not error["message"]:
        return "an error of another shape"
    full = response.status_code == 503 and "retry-after" in response.headers
    return f"{response.status_code}: {error['message']}" if response.status_code >= 500 and not full else None


def _events(content: str) -> list[Any]:
    parts = [event.split("\n") for event in content.split("\n\n") if event and not event.startswith(":")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    if [name.removeprefix("event: ") for name, _ in parts] != [event["type"] for event in events]:
        raise ValueError("events with other names than their types")
    return [event for event in events if event["type"] != "ping"]

"""An engine whose answers are known: what the prompt says decides what happens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from shadowkv.engine.engine import EngineStats
from shadowkv.engine.outputs import (
    CheckedTokens,
    LayerSelections,
    RequestTimes,
    TextOutput,
    TokenLogprobs,
    TokenSelections,
)
from shadowkv.engine.request import EngineBusy, EngineDead, EngineState, Request, RequestError
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.kv_cache import TierUse
from shadowkv.prefix_cache.prefix_cache import PrefixSegment
from shadowkv.prefix_cache.protocol import DiskTooSlow, NotDone, Saved, UnknownName, UnusableName
from shadowkv.prefix_cache.stats import TierStats

REPLY = "Hello wörld."

SELECTIONS = TokenSelections(
    length=100,
    cell=16,
    everything=False,
    exact=[(0, 8), (64, 100)],
    groups=[LayerSelections((0, 2), 1, [1, 3], [0.75, 0.25])],
)
"""Of every token but the first."""

SAVE_ERRORS = {kind.__name__: kind for kind in (UnknownName, UnusableName, NotDone, DiskTooSlow)}
"""What a restore of such a name ends with."""


class FakeTokenizer:
    """Every character is a token."""

    vocab_size = 0x110000
    special_tokens = {"bos_token": "\x01"}  # noqa: RUF012
    chat_template: str | None = "{% for message in messages %}…{% endfor %}"
    chat_encoder = SimpleNamespace(prepare=lambda: None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text.encode()  # as a real one, no lone surrogates
        return [1] * add_special_tokens + [ord(character) for character in text]

    def spelling(self, ids: Sequence[int]) -> list[str]:
        return [f"'{chr(token)}'" for token in ids]

    def least_tokens(self, text: str) -> int:
        return 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise ValueError("the chat template refuses these messages: a user must begin")
        self.rendered = messages, variables
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        *,
        parse_special: bool = False,
        add_special_tokens: bool = False,
        check: Callable[[str], None] = lambda text: None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        check(text)
        return self.encode(text, add_special_tokens)


class FakeEngine:
    """Says its ``reply``, a character at a time.

    A prompt with FAIL ends with an error after two tokens, with DIE the engine dies there, with HANG the answer stops
    there and never ends, with BUG it raises at once, with BUSY the queue is full, with SLEEP nothing comes for
    ``silence`` seconds.
    """

    model_name, model_path = "fake", "/models/fake.gguf"
    advice: str | None = None
    max_model_len, default_max_tokens = 200, 20
    max_queued_seqs = 200
    fingerprint = "01234567"
    max_num_seqs = 4
    scheduling_policy = "fair"
    drafts = False
    quality_meter = 0.0
    kv = "fake"
    max_concurrency = 2.5
    role = "both"

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.is_alive = True
        self.sampling_defaults: dict[str, float] = {}
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.running: set[str] = set()
        self.most_running = 0
        self.room = 10**6
        self.reply = REPLY
        self.silence = 0.5
        self.stop_string: str | None = None
        self.saved: dict[str, Saved] = {}

    async def stats(self, usage: bool = False) -> EngineStats:
        if not self.is_alive:
            raise self.end()
        tiers = {"device": TierUse(10, 100), "host": TierUse(20, 200), "states": TierUse(3, 30)}
        prefixes = {
            "device": TierStats(10, 100, 640, 2),
            "host": TierStats(7, 70, 128, 3, 4000, 5, 6, 1500, 0.25),
            "disk": TierStats(9, 90, 64, 4, 3000, 1, 2, 500, 0.5, 8, 11, 12, 6, other_files=13),
        }
        fetches = FetchCounts(1000, 300, 614400)
        return EngineStats(len(self.running), 3, tiers, fetches, prefixes, 1, 0.25 if usage else None, 4096)

    @property
    def engines(self) -> Sequence[FakeEngine]:
        return (self,)

    @property
    def serves(self) -> bool:
        return self.is_alive

    @property
    def state(self) -> EngineState:
        return "ok" if self.is_alive else "dead"

    def end(self) -> EngineDead:
        return EngineDead("the engine has died: boom")

    def connect(self) -> None:
        pass

    def disconnect(self) -> None:
        pass

    async def segments(self, most: int) -> tuple[list[PrefixSegment], int]:
        if not self.is_alive:
            raise self.end()
        return [PrefixSegment("a1", 0, 640, True, True, ("device", "disk"))][:most], 1

    async def compile_grammar(self, rules: str, one_line: bool = False, tenant: str = "") -> None:
        if "EMPTY" in rules:
            raise RequestError("the JSON schema cannot be followed", "response_format")

    def request(
        self, prompt_token_ids: list[int], params: SamplingParams, tenant: str = "", priority: int = 0
    ) -> Request:
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(params, name) or 0) > 20:
                raise RequestError(f"{name}={count} is more than 20", name)
        asked = 1 if params.max_tokens is None else params.max_tokens
        least, most = min(prompt_token_ids, default=-1), max(prompt_token_ids, default=-1)
        if not 0 <= least <= most < self.tokenizer.vocab_size:
            raise RequestError("a prompt needs tokens, of the vocabulary", "prompt")
        if len(prompt_token_ids) + asked > self.max_model_len:
            text = (
                f"{len(prompt_token_ids)} prompt tokens + {asked} are more than the {self.max_model_len} of the model"
            )
            raise RequestError(text, "max_tokens")
        return Request(uuid.uuid4().hex, prompt_token_ids, params, asked, seed=0)

    async def save(self, name: str, request: Request, observe: Callable[..., Any]) -> Saved:
        with observe() as see:
            async for _, output in self.generate([request]):
                see(output)
        self.saved[name] = Saved(len(request.prompt_token_ids), 1000)
        return self.saved[name]

    async def restore(self, name: str) -> Saved:
        if name in SAVE_ERRORS:
            raise SAVE_ERRORS[name](f"nothing comes of {name}")
        return self.saved[name]

    async def generate(
        self, requests: Sequence[Request], timeout: float | None = None
    ) -> AsyncIterator[tuple[int, TextOutput]]:
        """The outputs of all, and asyncio.TimeoutError after ``timeout`` seconds."""
        items: asyncio.Queue[tuple[int, TextOutput] | Exception | None] = asyncio.Queue()

        async def drain(index: int, request: Request) -> None:
            try:
                async for output in self.answer(request):
                    items.put_nowait((index, output))
                items.put_nowait(None)
            except Exception as error:
                items.put_nowait(error)

        timer = None
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, items.put_nowait, asyncio.TimeoutError())
        tasks = [asyncio.create_task(drain(*numbered)) for numbered in enumerate(requests)]
        try:
            left = len(tasks)
            while left:
                item = await items.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            if timer is not None:
                timer.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def answer(self, request: Request) -> AsyncIterator[TextOutput]:
        request_id, prompt_token_ids, params = request.request_id, request.prompt_token_ids, request.params
        assert request_id not in self.running
        prompt = self.tokenizer.decode(prompt_token_ids[:1000])
        self.prompts.append(prompt)
        self.params.append(params)
        self.running.add(request_id)
        self.most_running = max(self.most_running, len(self.running))
        try:
            if "BUG" in prompt:
                raise KeyError("a secret")
            if "BUSY" in prompt or len(self.running) > self.room:
                raise EngineBusy("7 requests are waiting already")
            if "SLEEP" in prompt:
                await asyncio.sleep(self.silence)
            times = RequestTimes(time.monotonic() - 4, *(time.monotonic() - ago for ago in (3, 1, 0.5)))
            scores = None
            if params.prompt_logprobs is not None:
                scores = [None, *(self._scores(token, params.prompt_logprobs) for token in prompt_token_ids[1:])]
            if params.max_tokens == 0:
                count = len(prompt_token_ids)
                yield TextOutput(request_id, [], "length", count, 0, 0, times, prompt_logprobs=scores)
            if params.return_progress:
                length, reading = len(prompt_token_ids), RequestTimes(times.arrival, times.scheduled)
                for prefilled in (2, length // 2):
                    await asyncio.sleep(0)
                    yield TextOutput(request_id, [], None, length, 0, 2, reading, prefilled=prefilled)
            reply = self.reply[: params.max_tokens]
            for count, character in enumerate(reply, 1):
                await asyncio.sleep(0)
                finish = None if count < len(reply) else "stop" if reply == self.reply else "length"
                if count == 3 and "DIE" in prompt:
                    self.is_alive = False
                    raise self.end()
                if count == 3 and "HANG" in prompt:
                    await asyncio.Event().wait()
                failed = count == 3 and "FAIL" in prompt
                token = ord(character)
                yield TextOutput(
                    request_id=request_id,
                    text=character,
                    token_ids=[token],
                    logprobs=None if params.logprobs is None else [self._scores(token, params.logprobs)],
                    finish_reason="error" if failed else finish,
                    error="not finite" if failed else None,
                    prompt_tokens=len(prompt_token_ids),
                    completion_tokens=count,
                    cached_tokens=min(2, len(prompt_token_ids)),
                    times=times,
                    prompt_logprobs=scores if count == 1 else None,
                    stop_string=self.stop_string if finish == "stop" else None,
                    stop_reason=self.stop_string if finish == "stop" else None,
                    selections=[None if count == 1 else SELECTIONS] if params.return_selections else None,
                    prefilled=len(prompt_token_ids) if params.return_progress and count == 1 else None,
                    checked=CheckedTokens(count // 2, count / 16) if self.quality_meter and count > 1 else None,
                )
                if failed:
                    return
        finally:
            self.running.discard(request_id)

    @staticmethod
    def _scores(token: int, alternatives: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.5, {token + i: -0.5 - i for i in range(alternatives)})

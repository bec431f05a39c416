"""A decode step that runs out of memory before its due pages are written, while it writes them, or when its tokens are
chosen. Its requests fail, or their answers are those of undisturbed steps; and every page comes back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import test_layer_kinds
import torch
from test_engine import assert_empty, drain, prompt, tokens

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.sampler import Sampler
from shadowkv.kvcache.compression.pages import Compression
from shadowkv.kvcache.compression.storing import Storing
from shadowkv.kvcache.decode.decode_attention import Decode
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence

Fault = Callable[[pytest.MonkeyPatch, Engine], Any]
"""Makes the next decode step that compresses run out of memory, once. Returns the list of the errors raised."""

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
TURBO = "turbo:min_budget=640"
"""With narrow keys, ``turbo`` alone would select all tokens of these sequences."""


def failing(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: Callable[..., bool], after: bool
) -> list[int]:
    """``owner.name`` runs out of memory at the first call for which ``when`` holds, before or after its work."""
    function, raised = getattr(owner, name), []

    def broken(self: Any, *what: Any) -> Any:
        fails = not raised and when(self, *what)
        result = None if fails and not after else function(self, *what)
        if fails:
            raised.append(1)
            raise torch.OutOfMemoryError("no memory")
        return result

    monkeypatch.setattr(owner, name, broken)
    return raised


def before_pages(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    return failing(monkeypatch, Compression, "compress_pages", lambda *_: True, after=False)


def within_pages(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    return failing(monkeypatch, Compression, "write", lambda *_: bool(engine.scheduler.running), after=True)


def after_pages(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    compress, done = Compression.compress_pages, []
    monkeypatch.setattr(Compression, "compress_pages", lambda *what: done.append(1) or compress(*what))
    return failing(monkeypatch, Decode, "batch", lambda *_: bool(done), after=False)


def before_tails(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    return failing(monkeypatch, Storing, "store_tokens", lambda *_: bool(engine.scheduler.running), after=False)


def within_tails(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    return failing(monkeypatch, Storing, "store_tokens", lambda *_: bool(engine.scheduler.running), after=True)


def between_tails(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    begun = list[CachedSequence]()

    def has_another(pool: SequencePool, sequence: CachedSequence, end: int) -> bool:
        """Whether another sequence has a new segment, and no pages in it yet."""
        begun.append(sequence)
        return any(not one.path[-1].pages for one in begun[:-1])

    return failing(monkeypatch, SequencePool, "begin_segment", has_another, after=False)


def choosing(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """After the step, which has appended its tokens."""
    return failing(monkeypatch, Sampler, "choose", lambda *_: len(engine.scheduler.running) == 2, after=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> test_layer_kinds.Model:
    return test_layer_kinds.make("qwen2", tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "plain"])
@pytest.mark.parametrize(
    ("kv", "fault"),
    [
        *product(("shadowkv", TURBO, "turbo-host", "quest"), (before_pages, within_pages, after_pages)),
        *product(("turbo", "turbo-host"), (before_tails, within_tails, between_tails)),
        *product(("full", TURBO), (choosing,)),
    ],
)
def test_a_step_without_memory_loses_no_page(
    model: test_layer_kinds.Model, monkeypatch: pytest.MonkeyPatch, kv: str, fault: Fault, ahead: bool
) -> None:
    tails = {before_tails: (200, 210), within_tails: (200, 210), between_tails: (200, 200)}.get(fault)
    outputs = []
    for disturbed in (False, True):
        # In bfloat16, two of the 256 logits are often equal, and prompts' passes, whose shapes depend on the time they
        # take, then decide between them.
        engine = test_layer_kinds.engine_of(model, kv=f"{kv}:budget=0.5" if tails else kv, dtype="float32")
        engine.decode_steps.run_ahead = ahead
        for number, length in enumerate(tails or (1000, 1100)):
            engine.add_request(str(number), prompt(number, length), LONG)
        while len(engine.scheduler.running) < 2:
            engine.step()
        raised = fault(monkeypatch, engine) if disturbed else []
        outputs.append(drain(engine))
    assert raised, "the fault did not occur"
    for name, of_request in outputs[1].items():
        if ahead:
            assert tokens(of_request) == tokens(outputs[0][name])
        else:
            assert of_request[-1].finish_reason == "error"
    assert_empty(engine)

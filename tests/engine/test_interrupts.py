"""Ctrl-C, a real signal, at lines of all of the engine and its cache: nothing leaks, and the LLM can be used again."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_engine import assert_empty, prompt

import shadowkv
from shadowkv import LLM, SamplingParams
from shadowkv.engine.engine import interrupts_deferred

FOLDERS = tuple(str(Path(shadowkv.__file__).parent / name) for name in ("engine", "kvcache"))
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPTS = [prompt(1, 30), prompt(2, 300), prompt(3, 5), prompt(1, 200)]
EVERY = 3
"""Lines to each that is interrupted; a run with other seeds may have others."""


class InterruptAt:
    """Within, sends SIGINT when a line is come to that none of ``seen`` is, the ``first`` of every few such."""

    def __init__(self, seen: set[tuple[str, int]], first: int) -> None:
        self.seen, self.first, self.sent = seen, first, False

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not self.sent and line not in self.seen:
            self.seen.add(line)
            if len(self.seen) % EVERY == self.first:
                self.sent = True
                signal.raise_signal(signal.SIGINT)
        return self.trace

    def __enter__(self) -> InterruptAt:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def test_at_lines_of_everything(tiny: Path, drawn: int) -> None:
    kv, first = "shadowkv:outliers=4,budget=64", drawn % EVERY
    llm = LLM(str(tiny), load_format="dummy", kv=kv, kv_dense_below=0, max_num_seqs=2, max_cached_seqs=1)
    wanted = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    seen: set[tuple[str, int]] = set()
    interrupted = 0
    while True:
        with InterruptAt(seen, first) as interrupt:
            try:
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            except KeyboardInterrupt:
                interrupted += 1
        assert_empty(llm.engine)
        if not interrupt.sent:
            break
        if interrupted % 20 == 0:
            assert [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == wanted
    assert interrupted > 300
    assert [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == wanted


def test_a_ctrl_c_takes_effect_when_it_may_and_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_deferred() as interruptible:
        interruptible()
        signal.raise_signal(signal.SIGINT)
        steps = 1
        interruptible()
        steps = 2
    assert steps == 1
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        steps = 3
    assert steps == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    def within() -> None:
        with interrupts_deferred() as interruptible:
            handlers.append(signal.getsignal(signal.SIGINT))
            interruptible()

    handlers: list[Any] = []
    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        within()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.default_int_handler, signal.SIG_IGN]

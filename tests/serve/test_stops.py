"""Signals before a server handles them: none is lost, wherever it comes up, and what frees resources goes on."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import argparse, signal, sys, time
from contextlib import ExitStack
from shadowkv.serve.process import AGAIN_SECONDS, run_until_stopped, stops_repeated

ENDS = getattr(signal, sys.argv[1])
signal.signal(ENDS, signal.SIG_DFL)  # whatever the tests were started under

class Finalized:
    def __del__(self):
        signal.raise_signal(ENDS)

def a_finalizer():
    Finalized()
    time.sleep(600)

def caught_twice():
    for work in (lambda: signal.raise_signal(ENDS), lambda: time.sleep(600)):
        try:
            work()
        except BaseException:
            print("dropped")
    time.sleep(600)

def handled_by_a_server_then():
    try:
        signal.raise_signal(ENDS)
    except BaseException:
        signal.signal(ENDS, lambda *_: handled.append(1))
    handled = []
    while not handled:
        time.sleep(0.01)
    print("handled")

def made_another_error():
    try:
        signal.raise_signal(ENDS)
    except BaseException as error:
        raise ImportError("this is what NumPy does") from error

def on_its_way_for_long():
    try:
        signal.raise_signal(ENDS)
    finally:
        time.sleep(3 * AGAIN_SECONDS)
        print("tidied")

def run(args):
    with ExitStack() as stack, stops_repeated():
        stack.callback(lambda: (time.sleep(3 * AGAIN_SECONDS), print("freed")))
        globals()[sys.argv[2]]()
    return 0

sys.exit(run_until_stopped(run, argparse.Namespace()))
"""


@pytest.mark.parametrize(
    ("where", "lines"),
    [
        ("a_finalizer", ["freed"]),
        ("caught_twice", ["dropped", "dropped", "freed"]),
        ("handled_by_a_server_then", ["handled", "freed"]),
        ("made_another_error", ["freed"]),
        ("on_its_way_for_long", ["tidied", "freed"]),
    ],
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_no_signal_is_lost(name: str, where: str, lines: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, name, where], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == lines, done.stderr
    assert done.returncode == (0 if "handled" in lines else 128 + getattr(signal, name))
    assert where == "a_finalizer" or "Traceback" not in done.stderr  # of what it drops Python says so
    assert ("stopped" in done.stderr.splitlines()) == (done.returncode == 128 + signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    program = PROGRAM.replace("signal.SIG_DFL", "signal.SIG_IGN")
    program = program.replace("    Finalized()\n    time.sleep(600)", "    Finalized()\n    print('alive')")
    done = subprocess.run([sys.executable, "-c", program, "SIGHUP", "a_finalizer"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, ["alive", "freed"], "")

"""How the threads of PyTorch's CPU kernels wait for each other."""

from __future__ import annotations

import os
import sys


def wait_asleep() -> None:
    """Lets the threads of OpenMP sleep while they wait for each other, unless ``OMP_WAIT_POLICY`` says otherwise.

    By default they spin. If another program has a thread's core, the others then spin until that thread runs again.
    OpenMP reads the variable when PyTorch is imported, so a call after that has no effect. ``import shadowkv`` (at the
    first name that is read from it) and ``shadowkv eval`` call this. A server does not: the thread that loads the model
    and the one that runs steps have threads of OpenMP of their own. These are more than there are cores, and then
    OpenMP hardly spins.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")

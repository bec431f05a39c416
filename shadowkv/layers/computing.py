"""What layers that call ops have in common: they say which, and get those of the engine that runs them."""

from __future__ import annotations

from torch import nn

from shadowkv.ops.registry import Ops


class Computing(nn.Module):
    """A module that calls ops.

    Attributes:
        calls: names of the ops that it calls itself; modules within it name theirs.
        ops: those of the engine; given before the first call (``Decoder.use``).
    """

    calls: tuple[str, ...]
    ops: Ops

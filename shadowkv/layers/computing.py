"""``Computing``: base class of layers that call ops. Layers declare the ops' names, and get the engine's ops."""

from __future__ import annotations

from torch import nn

from shadowkv.ops.registry import Ops


class Computing(nn.Module):
    """A module that calls ops.

    Attributes:
        calls: names of the ops that the module itself calls. Its submodules declare theirs.
        ops: the engine's ops, set before the first call (``Decoder.use``).
    """

    calls: tuple[str, ...]
    ops: Ops

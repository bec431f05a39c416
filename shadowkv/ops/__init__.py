"""The engine's operations: one folder each, one file per backend, one signature; chosen once by ``Ops``."""

from shadowkv.ops.registry import Ops

__all__ = ["Ops"]

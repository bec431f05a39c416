"""Memory that long bodies and texts took goes back to the system, where the GNU C library would keep it."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 2**17
"""The parameter of ``mallopt`` (malloc.h), and the bytes from which on a block comes straight from the system; its
default, which would otherwise grow with what was freed."""

_library = ctypes.CDLL(None)


def give_back_large_blocks() -> None:
    """Has large blocks go back as soon as they are free, from now on."""
    if hasattr(_library, "mallopt"):
        _library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def give_back_small_blocks() -> None:
    """Gives back pages without any block in use; it takes milliseconds, in which the interpreter's lock is free."""
    if hasattr(_library, "malloc_trim"):
        _library.malloc_trim(0)

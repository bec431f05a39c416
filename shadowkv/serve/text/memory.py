"""Returns the memory of long bodies and texts to the system. The GNU C library would otherwise keep it."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 2**17
"""The number of a parameter of ``mallopt`` (malloc.h), and the value to set. Blocks of at least so many bytes are
mapped separately, so that they go back to the system when they are freed. The value is the C library's default. But
unless a program sets it, the library raises it when large blocks are freed."""

_library = ctypes.CDLL(None)


def give_back_large_blocks() -> None:
    """Makes the C library return large blocks to the system as soon as they are freed, from now on."""
    if hasattr(_library, "mallopt"):
        _library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def give_back_small_blocks() -> None:
    """Returns those pages of the process's memory to the system that hold no used block. This takes milliseconds, in
    which other Python threads can run."""
    if hasattr(_library, "malloc_trim"):
        _library.malloc_trim(0)

"""Returns the memory of long bodies and texts to the system; the GNU C library would keep it."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 2**17
"""The parameter of ``mallopt`` (malloc.h), and its value: the size in bytes from which a block comes straight from the
system. The value is the C library's default. Unless it is set, the library raises it when large blocks are freed."""

_library = ctypes.CDLL(None)


def give_back_large_blocks() -> None:
    """Makes the C library return large blocks to the system as soon as they are freed, from now on."""
    if hasattr(_library, "mallopt"):
        _library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def give_back_small_blocks() -> None:
    """Returns pages without any used block to the system; this takes milliseconds, in which the interpreter's lock is
    free."""
    if hasattr(_library, "malloc_trim"):
        _library.malloc_trim(0)

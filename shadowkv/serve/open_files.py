"""How many files the process may have open: every connection is one."""

from __future__ import annotations

import resource

FILES_BESIDE = 512
"""Kept for everything else: the model's, and connections that were accepted and are about to be closed."""


def allow_open_files(connections: int) -> None:
    """Raises the limit to what so many connections need; raises ValueError where that is not allowed."""
    needed = connections + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = f"limit_concurrency={connections} needs {needed} open files, and the system allows {hard} (ulimit -Hn)"
        raise ValueError(f"{text}; raise that, or pass at most {max(1, hard - FILES_BESIDE)}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

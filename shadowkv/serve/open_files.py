"""How many files the process may have open: every connection is one."""

from __future__ import annotations

import logging

from shadowkv.wording import SettingsError

logger = logging.getLogger(__name__)

FILES_BESIDE = 512
"""Reserved for everything else: the model's files, and accepted connections that are about to be closed."""


def allow_open_files(connections: int, *, or_fewer: bool = False) -> int:
    """Raises the limit to what ``connections`` connections need; returns how many there may be.

    Where the system allows fewer, raises ValueError; with ``or_fewer``, warns and returns what it allows.
    """
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return connections
    needed = connections + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = max(1, hard - FILES_BESIDE)
        if connections > most:
            reason = f"needs {needed} open files, and the system allows {hard} (ulimit -Hn)"
            if not or_fewer:
                text = f"limit_concurrency={connections} {reason}; raise that, or pass at most {most}"
                raise SettingsError(text, ["limit_concurrency"])
            logger.warning("--limit-concurrency %d %s: it is %d", connections, reason, most)
        connections, needed = most, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return connections

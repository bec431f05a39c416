"""Unknown parameters, for example hints for other servers: they are dropped, and each is logged once."""

from __future__ import annotations

import logging
from threading import Lock

from shadowkv.serve.limits import MAX_NAME_CHARS, MAX_UNKNOWN

logger = logging.getLogger(__name__)


class Unknown:
    """Names of such parameters, each of which is logged once, up to ``MAX_UNKNOWN`` in all.

    Attributes:
        collects: whether names are kept for ``take``, in a process without its own log.
    """

    def __init__(self) -> None:
        self.collects = False
        self._lock = Lock()
        self._told: set[str] = set()
        self._new: list[str] = []

    def tell(self, name: str) -> None:
        """Records that a request has a parameter of this name."""
        name = name[:MAX_NAME_CHARS]
        with self._lock:
            if name in self._told or len(self._told) >= MAX_UNKNOWN:
                return
            self._told.add(name)
        if self.collects:
            self._new.append(name)
        else:
            logger.warning("requests have %r, which is not known here: it has no effect (this is said once)", name)

    def take(self) -> list[str]:
        """Names since the last call, where they are collected."""
        new, self._new = self._new, []
        return new


unknown = Unknown()

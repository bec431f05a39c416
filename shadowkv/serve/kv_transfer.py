"""``kv_transfer_params``, by vLLM's names: prompts that one server computes and another continues.

A proxy sends a request to a prefill server with ``max_tokens`` 1 and ``do_remote_decode``, and then to a decode server
with the values from the first answer. What they name is in the directory that both share; what is missing is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shadowkv.engine.handovers import receive, send
from shadowkv.engine.request import Request
from shadowkv.serve.kv_transfer_protocol import KVTransferParams

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


class Transfer:
    """What happens to the prompts of one request.

    Args:
        engine: serves it, in its role.
        params: what the request says about other servers.
    """

    def __init__(self, engine: AsyncEngine, params: KVTransferParams | None) -> None:
        self._engine, self._asked = engine, params or KVTransferParams()
        self._sent: list[str] = []

    async def receive(self, tokens: int) -> None:
        """Waits for prompts of ``tokens`` tokens that another server has computed, as long as that pays."""
        if self._asked.do_remote_prefill:
            await receive(self._engine, tuple(self._asked.remote_snapshots), tokens)

    async def send(self, prompts: Sequence[Request]) -> None:
        """Waits until other servers can find what was computed of prompts: where they are to continue it, and always on
        a prefill server."""
        if self._asked.do_remote_decode or self._engine.role == "prefill":
            sent = await asyncio.gather(*(send(self._engine, prompt) for prompt in prompts))
            self._sent = list(dict.fromkeys(name for names in sent for name in names))

    def told(self) -> dict[str, Any]:
        """The field of an answer; none where it was not requested. Null is what has to be computed."""
        if not self._asked.do_remote_decode:
            return {}
        names = {"do_remote_prefill": True, "do_remote_decode": False, "remote_snapshots": self._sent}
        return {"kv_transfer_params": names if self._sent else None}

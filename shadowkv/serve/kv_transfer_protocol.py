"""``kv_transfer_params`` in a request, by vLLM's names; read where large bodies are, without PyTorch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shadowkv.prefix_cache.protocol import SNAPSHOT_NAME
from shadowkv.serve.body import Body
from shadowkv.serve.limits import MAX_SNAPSHOTS

SnapshotName = Annotated[str, Field(pattern=f"^{SNAPSHOT_NAME}$")]


class KVTransferParams(Body):
    """What a request says about other servers: whether one continues its prompt, or one has computed it, and as which
    snapshots. Fields of vLLM's connectors are dropped unread."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_snapshots: list[SnapshotName] = Field(default=[], max_length=MAX_SNAPSHOTS, fail_fast=True)

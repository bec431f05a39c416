"""Several streams as one, in the order in which they yield."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from shadowkv.serve.errors import DeadlineExceeded

T = TypeVar("T")


async def merge(
    streams: Sequence[AsyncIterator[T]], timeout: float | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """Items with the number of their stream; if one stream fails, or this one is closed, all end.

    After ``timeout`` seconds, ends all of them and raises DeadlineExceeded.
    """
    items: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def drain(index: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    items.put_nowait((index, item))
            items.put_nowait(None)
        except Exception as error:
            items.put_nowait(error)

    timer = None
    if timeout is not None:
        late = DeadlineExceeded("the request took longer than this server allows")
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout), items.put_nowait, late)
    tasks = [asyncio.create_task(drain(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await items.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        if timer is not None:
            timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

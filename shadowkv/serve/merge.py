"""Several streams as one, in the order in which they yield."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items with the number of their stream; one that fails ends them all, and so does closing this one."""
    items: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def drain(index: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    items.put_nowait((index, item))
            items.put_nowait(None)
        except Exception as error:
            items.put_nowait(error)

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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

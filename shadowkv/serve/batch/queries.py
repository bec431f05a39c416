"""Looks up stored records for the routes: one record by id, or a page of a list. A request sees only the records of its
owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import Request

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.owners import owner_of
from shadowkv.serve.storage.store import Kind, Record, RecordStore

PAGE, MOST = 20, 100
"""Default and maximum number of records in a page."""


async def of_record(request: Request, store: RecordStore, kind: Kind, id: str) -> Record:
    """Returns the owner's record with an id; raises ApiError if there is none."""
    return await asyncio.to_thread(store.get, owner_of(request), kind, id)


async def listed(
    request: Request,
    store: RecordStore,
    kind: Kind,
    shown: Callable[[Record], dict[str, Any]],
    after: str = "after",
    before: str | None = None,
    purpose: str | None = None,
) -> dict[str, Any]:
    """Returns a page of the owner's records. The query's parameters ``limit``, ``order`` and ``after`` choose the page.

    Args:
        shown: converts a record to its form in the answer.
        after: name of the query parameter with the id of a record; the page begins after that record.
        before: name of the query parameter with the id of a record; the page ends before that record. None: the route
            has no such parameter.
        purpose: restricts a list of files to one purpose; None lists all.
    """
    query = request.query_params
    text = query.get("limit", str(PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) >= 1):
        raise ApiError(f"limit must be a number from 1 to {MOST}", param="limit")
    limit, order = min(int(text), MOST), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(f"order is {order[:80]!r}, and must be asc or desc", param="order")
    start, end = query.get(after), None if before is None else query.get(before)
    if start is not None and end is not None:
        raise ApiError(f"pass one of {after} and {before}", param=before)
    is_newest_first = (order == "desc") == (end is None)
    bound = start if end is None else end
    records = await asyncio.to_thread(store.page, owner_of(request), kind, limit, bound, is_newest_first, purpose)
    page = records[:limit] if end is None else records[:limit][::-1]
    data = [shown(record) for record in page]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(records) > limit}

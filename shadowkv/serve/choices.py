"""Answers of the OpenAI API's completions and chat completions: a list of choices, whole or in chunks."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, ClassVar

from shadowkv.serve.endpoint import Endpoint
from shadowkv.serve.jobs import Job, Piece
from shadowkv.serve.replies import Events


class Choices(Endpoint):
    """An endpoint whose answers have choices."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a choice, in a stream: one or more chunks."""

    async def answer(self, job: Job) -> dict[str, Any]:
        pieces = await job.whole()

        def shape() -> list[dict[str, Any]]:
            return [self.choice(piece) for piece in pieces]

        # Writing down the log-probabilities of a long prompt takes a while.
        choices = await asyncio.to_thread(shape) if job.echo else shape()
        return {**job.head(self.kind), "choices": choices, "usage": job.usage(), **job.remote_prefill.answer_field()}

    def stream(self, job: Job) -> Events:
        return Events(self._chunks(job))

    async def _chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        head = job.head(self.chunk_kind) | ({"usage": None} if job.request.include_usage else {})
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                slow = piece.first and job.echo
                for choice in await asyncio.to_thread(self.delta, piece) if slow else self.delta(piece):
                    yield {**head, "choices": [choice]}
        if job.request.include_usage:
            yield {**head, "choices": [], "usage": job.usage()}


def selections_of(piece: Piece) -> dict[str, Any]:
    """What each of a piece's tokens attended to, where requested."""
    if piece.selections is None:
        return {}
    return {"selections": [None if one is None else asdict(one) for one in piece.selections]}

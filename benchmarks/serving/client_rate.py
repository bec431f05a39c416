"""Measures how many events per second the benchmark's client can read on one core, from a server of made-up answers.

The server sends an event to every stream ``--steps`` times a second, as a server does that decodes a batch. A client
that keeps up reads every event separately, which is the most expensive way. Only the client's own processor time is
counted; the server is another process.

    python -m benchmarks.serving.client_rate --streams 256 --events 400 --steps 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

from shadowkv.bench.client import CompletionClient
from shadowkv.bench.serving_stats import Record

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(choices: list[dict[str, object]], usage: dict[str, int] | None = None) -> bytes:
    """Returns an HTTP chunk with one event of a completion."""
    about = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1790000000}
    data = f"data: {json.dumps({**about, 'model': 'made-up', 'choices': choices, 'usage': usage})}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve(ready: Connection, streams: int, events: int, steps: float) -> None:
    """Waits until ``streams`` requests have arrived, and answers them together."""
    waiting: list[asyncio.StreamWriter] = []
    token = event([{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}])
    end = event([], {"prompt_tokens": 1, "completion_tokens": events, "total_tokens": events + 1})
    end += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    over = asyncio.Event()

    async def answer() -> None:
        for writer in waiting:
            writer.write(HEAD)
        start = time.perf_counter()
        for step in range(events):
            await asyncio.sleep(start + step / steps - time.perf_counter())
            for writer in waiting:
                writer.write(token)
            await asyncio.gather(*(writer.drain() for writer in waiting))
        for writer in waiting:
            writer.write(end)
            await writer.drain()
        over.set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        waiting.append(writer)
        if len(waiting) == streams:
            await answer()
        await over.wait()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    await over.wait()


def run_server(ready: Connection, streams: int, events: int, steps: float) -> None:
    """The server's process."""
    asyncio.run(serve(ready, streams, events, steps))


async def measure(port: int, streams: int, events: int) -> tuple[float, float]:
    """Reads all streams. Returns the wall-clock seconds and the client's processor seconds."""
    client, records = CompletionClient(f"http://127.0.0.1:{port}/v1"), [Record(0.0, 1) for _ in range(streams)]
    wall, own = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client.stream(b"{}", record) for record in records))
    client.close()
    assert all(len(record.chunks) == events == record.output_tokens for record in records)
    return time.perf_counter() - wall, time.process_time() - own


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="at once (default: %(default)s)")
    parser.add_argument("--events", type=int, default=400, help="of each stream (default: %(default)s)")
    parser.add_argument("--steps", type=float, default=100, help="a second (default: %(default)s)")
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    settings = theirs, args.streams, args.events, args.steps
    server = multiprocessing.get_context("spawn").Process(target=run_server, args=settings)
    server.start()
    wall, own = asyncio.run(measure(ours.recv(), args.streams, args.events))
    server.join()
    total = args.streams * args.events
    print(f"{total} events: {total / wall:.0f} a second, {total / own:.0f} a second of the client's processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())

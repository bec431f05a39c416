"""The benchmark's HTTP client, against servers of a few bytes: what it counts, what it refuses, what it keeps open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from shadowkv.bench.client import CompletionClient, Refused
from shadowkv.bench.serving_stats import Record

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


TOKEN, END = event({"choices": [{"text": "a"}]}), event({"choices": [], "usage": USAGE}) + event(b"[DONE]")


def exchange(*answers: Answer, requests: int | None = None) -> tuple[list[Record], list[str], int]:
    """Records and errors of requests that are sent one after the other to a server that answers so, each request with
    the next of ``answers``; and how many connections there were."""
    left, connections = list(answers), 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while left:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            assert b"POST /v1/completions HTTP/1.1\r\n" in head and b"Authorization: Bearer key\r\n" in head
            length = int(head.partition(b"Content-Length: ")[2].split()[0])
            assert json.loads(await reader.readexactly(length)) == {"prompt": [1, 2, 3]}
            await left.pop(0)(writer)
            if writer.is_closing():
                return
        writer.close()

    async def run() -> tuple[list[Record], list[str]]:
        server = await asyncio.start_server(take, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client, records, errors = CompletionClient(f"http://localhost:{port}/v1", "key"), [], []
        for _ in range(requests or len(answers)):
            records.append(Record(0.0, 3))
            try:
                await asyncio.wait_for(client.stream(b'{"prompt": [1, 2, 3]}', records[-1]), 120)
                errors.append("")
            except Refused as error:
                errors.append(str(error))
        client.close()
        server.close()
        await asyncio.sleep(0.05)  # for the server to see that its connections are closed
        return records, errors

    return *asyncio.run(run()), connections


def whole(*pieces: bytes, pause: float = 0.0) -> Answer:
    """Sends ``pieces`` as they are."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return answer


def closing(*pieces: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        await whole(*pieces)(writer)
        writer.close()

    return answer


GOOD = (HEAD, chunk(TOKEN), chunk(TOKEN), chunk(END), b"0\r\n\r\n")


def test_pieces_are_timed_and_tokens_are_those_that_the_server_counts() -> None:
    (record,), errors, _ = exchange(whole(*GOOD, pause=0.02))
    assert errors == [""] and record.done and record.output_tokens == 7
    first, second = record.chunks
    assert record.sent < first and second - first > 0.01


def test_a_stream_in_single_bytes_and_in_one_piece_is_the_same() -> None:
    comment = b": still there\n\n"
    stream = HEAD + chunk(comment + TOKEN[:9]) + chunk(TOKEN[9:] + TOKEN + END) + b"0\r\nx: y\r\n\r\n"
    one, other = (whole(stream), whole(*(stream[i : i + 1] for i in range(len(stream)))))
    records, errors, connections = exchange(one, other)
    assert errors == ["", ""] and connections == 1
    assert [(len(record.chunks), record.output_tokens) for record in records] == [(2, 7), (2, 7)]


def test_connections_are_used_again_unless_the_server_says_otherwise() -> None:
    assert exchange(whole(*GOOD), whole(*GOOD))[2] == 1
    close = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert exchange(closing(close, *GOOD[1:]), whole(*GOOD))[2] == 2
    # Without a length the end of the connection is the end of the answer.
    plain = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    _, errors, connections = exchange(closing(plain + TOKEN + END), whole(*GOOD))
    assert errors == ["", ""] and connections == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (closing(HEAD, chunk(TOKEN)), "the stream broke off"),
        (whole(HEAD, chunk(TOKEN), b"0\r\n\r\n"), "the stream broke off"),
        (closing(b""), "no answer: the connection was closed"),
        (whole(HEAD, chunk(event({"error": {"message": "out of luck"}}))), "out of luck"),
        (whole(HEAD, chunk(b"data: nonsense\n\n")), "the answer cannot be read: JSONDecodeError"),
        (whole(HEAD, b"nonsense\r\n"), "the answer cannot be read: ValueError"),
        (whole(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"), "status 503: busy"),
        (whole(b'HTTP/1.1 400 Bad\r\nContent-Length: 29\r\n\r\n{"error": {"message": "long"}}'[:-1]), "status 400: "),
    ],
)
def test_what_is_no_whole_answer_is_refused_and_the_next_one_is_not(answer: Answer, error: str) -> None:
    records, errors, _ = exchange(answer, whole(*GOOD))
    assert errors[0].startswith(error) and not records[0].done
    assert errors[1] == "" and records[1].done


def test_no_server_is_refused() -> None:
    with pytest.raises(Refused, match="ConnectionRefusedError"):
        asyncio.run(CompletionClient("http://127.0.0.1:9/v1").stream(b"{}", Record(0.0, 0)))
    with pytest.raises(ValueError, match="not an http or https URL"):
        CompletionClient("localhost:8000")

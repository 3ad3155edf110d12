"""A small HTTP/1.1 server and client on asyncio for the stub engine, so that a stub starts in a moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BODY = 16 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """One request; the body is already read."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as an object, or an empty one."""
        try:
            found = json.loads(self.body or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer, or one that is streamed as server-sent events when `stream` is given."""

    status: int
    body: dict[str, Any] | None = None
    stream: AsyncIterator[str] | None = None


class CutOff(Exception):
    """Raised by a stream that shall end in the middle, as a dying engine's does."""


Handler = Callable[[Request], Awaitable[Response]]


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]] | None:
    """The first line and the headers (lower case); None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
    """Answers requests until the client goes; a client that hangs up cancels its request."""
    try:
        while (head := await read_head(reader)) is not None:
            method, path, _ = (head[0] + "  ").split(" ", 2)
            length = min(int(head[1].get("content-length", "0")), MAX_BODY)
            body = await reader.readexactly(length) if length else b""
            work = asyncio.create_task(_answer(writer, handler, Request(method, path, head[1], body)))
            gone = asyncio.create_task(reader.read(1))
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not work.done():
                work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            if work.cancelled() or work.exception() is not None or (gone.done() and not gone.cancelled()):
                return
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _answer(writer: asyncio.StreamWriter, handler: Handler, request: Request) -> None:
    response = await handler(request)
    head = f"HTTP/1.1 {response.status} Stub\r\n"
    if response.stream is None:
        data = json.dumps(response.body or {}).encode()
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode())
        writer.write(data)
        await writer.drain()
        return
    writer.write(f"{head}content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    async for event in response.stream:
        data = f"data: {event}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def call(path: Path, target: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """One POST over a unix socket: (status, answer). Raises OSError when nobody answers."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        data = json.dumps(body or {}).encode()
        writer.write(f"POST {target} HTTP/1.1\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        head = await read_head(reader)
        if head is None:
            raise ConnectionResetError("the engine hung up")
        answer = await reader.readexactly(int(head[1].get("content-length", "0")))
        return int(head[0].split(" ")[1]), json.loads(answer)
    finally:
        writer.close()

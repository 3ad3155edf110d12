"""HTTP/1.1 to engines: pooled connections, streamed bodies, and who is to blame when one breaks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools

from relight.core.errors import RelightError

HIGH_WATER = 256 << 10
"""Bytes of a body that wait for a slow client before the engine's connection is no longer read."""
IDLE_LIMIT = 64
"""Idle connections that are kept for each engine."""


class UpstreamError(RelightError):
    """The engine could not be reached, broke off, or did not speak HTTP. `reused`: an idle connection was used."""

    code = "upstream"

    def __init__(self, message: str, *, reused: bool = False) -> None:
        super().__init__(message)
        self.reused = reused


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.begin()

    def begin(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: deque[bytes] = deque()
        self.buffered = 0
        self.complete = False
        self.error = ""
        self.wake = asyncio.Event()

    # What asyncio calls.
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.error = f"not HTTP: {error}"
            self.abort()
        self.wake.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.complete and not self.error:
            self.error = f"the engine broke the connection off{f': {exc}' if exc else ''}"
        self.wake.set()

    # What httptools calls.
    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)
        self.buffered += len(body)
        if self.buffered > HIGH_WATER and self.transport is not None:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        self.complete = True

    # What the pool and its callers call.
    def take(self) -> bytes:
        data = b"".join(self.chunks)
        self.chunks.clear()
        if self.buffered > HIGH_WATER and self.transport is not None and not self.closed:
            self.transport.resume_reading()
        self.buffered = 0
        return data

    async def progress(self) -> None:
        await self.wake.wait()
        self.wake.clear()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    @property
    def reusable(self) -> bool:
        return self.complete and not self.closed and not self.error and bool(self.parser.should_keep_alive())


class Response:
    """The head of an answer, and its body as it comes."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces of the body as they arrive. Raises UpstreamError when it breaks off."""
        connection = self._connection
        while True:
            if connection.chunks:
                yield connection.take()
            elif connection.complete:
                return
            elif connection.error:
                raise UpstreamError(connection.error)
            else:
                await connection.progress()


class Upstream:
    """One pool for all engines of the gateway."""

    def __init__(self, connect_seconds: float = 2.0) -> None:
        self._connect_seconds = connect_seconds
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}

    async def send(self, url: str, path: str, headers: Mapping[str, str], body: bytes) -> Exchange:
        """POSTs and waits for the answer's head. Raises UpstreamError; the caller closes the exchange.

        An idle connection that the engine had closed meanwhile is replaced by a fresh one, once.
        """
        parts = urlsplit(url)
        where = (parts.hostname or "", parts.port or 80)
        base = parts.path.rstrip("/")
        lines = [f"POST {base}{path} HTTP/1.1", f"host: {where[0]}:{where[1]}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        connection = self._idle_one(where)
        if connection is not None:
            try:
                return await self._ask(where, connection, data)
            except UpstreamError as error:
                if connection.status or connection.headers:
                    raise UpstreamError(str(error), reused=True) from None
        return await self._ask(where, await self._connect(where), data)

    def _idle_one(self, where: tuple[str, int]) -> _Connection | None:
        idle = self._idle.get(where)
        while idle:
            connection = idle.pop()
            if not connection.closed:
                connection.begin()
                return connection
        return None

    async def _connect(self, where: tuple[str, int]) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(_Connection, *where)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"the engine at {where[0]}:{where[1]} cannot be reached: {error}") from error
        return connection

    async def _ask(self, where: tuple[str, int], connection: _Connection, data: bytes) -> Exchange:
        if connection.transport is None or connection.closed:
            raise UpstreamError("the engine broke the connection off")
        connection.transport.write(data)
        try:
            while not connection.status:
                if connection.error:
                    raise UpstreamError(connection.error)
                await connection.progress()
        except BaseException:
            connection.abort()
            raise
        return Exchange(self, where, connection)

    def give_back(self, where: tuple[str, int], connection: Any) -> None:
        """Keeps the connection for the next request when it may be, else closes it: that cancels its request."""
        idle = self._idle.setdefault(where, deque())
        if connection.reusable and len(idle) < IDLE_LIMIT:
            idle.append(connection)
        else:
            connection.abort()

    def forget(self, urls: set[str]) -> None:
        """Closes idle connections to engines that are not in `urls`."""
        kept = {(urlsplit(u).hostname or "", urlsplit(u).port or 80) for u in urls}
        for where in [w for w in self._idle if w not in kept]:
            for connection in self._idle.pop(where):
                connection.abort()

    def close(self) -> None:
        """Closes every idle connection."""
        self.forget(set())


class Exchange:
    """One request and its answer; `close` must be called, whatever happened."""

    def __init__(self, pool: Upstream, where: tuple[str, int], connection: _Connection) -> None:
        self._pool, self._where, self._connection = pool, where, connection
        self.response = Response(connection)

    def close(self) -> None:
        """Gives the connection back, or breaks it off when the answer is not complete."""
        self._pool.give_back(self._where, self._connection)

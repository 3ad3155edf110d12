"""The calling end of the controller's and agents' gRPC: channels, and the stream that keeps a process attached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from relight.core.clock import Clock
from relight.core.errors import Unavailable
from relight.core.logs import Logger
from relight.core.tls import TlsFiles

FIRST_BACKOFF, LAST_BACKOFF = 0.05, 2.0
"""Seconds between tries to reach the controller; jittered so that processes do not return in step."""
LAZY_SECONDS = 0.1
"""How long changes that nobody waits for are gathered: a report costs a wake that is under way a millisecond."""
_OPTIONS = [
    # A controller that froze is left before its lease is over, and well inside the grace that the next one gives slots.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The time that counts for a ping that is never answered: a minute unless it is said here too.
    ("grpc.http2.ping_timeout_ms", 3_000),
    # By default only two pings are sent while nothing else is: a stream that rests would never be missed.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
]


@dataclass(frozen=True, slots=True)
class ControllerAccess:
    """Where the controller's gRPC listens (`host:port`), and as whom it is called."""

    address: str
    token: str = field(repr=False)
    tls: TlsFiles | None = None
    token_file: Path | None = None
    """Holds the token instead, and is written anew by others before it expires."""

    def bearer(self) -> str:
        """The token as of now. Raises Unavailable when its file cannot be read."""
        if self.token_file is None:
            return self.token
        try:
            found = self.token_file.read_text().strip()
        except (OSError, ValueError) as error:
            raise Unavailable(f"no token in {self.token_file}: {error}") from error
        if not found.isascii() or not found.isprintable():
            raise Unavailable(f"no token in {self.token_file}: it holds what no header may")
        return found


def open_channel(address: str, tls: TlsFiles | None, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """A channel that shows this end's certificate; in plain text without `tls`. Raises InvalidInput for a bad file."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    certificate, key, authority = tls.read()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.aio.secure_channel(address, credentials, options=options)


class ControllerStream:
    """Stays attached for ever: whole reports up at every change, what the controller says down.

    `report` builds the whole report, `receive` acts on a message and raises nothing; `name` stands in the log.
    """

    def __init__(
        self,
        name: str,
        log: Logger,
        controller: ControllerAccess,
        clock: Clock,
        stub: Callable[[grpc.aio.Channel], Any],
        report: Callable[[], Message],
        receive: Callable[[Message], None],
    ) -> None:
        self._name, self._log = name, log
        self._controller, self._clock, self._stub = controller, clock, stub
        self._report, self._receive = report, receive
        self._dirty = asyncio.Event()
        self._lazy: asyncio.TimerHandle | None = None
        self._attached = False

    @property
    def attached(self) -> bool:
        """Whether the controller has said something on the present stream."""
        return self._attached

    def changed(self, urgent: bool = True) -> None:
        """The report would differ: it is told as soon as the loop is free, or within LAZY_SECONDS."""
        if urgent:
            self._dirty.set()
        elif self._lazy is None and not self._dirty.is_set():
            self._lazy = asyncio.get_running_loop().call_later(LAZY_SECONDS, self._dirty.set)

    async def run(self) -> None:
        """Attaches again and again; returns only by cancellation."""
        backoff = FIRST_BACKOFF
        while True:
            begun = self._clock.monotonic()
            try:
                await self._attach()
            except grpc.aio.AioRpcError as error:
                self._detached(error.code().name, error.details())
            except Unavailable as error:
                self._detached("UNAVAILABLE", str(error))
            if self._clock.monotonic() - begun > LAST_BACKOFF:
                backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, no secret
            backoff = min(backoff * 2, LAST_BACKOFF)

    def _detached(self, code: str, reason: str | None) -> None:
        self._log.warning(f"{self._name}.detached", code=code, reason=reason)

    async def _attach(self) -> None:
        bearer = f"Bearer {self._controller.bearer()}"
        async with open_channel(self._controller.address, self._controller.tls, _OPTIONS) as channel:
            call = self._stub(channel).Attach(metadata=(("authorization", bearer),))
            writer = asyncio.create_task(self._write(call), name=f"{self._name}-writer")
            try:
                async for message in call:
                    self._attached = True
                    self._receive(message)
                self._detached("OK", "the controller ended the stream")
            finally:
                self._attached = False
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        self._dirty.set()
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if self._lazy is not None:
                self._lazy.cancel()
                self._lazy = None
            await call.write(self._report())

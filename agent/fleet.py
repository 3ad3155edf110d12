"""The agent's stream to the controller: whole reports up at every change, assignments down."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc
import grpc.aio

from relight.core.clock import Clock
from relight.core.errors import Fenced, InvalidInput
from relight.core.logs import get_logger
from relight.core.records import Assignment, SlotReport
from relight.core.tls import TlsFiles
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc

_log = get_logger("agent.fleet")
FIRST_BACKOFF, LAST_BACKOFF = 0.05, 2.0
"""Seconds between tries to reach the controller; jittered so that agents do not return in step."""
LAZY_SECONDS = 0.1
"""How long words for people are gathered: a report costs a wake that is under way a millisecond."""
_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
]


class FleetLink:
    """Stays attached for ever. `report` builds the whole report, `accept` acts on an assignment."""

    def __init__(
        self,
        address: str,
        token: str,
        tls: TlsFiles | None,
        clock: Clock,
        report: Callable[[], SlotReport],
        accept: Callable[[Assignment, float], bool],
    ) -> None:
        self._address, self._token, self._tls, self._clock = address, token, tls, clock
        self._report, self._accept = report, accept
        self._dirty = asyncio.Event()
        self._lazy: asyncio.TimerHandle | None = None
        self.attached = asyncio.Event()

    def changed(self, urgent: bool = True) -> None:
        """Something reportable changed: told as soon as the loop is free, or within LAZY_SECONDS."""
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
                _log.warning("fleet.detached", code=error.code().name, reason=error.details())
            self.attached.clear()
            if self._clock.monotonic() - begun > LAST_BACKOFF:
                backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, no secret
            backoff = min(backoff * 2, LAST_BACKOFF)

    def _channel(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        certificate, key, authority = self._tls.read()
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.aio.secure_channel(self._address, credentials, options=_OPTIONS)

    async def _attach(self) -> None:
        async with self._channel() as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Attach(metadata=(("authorization", f"Bearer {self._token}"),))
            writer = asyncio.create_task(self._write(call), name="fleet-writer")
            try:
                async for message in call:
                    self._receive(message, self._clock.now())
                _log.warning("fleet.detached", code="OK", reason="the controller ended the stream")
            finally:
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
            await call.write(to_proto(self._report(), fleet_pb2.SlotReport))
            self.attached.set()

    def _receive(self, message: fleet_pb2.Assignment, received_at: float) -> None:
        try:
            self._accept(from_proto(message, Assignment), received_at)
        except Fenced as error:
            # The report carries the higher epoch: its sender finds out by that.
            _log.warning("assignment.fenced", reason=str(error))
            self.changed()
        except InvalidInput as error:
            _log.error("assignment.invalid", reason=str(error))

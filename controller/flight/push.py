"""Sends each finished start to an OpenTelemetry collector, beside everything else: nothing ever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from relight.controller.flight.timeline import Timeline
from relight.controller.flight.traces import otlp
from relight.core.logs import get_logger

PATH = "/v1/traces"
KEPT = 256
"""Starts that wait for a slow collector; further ones are dropped and counted."""
DEADLINE_SECONDS = 5.0

log = get_logger("controller.traces")


class Pusher:
    """`offer` from anywhere in the loop; `run` sends until it is cancelled. `counted` hears of each outcome."""

    def __init__(
        self, endpoint: str, counted: Callable[[str], None], transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        base = endpoint.rstrip("/")
        self.url = base if base.endswith(PATH) else base + PATH
        self._counted, self._transport = counted, transport
        self._waiting: asyncio.Queue[Timeline] = asyncio.Queue(KEPT)

    def offer(self, timeline: Timeline) -> None:
        """Takes a start to be sent; one too many is dropped."""
        try:
            self._waiting.put_nowait(timeline)
        except asyncio.QueueFull:
            self._counted("dropped")
            log.warning("traces.dropped", start=timeline.id)

    async def run(self) -> None:
        """One after the other, each once: a collector that is away loses what was started meanwhile."""
        async with httpx.AsyncClient(
            timeout=DEADLINE_SECONDS, trust_env=False, transport=self._transport
        ) as client:  # fmt: skip
            while True:
                timeline = await self._waiting.get()
                try:
                    answer = await client.post(self.url, json=otlp([timeline]))
                    answer.raise_for_status()
                except Exception as error:  # noqa: BLE001 - what cannot be sent must not keep the next from being sent
                    self._counted("failed")
                    # Not the error's own text: it has the address, which may hold a credential.
                    status = getattr(getattr(error, "response", None), "status_code", None)
                    log.warning("traces.failed", start=timeline.id, error=type(error).__name__, status=status)
                else:
                    self._counted("sent")

"""One request from admission to its last byte: tried elsewhere only while the client has seen nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from relight.core.clock import Clock
from relight.core.errors import Unavailable
from relight.core.logs import get_logger
from relight.core.records import RouteReplica
from relight.gateway.desk import Desk
from relight.gateway.metrics import Metrics
from relight.gateway.openai import Asked, Renamer, aborted
from relight.gateway.table import Key, key_of
from relight.gateway.upstream import Exchange, Upstream, UpstreamError

_log = get_logger("gateway.serve")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_PASSED = (b"content-type", b"cache-control")
"""Headers of an engine's answer that clients get to see."""


LAST_REPLICA_PAUSE = 0.2
"""Seconds before the only known replica is tried again: an agent sees a dead engine much sooner."""


class ClientGone(Exception):
    """The client hung up."""


@dataclass(slots=True)
class Job:
    """One completion request on its way. `begun`: the client has seen a part of the answer."""

    asked: Asked
    model: str
    path: str
    headers: dict[str, str]
    pin: str
    request_id: str
    since: float
    """Monotonic time of arrival."""
    adapter: bool = False
    """The client means an adapter: engines know it by that name."""
    avoid: set[Key] = field(default_factory=set)
    begun: bool = False
    status: int = 0


class _TryElsewhere(Exception):
    """This replica failed before the first byte."""


async def serve(
    job: Job,
    desk: Desk,
    upstream: Upstream,
    clock: Clock,
    metrics: Metrics,
    send: Send,
    max_tries: int,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Raises Unavailable or QueueFull when no replica takes it; nothing was sent to the client then."""
    for attempt in range(1, max_tries + 1):
        replica = await desk.admit(job.model, job.pin, job.avoid, job.since)
        metrics.held_seconds.labels(job.model).observe(clock.monotonic() - job.since)
        try:
            await _once(job, replica, desk, upstream, clock, metrics, send, last=attempt == max_tries)
            return
        except (_TryElsewhere, UpstreamError) as error:
            _log.warning("request.failed", instance=replica.instance, reason=str(error), request=job.request_id)
            if job.begun or job.pin:
                raise Unavailable(f"{replica.instance}: {error}") from error
            metrics.retries.labels(job.model).inc()
            if desk.has_other(job.model, job.avoid, replica):
                job.avoid.add(key_of(replica))
                continue
        finally:
            desk.done(job.model, replica)
        # The last one known: either it is gone and the next table says so, or it was a passing fault.
        job.avoid.clear()
        await sleep(LAST_REPLICA_PAUSE)
    raise Unavailable(f"{max_tries} replicas failed this request")


async def _once(
    job: Job,
    replica: RouteReplica,
    desk: Desk,
    upstream: Upstream,
    clock: Clock,
    metrics: Metrics,
    send: Send,
    *,
    last: bool,
) -> None:
    known = job.asked.model if job.adapter else replica.served_name
    body = job.asked.for_engine(known)
    sent_at = clock.now()
    first = desk.first_of(replica, sent_at)
    exchange = await upstream.send(replica.url, job.path, job.headers, body)
    try:
        elsewhere = not last and not job.pin and desk.has_other(job.model, job.avoid, replica)
        if exchange.response.status >= 500 and elsewhere:
            raise _TryElsewhere(f"answered {exchange.response.status}")
        renamer = Renamer(known, job.asked.model)
        head = _head(job, replica, exchange)
        job.status = exchange.response.status
        streamed = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in head)
        pieces = exchange.response.body()
        if streamed and not renamer.idle:
            pieces = renamer.lines(pieces)
        elif not streamed:
            # Whole before the first byte goes out: until then another replica may still answer instead.
            data = b"".join([piece async for piece in pieces])
            if not last and not job.pin and aborted(data):
                raise _TryElsewhere("its answer was given up half-way")
            data = data if renamer.idle else renamer.whole(data)
            head.append((b"content-length", str(len(data)).encode()))
            pieces = _only(data)
        async for piece in pieces:
            if not job.begun:
                job.begun = True
                await send({"type": "http.response.start", "status": job.status, "headers": head})
                metrics.first_byte_seconds.labels(job.model).observe(clock.monotonic() - job.since)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if first:
                first = False
                desk.first_token(replica, sent_at)
        if not job.begun:
            job.begun = True
            await send({"type": "http.response.start", "status": job.status, "headers": head})
        await send({"type": "http.response.body", "body": b""})
    finally:
        exchange.close()


async def _only(data: bytes) -> Any:
    yield data


def _head(job: Job, replica: RouteReplica, exchange: Exchange) -> list[tuple[bytes, bytes]]:
    passed = [(k, v) for k, v in exchange.response.headers if k in _PASSED]
    return [
        *passed,
        (b"x-request-id", job.request_id.encode()),
        (b"x-relight-instance", replica.instance.encode()),
        (b"x-relight-incarnation", str(replica.incarnation).encode()),
    ]

"""Around every request: its id in and out, when it was sent, and who is asking."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relight.controller.api.callers import Callers
from relight.controller.api.problems import of_error
from relight.core.clock import Clock
from relight.core.errors import Denied, Unavailable
from relight.core.ids import new_id

OPEN_PATHS = frozenset({"/healthz", "/livez", "/readyz", "/metrics", "/openapi.json"})
SENT_SECONDS = 5.0
"""How long a request may have been on its way, by its sender's clock, for that clock to be believed."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SENT = re.compile(rb"t=([0-9]{1,10}\.[0-9]{1,9})")


def _received_at(said: bytes, now: float) -> float:
    """When the request was sent, where `X-Request-Start: t=<seconds since the epoch>` says so; else `now`.

    Proxies set that header so that waiting before the server is seen. A clock that differs is not believed.
    """
    found = _SENT.fullmatch(said)
    sent = float(found[1]) if found else now
    return sent if now - SENT_SECONDS <= sent <= now else now


class Gate:
    """Refuses who has no identity before anything of the request is read, but on OPEN_PATHS."""

    def __init__(self, app: ASGIApp, callers: Callers, clock: Clock) -> None:
        self._app, self._callers, self._clock = app, callers, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        asked = headers.get(b"x-request-id", b"")
        # An id that could break a log line or a header is replaced, not refused.
        request_id = asked if _REQUEST_ID.fullmatch(asked) else new_id("r").encode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        state = scope.setdefault("state", {})
        state["received_at"] = _received_at(headers.get(b"x-request-start", b""), self._clock.now())
        if scope["path"] not in OPEN_PATHS:
            try:
                header = headers.get(b"authorization")
                state["caller"] = await self._callers(header.decode("latin-1") if header else None)
            except (Denied, Unavailable) as error:
                await of_error(scope["path"], error)(scope, receive, with_id)
                return
        await self._app(scope, receive, with_id)

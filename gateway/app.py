"""The ASGI application: an allow-list of routes, and the way of one request through the desk to an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from relight.core.auth import Role, Tokens
from relight.core.clock import Clock
from relight.core.errors import Denied, InvalidInput, NotFound, RelightError, Unavailable
from relight.core.ids import new_id
from relight.core.logs import get_logger
from relight.gateway.desk import Desk, QueueFull
from relight.gateway.metrics import OTHER, Metrics
from relight.gateway.openai import COMPLETIONS, error_body, models_body, parse
from relight.gateway.serve import ClientGone, Job, serve
from relight.gateway.upstream import Upstream

_log = get_logger("gateway")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_REQUEST_ID = re.compile(r"[-\w.]{1,128}")
_FORWARDED = ("content-type", "accept", "traceparent", "tracestate")
_GETS = {"/v1/models", "/healthz", "/livez", "/readyz", "/metrics"}
_MODEL = "/v1/models/"


class App:
    """One gateway's front door. Every answer that it makes up itself has OpenAI's error shape."""

    def __init__(
        self, desk: Desk, upstream: Upstream, tokens: Tokens, clock: Clock, metrics: Metrics, max_body_bytes: int,
        max_tries: int,
    ) -> None:  # fmt: skip
        self._desk, self._upstream, self._tokens, self._clock = desk, upstream, tokens, clock
        self._max_body, self._max_tries, self._metrics = max_body_bytes, max_tries, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry; only HTTP is spoken."""
        if scope["type"] != "http":
            raise ValueError(f"not spoken here: {scope['type']}")
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        wanted = headers.get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else new_id("r")
        path, method = scope["path"], scope["method"]
        # Exact comparison against what is known: no other spelling of any path leads anywhere.
        if path in COMPLETIONS:
            if method != "POST":
                await self._refuse(send, request_id, 405, "use POST", "method_not_allowed", allow="POST")
                return
            await self._completion(path, headers, receive, send, request_id)
        elif path in _GETS or path.startswith(_MODEL):
            if method not in ("GET", "HEAD"):
                await self._refuse(send, request_id, 405, "use GET", "method_not_allowed", allow="GET")
                return
            await self._get(path, send, request_id)
        else:
            await self._refuse(send, request_id, 404, "there is no such route", "not_found")

    async def _get(self, path: str, send: Send, request_id: str) -> None:
        if path in ("/healthz", "/livez"):
            await _answer(send, request_id, 200, b'{"status": "ok"}')
        elif path == "/readyz":
            if self._desk.synced:
                await _answer(send, request_id, 200, b'{"status": "ok"}')
            else:
                await self._refuse(send, request_id, 503, "no routes were told yet", "not_ready", retry_after=1)
        elif path == "/metrics":
            await _answer(send, request_id, 200, self._metrics.text(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/v1/models":
            await _answer(send, request_id, 200, json.dumps(models_body(self._desk.names)).encode())
        else:
            name = path.removeprefix(_MODEL)
            found = [m for m in models_body(self._desk.names)["data"] if m["id"] == name]
            if found:
                await _answer(send, request_id, 200, json.dumps(found[0]).encode())
            else:
                message = f"the model {name[:120]!r} does not exist"
                await self._refuse(send, request_id, 404, message, "model_not_found")

    # ------------------------------------------------------------------ completions

    async def _completion(
        self, path: str, headers: dict[str, str], receive: Receive, send: Send, request_id: str
    ) -> None:
        since = self._clock.monotonic()
        label = OTHER
        job: Job | None = None
        try:
            raw = await self._body(headers, receive)
            asked = parse(raw)
            pin = headers.get("x-relight-pin", "")
            if pin:
                self._tokens.require(headers.get("authorization"), Role.OPERATOR)
            if not self._desk.synced:
                raise Unavailable("no routes were told yet")
            model = self._desk.names.resolve(asked.model)
            label = f"{model.namespace}/{model.name}"
            forwarded = {name: headers[name] for name in _FORWARDED if name in headers}
            forwarded |= {"x-request-id": request_id}
            forwarded.setdefault("content-type", "application/json")
            job = Job(asked, label, path, forwarded, pin, request_id, since, asked.model in model.adapters)
            await self._run(job, receive, send)
        except ClientGone:
            self._metrics.cancelled.labels(label).inc()
            return
        except (InvalidInput, NotFound, Denied, Unavailable) as error:
            if job is not None and job.begun:
                # The client has part of an answer: the cut connection says that it is not whole.
                return
            status = await self._fail(send, request_id, error)
            self._metrics.requests.labels(label, str(status)).inc()
            return
        self._metrics.requests.labels(label, str(job.status)).inc()

    async def _run(self, job: Job, receive: Receive, send: Send) -> None:
        """Serves the job unless its client hangs up first: then everything it holds is let go at once."""
        work = asyncio.create_task(
            serve(job, self._desk, self._upstream, self._clock, self._metrics, send, self._max_tries)
        )
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, RelightError):
                    await work
                raise ClientGone
            await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        limit = f"at most {self._max_body} bytes"
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_body:
            raise InvalidInput(f"body: expected {limit}, got {announced}")
        data = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            data += message.get("body", b"")
            if len(data) > self._max_body:
                raise InvalidInput(f"body: expected {limit}, got more")
            if not message.get("more_body"):
                return bytes(data)

    # ------------------------------------------------------------------ answers of our own

    async def _fail(self, send: Send, request_id: str, error: RelightError) -> int:
        param = error.errors[0].field if isinstance(error, InvalidInput) and error.errors else None
        retry_after = None
        if isinstance(error, QueueFull):
            status, code, retry_after = 429, "queue_full", error.retry_after
        elif isinstance(error, Unavailable):
            status, code, retry_after = 503, "model_unavailable", error.retry_after
        elif isinstance(error, NotFound):
            status, code, param = 404, "model_not_found", "model"
        elif isinstance(error, Denied):
            status, code = (403, "forbidden") if error.authenticated else (401, "unauthenticated")
        else:
            status, code = 400, "invalid_request"
        await self._refuse(send, request_id, status, str(error), code, param=param, retry_after=retry_after)
        return status

    async def _refuse(
        self,
        send: Send,
        request_id: str,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        allow: str = "",
    ) -> None:
        extra = []
        if retry_after is not None:
            extra.append((b"retry-after", str(max(1, round(retry_after))).encode()))
        if allow:
            extra.append((b"allow", allow.encode()))
        await _answer(send, request_id, status, error_body(status, message, code, param), extra=extra)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(
    send: Send,
    request_id: str,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    extra: list[tuple[bytes, bytes]] | None = None,
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
        *(extra or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

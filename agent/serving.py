"""The slot's serving port: where plain Services send requests, whichever engine is awake behind it.

Endpoints lag behind labels and gates, and connections are kept: so the port itself refuses what is not for the engine
that is ready here and now, before anything has reached it, with a status after which clients and routers try elsewhere.
Only what serves is let through: an engine's own controls are the agent's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from relight.agent.member import Member
from relight.core.errors import Unavailable
from relight.core.logs import get_logger
from relight.core.states import State

_log = get_logger("agent.serving")
LARGEST_BODY = 64 << 20
RETRY_AFTER = "1"
"""Seconds; where it was refused, endpoints are about to say so too."""
ASKED = ("/v1/models", "/v1/models/{name:path}", "/ping")
SERVED = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
    "/v1/rerank", "/v1/audio/transcriptions", "/v1/audio/translations", "/tokenize", "/detokenize",
)  # fmt: skip
"""What runs a model. Named one by one: engines have controls under /v1 too, adapters' loading among them."""
INCARNATION = "x-relight-incarnation"
"""Of a request: it is for this incarnation alone. Of an answer: which one gave it."""
_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}
)


class Serving:
    """One port. `members` says what is on this slot; `open`, `serve` until cancelled."""

    def __init__(self, members: Callable[[], Iterator[Member]]) -> None:
        self._members = members
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=2.0), trust_env=False)
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None

    def open(self, host: str, port: int) -> str:
        """Takes the port. Returns `host:port`. Raises Unavailable when it is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"cannot serve on {host}:{port}: {error.strerror}") from error
        return f"{host}:{self._socket.getsockname()[1]}"

    async def serve(self) -> None:
        """Answers until cancelled; then what is under way is finished within a moment."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                *(Route(path, self._forward, methods=["GET"]) for path in ASKED),
                *(Route(path, self._forward, methods=["POST"]) for path in SERVED),
            ]
        )
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=5
        )
        self._server = _Server(config)
        if self._socket is None:
            raise Unavailable("the serving port is not open")
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            with contextlib.suppress(Exception):
                await self._client.aclose()

    def _ready(self) -> Member | None:
        found = [m for m in self._members() if m.state is State.READY and m.report().endpoint is not None]
        # One engine is awake on a device; of several on a slot's devices the newest is meant.
        return max(found, key=lambda m: m.since, default=None)

    async def _health(self, request: Request) -> Response:
        member = self._ready()
        if member is None:
            return _refused("nothing is ready here")
        return JSONResponse({"model": member.assignment.model, "instance": member.instance})

    async def _forward(self, request: Request) -> Response:
        body = await _whole(request)
        if body is None:
            return _error(413, f"a body of at most {LARGEST_BODY} bytes is taken", "body-too-large")
        member = self._ready()
        if member is None:
            return _refused("nothing is ready here")
        endpoint = member.report().endpoint
        if endpoint is None:
            return _refused("nothing is ready here")
        asked = _parsed(body) if request.method == "POST" else None
        if wrong := _not_for(member, request.headers.get(INCARNATION), asked):
            return _refused(wrong)
        if asked is not None:
            body = _named(member, asked, body, endpoint.served_name)
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _HOP]
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        sent = self._client.build_request(request.method, f"{endpoint.url}{path}", headers=headers, content=body)
        try:
            reply = await self._client.send(sent, stream=True)
        except httpx.HTTPError as error:
            _log.warning("request.failed", instance=member.instance, reason=f"{type(error).__name__}: {error}")
            return _refused(f"{member.instance} does not answer")
        passed = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
        passed[INCARNATION] = str(member.incarnation)
        return _Relayed(reply, passed)


class _Relayed(Response):
    """An engine's answer as it comes. A client that hangs up ends its request at the engine too."""

    def __init__(self, reply: httpx.Response, headers: dict[str, str]) -> None:
        self._reply = reply
        self.status_code, self.background = reply.status_code, None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relaying = asyncio.create_task(self._relay(send))
        hung_up = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((relaying, hung_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (relaying, hung_up):
                task.cancel()
            await asyncio.gather(relaying, hung_up, return_exceptions=True)
            await self._reply.aclose()
        if not relaying.cancelled() and (error := relaying.exception()) is not None:
            # The connection is cut: a client must not take what came so far for the whole.
            raise error

    async def _relay(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # As they came, encoded or not: nothing here looks into an answer.
        async for piece in self._reply.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Server(uvicorn.Server):
    """Without handlers of its own: signals belong to the agent."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _whole(request: Request) -> bytes | None:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


def _parsed(body: bytes) -> dict[str, Any] | None:
    """The JSON object that was sent; None for anything else: the engine says better what is wrong with it."""
    try:
        asked: Any = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None
    return asked if isinstance(asked, dict) else None


def _not_for(member: Member, incarnation: str | None, asked: Mapping[str, Any] | None) -> str:
    """Why the request is not for what is ready here; empty when it is."""
    if incarnation is not None and incarnation != str(member.incarnation):
        return f"incarnation {member.incarnation} is ready here, {incarnation[:20]} is asked for"
    name = asked.get("model") if asked else None
    spec = member.assignment.spec
    names = (*(spec.served_names or (spec.name,)), *spec.adapter_names)
    if isinstance(name, str) and name and name not in names:
        return f"{', '.join(names)} is ready here, {name[:80]!r} is asked for"
    return ""


def _named(member: Member, asked: Mapping[str, Any], body: bytes, served_name: str) -> bytes:
    """The body with the name by which the engine knows what is asked for; untouched when it says that or none."""
    if asked.get("model") in (None, served_name, *member.assignment.spec.adapter_names):
        return body
    return json.dumps({**asked, "model": served_name}, ensure_ascii=False).encode()


def _refused(message: str) -> Response:
    return _error(503, message, "not-ready-here", {"Retry-After": RETRY_AFTER})


def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)

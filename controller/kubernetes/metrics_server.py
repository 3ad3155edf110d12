"""The metric APIs of Kubernetes, served by this controller behind the API server: what HPAs follow.

The listener is opened anew when its certificate or the front proxy's authority changes: connections from before then
are answered once more and closed, so that nobody stays known by an authority that is no longer trusted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from relight.controller.autoscale.signals import Board
from relight.controller.config import MetricsListen
from relight.controller.kubernetes import metric_documents as documents
from relight.controller.kubernetes.api import Api
from relight.controller.kubernetes.cache import Cache
from relight.controller.kubernetes.delegation import (
    AUTHENTICATION,
    CONFIG_MAP,
    attributes,
    front_proxy,
)
from relight.controller.kubernetes.events import written
from relight.controller.kubernetes.reviews import Reviews, User
from relight.core.clock import Clock
from relight.core.errors import Denied, FieldError, InvalidInput, NotFound, RelightError, Unavailable
from relight.core.logs import get_logger

LOOK_SECONDS = 60.0
"""How often the certificate's files are looked at."""
CLOSE_SECONDS = 2.0
OPEN_PATHS = ("/healthz", "/livez", "/readyz")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = get_logger("controller.kubernetes.metrics")


class MetricsServer:
    """`open`, then `run` until it is cancelled, then `close`."""

    def __init__(self, listen: MetricsListen, api: Api, reviews: Reviews, board: Board, clock: Clock) -> None:
        self._listen, self._board, self._clock = listen, board, clock
        self._reviews = reviews
        self._changed = asyncio.Event()
        namespace, name = AUTHENTICATION
        self._published = Cache(
            api, CONFIG_MAP, self._changed.set, namespace=namespace, fields=f"metadata.name={name}"
        )  # fmt: skip
        self._proxy = front_proxy(None)
        self._context: ssl.SSLContext | None = None
        self._stamp: object = None
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=CLOSE_SECONDS)

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._errors, self._gate])
        for path in OPEN_PATHS:
            app.router.add_get(path, _well)
        app.router.add_get("/apis", self._groups)
        app.router.add_get("/apis/{group}", self._group)
        app.router.add_get("/apis/{group}/{version}", self._resources)
        space = "/apis/{group}/{version}/namespaces/{namespace}"
        app.router.add_get(f"{space}/{{metric}}", self._external)
        app.router.add_get(f"{space}/{documents.RESOURCE}/{{name}}/{{metric}}", self._custom)
        return app

    async def open(self) -> str:
        """Listens, and returns where. Raises Unavailable when the port is taken, InvalidInput for bad TLS files."""
        host, port = self._listen.host, self._listen.port
        await self._runner.setup()
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
        await self._listen_anew()
        return f"{host}:{self._socket.getsockname()[1]}"

    async def close(self) -> None:
        """Ends everything."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()

    async def run(self) -> None:
        """Follows the certificate and the front proxy's authority."""
        following = asyncio.create_task(self._published.run(), name="watch front proxy")
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_SECONDS)
                self._changed.clear()
                try:
                    await self._listen_anew()
                except RelightError as error:
                    # What was good before goes on.
                    log.error("metrics.not-renewed", error=str(error))
                except Exception:
                    # Autoscalers hold without metrics; the leader that serves them goes on, and the log tells of it.
                    log.exception("metrics.defect")
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _listen_anew(self) -> None:
        self._proxy = front_proxy(self._published.objects.get("/".join(AUTHENTICATION)))
        stamp = (self._proxy.authority, *(await asyncio.to_thread(self._stamps)))
        if stamp == self._stamp or self._socket is None or self._runner.server is None:
            return
        context = _context(self._listen, self._proxy.authority)
        before = self._server
        loop = asyncio.get_running_loop()
        # A copy of the socket for each: the queue of connections outlives its listener.
        self._server = await loop.create_server(self._runner.server, sock=self._socket.dup(), ssl=context)
        self._context, self._stamp = context, stamp
        if before is not None:
            before.close()
        log.info("metrics.listens", front_proxy=bool(self._proxy.authority))

    def _stamps(self) -> tuple[object, ...]:
        files = (self._listen.tls.certificate, self._listen.tls.private_key)
        try:
            return tuple((f.stat().st_mtime_ns, f.stat().st_size) for f in files)
        except OSError as error:
            raise InvalidInput(f"{error.filename} cannot be read: {error.strerror}") from error

    # -- who asks

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Denied as error:
            code, reason = (403, "Forbidden") if error.authenticated else (401, "Unauthorized")
            return _failed(code, reason, error)
        except NotFound as error:
            return _failed(404, "NotFound", error)
        except InvalidInput as error:
            return _failed(400, "BadRequest", error)
        except web.HTTPException as error:
            return _failed(error.status, error.reason.replace(" ", ""), error)
        except RelightError as error:
            # Not 503: of that an autoscaler shows words of its own, and not why.
            return _failed(500, "InternalError", error)

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            user = await self._user(request)
            asked = attributes(request.path)
            if not await self._reviews.may(user, asked):
                raise Denied(f"{user.name} may not read {request.path}", authenticated=True)
        answer = await handler(request)
        if not self._is_current(request):
            answer.force_close()
        return answer

    def _is_current(self, request: web.Request) -> bool:
        tls = request.transport.get_extra_info("ssl_object") if request.transport else None
        return tls is not None and tls.context is self._context

    async def _user(self, request: web.Request) -> User:
        shown = request.transport.get_extra_info("peercert") if request.transport else None
        if shown and self._is_current(request):
            headers: dict[str, list[str]] = {}
            for name, value in request.headers.items():
                headers.setdefault(name.lower(), []).append(value)
            user = self._proxy.user(_common_name(shown), headers)
            if user is not None:
                return user
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return await self._reviews.user(token.strip())
        raise Denied("expected a certificate of the front proxy with a user's headers, or a bearer token")

    # -- what is asked

    async def _groups(self, _: web.Request) -> web.Response:
        return web.json_response(documents.groups())

    async def _group(self, request: web.Request) -> web.Response:
        return web.json_response(documents.group(_known_group(request)))

    async def _resources(self, request: web.Request) -> web.Response:
        group = _known_group(request)
        return web.json_response(documents.resources(group, _known_version(request, group)))

    async def _external(self, request: web.Request) -> web.Response:
        _known_version(request, _known_group(request, documents.EXTERNAL))
        chosen = documents.selector(request.query.get("labelSelector", ""))
        readings = self._board.readings(request.match_info["namespace"])
        return web.json_response(documents.external(_metric(request), readings, chosen, written(self._clock.now())))

    async def _custom(self, request: web.Request) -> web.Response:
        version = _known_version(request, _known_group(request, documents.CUSTOM))
        name, namespace = request.match_info["name"], request.match_info["namespace"]
        metric = _metric(request)
        if name == "*":
            if told := request.query.get("labelSelector"):
                expected = "no selector: ModelDeployments are not told apart by labels here"
                raise InvalidInput("cannot select", [FieldError("labelSelector", expected, told)])
            readings = self._board.readings(namespace)
        else:
            found = self._board.reading(f"{namespace}/{name}")
            if found is None:
                raise NotFound(f"there is no model {namespace}/{name}")
            readings = [found]
        return web.json_response(documents.custom(metric, version, readings, written(self._clock.now())))


async def _well(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def _failed(code: int, reason: str, error: Exception) -> web.Response:
    return web.json_response(documents.status(code, reason, str(error)), status=code)


def _known_group(request: web.Request, *only: str) -> str:
    group = request.match_info["group"]
    if group not in (only or documents.VERSIONS):
        raise NotFound(f"{request.path} is not served here")
    return group


def _known_version(request: web.Request, group: str) -> str:
    version = request.match_info["version"]
    if version not in documents.VERSIONS[group]:
        raise NotFound(f"of {group} these are served: {', '.join(documents.VERSIONS[group])}")
    return version


def _metric(request: web.Request) -> str:
    name = request.match_info["metric"]
    if name not in documents.NAMES:
        raise NotFound(f"there is no metric {name}; there are {', '.join(documents.NAMES)}")
    return name


def _common_name(certificate: dict[str, object]) -> str:
    subject = certificate.get("subject")
    pairs = [pair for part in subject for pair in part] if isinstance(subject, tuple) else []
    return next((str(value) for name, value in pairs if name == "commonName"), "")


def _context(listen: MetricsListen, authority: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listen.tls.certificate, listen.tls.private_key)
    except (OSError, ssl.SSLError) as error:
        expected = "a PEM certificate and its key"
        got = f"{listen.tls.certificate} ({error})"
        raise InvalidInput("no certificate to serve", [FieldError("kubernetes.metrics.tls", expected, got)]) from error
    if authority:
        try:
            context.load_verify_locations(cadata=authority)
        except ssl.SSLError as error:
            raise InvalidInput(f"the front proxy's authority is not PEM: {error}") from error
        # Optional: whoever has a bearer token needs none.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context

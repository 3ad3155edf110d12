"""The running controller: store, catalog, loop, gRPC and REST, started in that order and ended in reverse."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from relight.controller.accept import Accept
from relight.controller.api.app import build
from relight.controller.api.callers import callers_by_token
from relight.controller.api.parts import OperationWaiters, Parts
from relight.controller.api.standby import standby
from relight.controller.autoscale.driver import Autoscaler
from relight.controller.autoscale.signals import Board
from relight.controller.config import ControllerConfig, Listen
from relight.controller.flight.push import Pusher
from relight.controller.flight.timeline import Timeline
from relight.controller.loop import LEASE_NAME, Hooks, Reconciler
from relight.controller.metrics import Metrics
from relight.controller.rpc.guard import agents_by_token
from relight.controller.rpc.server import AgentCalls, serve, serve_scaler
from relight.controller.state.catalog import Catalog
from relight.controller.state.opening import lead, open_store
from relight.controller.state.timed import TimedStore
from relight.core.clock import Clock
from relight.core.errors import Fenced, Unavailable
from relight.core.ids import new_id
from relight.core.logs import get_logger

if TYPE_CHECKING:
    from relight.controller.kubernetes.cluster import Cluster

LEASE_SECONDS = 15.0
AGENT_NAME = "relight-agent"
"""What the certificate of agents in pods is for: nobody knows a pod's address when it is made."""

log = get_logger("controller")


class _Server(uvicorn.Server):
    """Without handlers of its own: signals belong to the process, and it has other things to end too."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a started controller listens, as `host:port`."""

    http: str
    grpc: str
    external_scaler: str = ""
    """Empty where there is none."""


class Controller:
    """One controller. `start`, then `wait` until it must end, then `stop`."""

    def __init__(self, config: ControllerConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._opened = AsyncExitStack()

    async def start(self) -> Addresses:
        """Opens everything, or nothing. Raises Conflict when the state is in use, Unavailable when a port is."""
        async with AsyncExitStack() as opened:
            addresses = await self._open(opened)
            self._opened = opened.pop_all()
        log.info("controller.ready", http=addresses.http, grpc=addresses.grpc, epoch=self.reconciler.lease.epoch)
        return addresses

    async def _open(self, opened: AsyncExitStack) -> Addresses:
        config = self._config
        tokens = config.known_tokens()
        cluster = await self._join_cluster(opened)
        metrics = Metrics()
        opened_store = await open_store(config.state_path, config.redis, self._clock)
        store = TimedStore(opened_store, metrics.control.stored, self._clock)
        opened.push_async_callback(store.close)
        # Before anything listens: a stand-by waits here for its turn.
        lease = await lead(store, LEASE_NAME, self._holder(), LEASE_SECONDS, cluster.epoch_floor if cluster else 0)
        http_socket = _bind(config.http)
        opened.callback(http_socket.close)
        self.catalog = Catalog(store)
        await self.catalog.start()
        opened.push_async_callback(self.catalog.stop)
        pusher = Pusher(config.otlp_endpoint, metrics.control.pushed) if config.otlp_endpoint else None

        def started(timeline: Timeline) -> None:
            metrics.started(timeline)
            if pusher is not None:
                pusher.offer(timeline)

        hooks = Hooks(metrics.seen, started, metrics.control.broken, metrics.control.passed)
        self.reconciler = Reconciler(
            self.catalog,
            self._clock,
            lease,
            slot_grace_seconds=config.slot_grace_seconds,
            gateway_grace_seconds=config.gateway_grace_seconds,
            hooks=hooks,
            epochs_below=cluster.epochs_below if cluster else math.inf,
        )
        opened.push_async_callback(self._release)
        board = Board(self.reconciler.gateways.demand)
        hooks.passed.append(board.passed)
        accept = Accept(self.catalog, self.reconciler, self._clock)
        front = numbers = accept
        admit = agents_by_token(tokens)
        if cluster is not None:
            admit = cluster.agents(self.reconciler.places)
            opened.push_async_callback(cluster.end)
            front, numbers = await cluster.keep(accept, hooks, board)
        autoscaler = Autoscaler(self.reconciler, self.catalog, numbers, self._clock)
        hooks.passed.append(autoscaler.passed)
        for model in config.models:
            await accept.make_known(model.record())
        tls = config.grpc.tls.files() if config.grpc.tls else None
        address = f"{config.grpc.host}:{config.grpc.port}"
        agents = AgentCalls(tls, AGENT_NAME if cluster else "")
        server, grpc_port = await serve(
            self.reconciler, self.catalog, admit, tokens, agents.known_by, self._clock, address, tls
        )  # fmt: skip
        opened.push_async_callback(server.stop, 0.5)
        scaler_address = await self._serve_scaler(opened, board)
        parts = Parts(
            catalog=self.catalog,
            reconciler=self.reconciler,
            accept=front,
            agents=agents,
            metrics=metrics,
            autoscaler=autoscaler,
            clock=self._clock,
            operations_changed=OperationWaiters(self.catalog),
            event_stream_seconds=config.event_stream_seconds,
        )
        callers = cluster.callers(tokens) if cluster else callers_by_token(tokens)
        http = self._http_server(build(parts, callers))
        self._tasks = [
            asyncio.create_task(http.serve(sockets=[http_socket]), name="http"),
            asyncio.create_task(self.reconciler.run(), name="loop"),
            asyncio.create_task(self._keep_lease(), name="lease"),
            asyncio.create_task(autoscaler.run(), name="autoscaler"),
            *(cluster.tasks() if cluster else ()),
        ]
        if pusher is not None:
            # Not one of the tasks whose end ends the controller.
            opened.push_async_callback(_cancelled, asyncio.create_task(pusher.run(), name="traces"))
        opened.push_async_callback(self._end_tasks, http)
        for task in self._tasks:
            task.add_done_callback(lambda _: self._stopping.set())
        http_port = http_socket.getsockname()[1]
        return Addresses(f"{config.http.host}:{http_port}", f"{config.grpc.host}:{grpc_port}", scaler_address)

    async def _serve_scaler(self, opened: AsyncExitStack, board: Board) -> str:
        listen = self._config.external_scaler
        if listen is None:
            return ""
        tls = listen.tls.files() if listen.tls else None
        server, port = await serve_scaler(board, f"{listen.host}:{listen.port}", tls)
        opened.push_async_callback(server.stop, 0.5)
        return f"{listen.host}:{port}"

    def _holder(self) -> str:
        """As whom the lease is held: where something else says that no other leads, it is taken over at once."""
        config = self._config
        if config.redis is None:
            return f"controller of {config.state_path}"
        if config.kubernetes is not None:
            return f"controller of {config.kubernetes.namespace}/{config.kubernetes.lease}"
        return new_id("controller")

    async def _join_cluster(self, opened: AsyncExitStack) -> Cluster | None:
        """Returns once this controller leads, where it is one of several."""
        if self._config.kubernetes is None:
            return None
        # The client takes most of a second to import: only where it is needed.
        from relight.controller.kubernetes.cluster import Cluster

        cluster = await Cluster.open(self._config.kubernetes, self._clock)
        opened.push_async_callback(cluster.close)
        server = self._http_server(standby)
        waiting = asyncio.create_task(server.serve(sockets=[_bind(self._config.http)]), name="standby")
        try:
            await cluster.lead()
        finally:
            server.should_exit = True
            await asyncio.wait({waiting}, timeout=self._config.shutdown_grace_seconds)
            await _cancelled(waiting)
        return cluster

    def _http_server(self, app: ASGIApp) -> uvicorn.Server:
        tls = self._config.http.tls
        return _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=max(1, round(self._config.shutdown_grace_seconds)),
                ssl_certfile=tls.certificate if tls else None,
                ssl_keyfile=tls.private_key if tls else None,
            )
        )

    async def _keep_lease(self) -> None:
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LEASE_SECONDS / 3)
            try:
                await self.reconciler.renew(LEASE_SECONDS)
            except Unavailable as error:
                log.warning("lease.not-renewed", error=str(error))

    def ask_to_stop(self) -> None:
        """Ends `wait`; safe to call from a signal handler of the loop."""
        self._stopping.set()

    async def wait(self) -> None:
        """Returns when it was asked to stop. Raises Fenced when another controller took over."""
        await self._stopping.wait()
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def stop(self) -> None:
        """Takes no new work, finishes what is under way within the grace time, gives the lease up."""
        self._stopping.set()
        await self._opened.aclose()
        log.info("controller.ended")

    async def _end_tasks(self, http: uvicorn.Server) -> None:
        http.should_exit = True
        serving = self._tasks[0]
        await asyncio.wait({serving}, timeout=self._config.shutdown_grace_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self) -> None:
        with suppress(Fenced, Unavailable):
            await self.catalog.store.release(self.reconciler.lease)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _bind(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # The protocol is named, because only then is every accepted connection without Nagle's delay.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((listen.host, listen.port))
    except OSError as error:
        bound.close()
        raise Unavailable(f"cannot listen on {listen.host}:{listen.port}: {error.strerror}") from error
    return bound

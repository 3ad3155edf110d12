"""A real gateway process, real sockets to stub engines, and a scripted controller that tells routes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from relight.agent.engines.stub_http import serve_connection
from relight.agent.engines.stub_server import StubEngine, token
from relight.agent.engines.stub_settings import StubSettings
from relight.core.auth import hash_token
from relight.core.clock import SystemClock
from relight.core.records import GatewayReport, RouteModel, RouteReplica, RouteTable
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import routing_pb2, routing_pb2_grpc

DEADLINE = 12.0
OPERATOR, VIEWER = "rlt_operator", "rlt_viewer"
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
TEXT = " ".join(token("hello", "r1", i) for i in range(4))
"""What a stub engine answers to ASK."""


class Routing(routing_pb2_grpc.RoutingServicer):
    """Tells each table to every attached gateway and remembers every report."""

    def __init__(self) -> None:
        self.reports: list[GatewayReport] = []
        self.port = 0
        self._table: RouteTable | None = None
        self._changed = asyncio.Condition()
        self._outgoing: set[asyncio.Queue[RouteTable | None]] = set()

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        queue: asyncio.Queue[RouteTable | None] = asyncio.Queue()
        if self._table is not None:
            queue.put_nowait(self._table)
        self._outgoing.add(queue)
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                table = await queue.get()
                if table is None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
                yield to_proto(table, routing_pb2.RouteTable)
        finally:
            self._outgoing.discard(queue)
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            async with self._changed:
                self.reports.append(from_proto(message, GatewayReport))
                self._changed.notify_all()

    async def tell(self, *models: RouteModel) -> RouteTable:
        """Tells a newer table and waits until the gateway acknowledged it."""
        revision = self._table.revision + 1 if self._table else 1
        self._table = RouteTable(revision, models)
        for queue in self._outgoing:
            queue.put_nowait(self._table)
        await self.until(lambda r: r.route_revision >= revision)
        return self._table

    def cut(self) -> None:
        """Ends every stream with an error."""
        for queue in self._outgoing:
            queue.put_nowait(None)

    async def until(self, holds: Callable[[GatewayReport], Any], since: int = 0) -> GatewayReport:
        """The first report after the first `since` ones of which `holds` is true."""
        async with asyncio.timeout(DEADLINE), self._changed:
            at = since
            while True:
                while at < len(self.reports):
                    if holds(self.reports[at]):
                        return self.reports[at]
                    at += 1
                await self._changed.wait()


@dataclass
class Engine:
    """A stub engine on a real port of this process."""

    name: str
    settings: StubSettings
    stub: StubEngine = field(init=False)
    server: asyncio.Server | None = None
    url: str = ""
    connections: list[asyncio.StreamWriter] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def up(self) -> Engine:
        self.stub = StubEngine(self.settings, f"stub-{self.name}", "r1", SystemClock())
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        await serve_connection(reader, writer, self._public)

    async def _public(self, request: Any) -> Any:
        self.bodies.append(request.json())
        return await self.stub.public(request)

    def replica(self, incarnation: int = 1) -> RouteReplica:
        return RouteReplica(self.name, incarnation, self.url, f"stub-{self.name}")

    async def down(self) -> None:
        if self.server is not None:
            self.server.close()
        for writer in self.connections:
            writer.transport.abort()


def model(*replicas: RouteReplica, coming: int = 0, can_come: bool = True, **changes: Any) -> RouteModel:
    values: dict[str, Any] = {
        "namespace": "default", "name": "tiny", "served_names": ("alias",), "replicas": replicas, "coming": coming,
        "can_come": can_come, "next_ready_seconds": None, "reason": "told by the test", **changes,
    }  # fmt: skip
    return RouteModel(**values)


async def ask(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    """ASK, with changes."""
    return await client.post("/v1/completions", json={**ASK, **changes}, headers=headers or {})


def held(report: GatewayReport) -> int:
    return sum(m.held for m in report.models)


def in_flight(report: GatewayReport) -> int:
    return sum(i.in_flight for i in report.instances)


@dataclass
class Door:
    """One gateway process."""

    directory: Path
    routing: Routing
    config: dict[str, Any]
    process: asyncio.subprocess.Process | None = None
    url: str = ""

    async def up(self, attached: bool = True) -> Door:
        """Starts it; `attached` waits until the scripted controller has heard of it."""
        roles = [
            {"sha256": hash_token(OPERATOR), "name": "op", "roles": ["operator"]},
            {"sha256": hash_token(VIEWER), "name": "vi", "roles": ["viewer"]},
        ]
        path = self.directory / "gateway.json"
        path.write_text(
            json.dumps(
                {
                    "controller_address": f"127.0.0.1:{self.routing.port}",
                    "token": "rlt_gateway",
                    "tokens": roles,
                    **self.config,
                }
            )
        )
        with (self.directory / "gateway.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "relight.gateway", "--config", str(path),
                stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = (await self.process.stdout.readline()).decode()
        assert line.startswith("gateway listens on"), (self.directory / "gateway.log").read_text()
        self.url = line.split()[-1]
        if attached:
            await self.routing.until(lambda _: True)
        return self

    async def down(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        if self.process is not None:
            async with asyncio.timeout(DEADLINE):
                await self.process.wait()

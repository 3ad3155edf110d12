"""Fixtures: a scripted controller, stub engines, and gateways that are gone after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from relight.agent.engines.stub_settings import StubSettings
from relight.protos.relight.v1 import routing_pb2_grpc
from support.gateway import DEADLINE, Door, Engine, Routing


@pytest.fixture
async def routing() -> AsyncIterator[Routing]:
    server, servicer = grpc.aio.server(), Routing()
    routing_pb2_grpc.add_RoutingServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer
    await server.stop(0)


@pytest.fixture
async def make_engine() -> AsyncIterator[Callable[..., Awaitable[Engine]]]:
    engines: list[Engine] = []

    async def make(name: str = "i-a", **settings: Any) -> Engine:
        engines.append(await Engine(name, StubSettings(weight_bytes=0, kv_bytes=0, **settings)).up())
        return engines[-1]

    yield make
    for engine in engines:
        await engine.down()


@pytest.fixture
async def make_door(routing: Routing, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Door]]]:
    doors: list[Door] = []

    async def make(**config: Any) -> Door:
        doors.append(Door(tmp_path, routing, config))
        return await doors[-1].up()

    yield make
    for door in doors:
        await door.down()
    print((tmp_path / "gateway.log").read_text()[-4000:])


@pytest.fixture
async def door(make_door: Callable[..., Awaitable[Door]]) -> Door:
    return await make_door()


@pytest.fixture
async def client(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE, limits=limits) as client:
        yield client

"""A process stays attached to the controller: who it is, what it says first, and what it does when it is cut off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from relight.controller.cli.pki import make
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput
from relight.core.logs import get_logger
from relight.core.records import Assignment
from relight.core.tls import TlsFiles
from relight.protos.client import ControllerAccess, ControllerStream
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc
from support.agent import TOKEN, Fleet

CLOCK = SystemClock()


@contextlib.asynccontextmanager
async def _serving(fleet: Fleet, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[Any]:
    server, address = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), f"127.0.0.1:{fleet.port}"
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    fleet.port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def _attached(
    fleet: Fleet, report: Callable[[], Any], receive: Callable[[Any], None], tls: TlsFiles | None = None
) -> AsyncIterator[ControllerStream]:
    access = ControllerAccess(f"127.0.0.1:{fleet.port}", TOKEN, tls)
    log = get_logger("tests.stream")
    stream = ControllerStream("test", log, access, CLOCK, fleet_pb2_grpc.FleetStub, report, receive)
    running = asyncio.create_task(stream.run())
    try:
        yield stream
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _numbered() -> Callable[[], Any]:
    numbers = iter(range(1, 1000))
    return lambda: fleet_pb2.SlotReport(slot="a", agent="x", sequence=next(numbers))


def _files(directory: Path, name: str) -> TlsFiles:
    return TlsFiles(directory / f"{name}.pem", directory / f"{name}.key", directory / "ca.pem")


async def test_a_controller_that_comes_back_hears_a_whole_report_and_is_heard() -> None:
    fleet, received = Fleet(), asyncio.Queue[Any]()
    fleet.keep(Assignment("a", 1, 7, ()))
    async with contextlib.AsyncExitStack() as stack:
        async with _serving(fleet):
            await stack.enter_async_context(_attached(fleet, _numbered(), received.put_nowait))
            await fleet.until(lambda r: r.sequence == 1)
            assert (await received.get()).revision == 7
        async with _serving(fleet):
            await fleet.until(lambda r: r.sequence > 1)
            assert (await received.get()).revision == 7
    assert set(fleet.identities) == {f"Bearer {TOKEN}"}


async def test_a_token_that_was_renewed_in_its_file_is_shown_at_the_next_attach(tmp_path: Path) -> None:
    fleet, file = Fleet(), tmp_path / "token"
    async with _serving(fleet):
        access = ControllerAccess(f"127.0.0.1:{fleet.port}", "", None, file)
        stream = ControllerStream(
            "test", get_logger("tests.stream"), access, CLOCK, fleet_pb2_grpc.FleetStub, _numbered(), lambda _: None
        )  # fmt: skip
        running = asyncio.create_task(stream.run())
        file.write_text("first\n")
        await fleet.until(lambda r: r.sequence == 1)
        file.write_text("second\n")
    async with _serving(fleet):
        await fleet.until(lambda r: r.sequence > 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert fleet.identities == ["Bearer first", "Bearer second"]


async def test_changes_that_nobody_waits_for_are_told_together() -> None:
    fleet = Fleet()
    async with _serving(fleet), _attached(fleet, _numbered(), lambda _: None) as stream:
        await fleet.until(lambda r: r.sequence == 1)
        for _ in range(10):
            stream.changed(urgent=False)
        await fleet.until(lambda r: r.sequence == 2)
        stream.changed()
        await fleet.until(lambda r: r.sequence == 3)
    assert [r.sequence for r in fleet.reports] == [1, 2, 3]


async def test_with_certificates_of_one_authority_both_ends_know_each_other(tmp_path: Path) -> None:
    make(tmp_path, ("controller", "process"), CLOCK)
    certificate, key, authority = _files(tmp_path, "controller").read()
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    fleet = Fleet()
    own = _files(tmp_path, "process")
    async with _serving(fleet, credentials), _attached(fleet, _numbered(), lambda _: None, own):
        await fleet.until(lambda r: r.slot == "a")


async def test_a_certificate_that_cannot_be_read_ends_the_stream_with_its_name(tmp_path: Path) -> None:
    access = ControllerAccess("127.0.0.1:1", TOKEN, _files(tmp_path, "none"))
    log = get_logger("tests.stream")
    stream = ControllerStream("test", log, access, CLOCK, fleet_pb2_grpc.FleetStub, _numbered(), lambda _: None)
    with pytest.raises(InvalidInput, match=r"tls\.certificate"):
        await stream.run()

"""Fixtures: a scripted controller, and slots whose every process is gone after the test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from relight.protos.relight.v1 import fleet_pb2_grpc
from support.agent import TOKEN, Fleet, Slot


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    server, servicer = grpc.aio.server(), Fleet()
    fleet_pb2_grpc.add_FleetServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer
    await server.stop(0)


@pytest.fixture
async def make_slot(fleet: Fleet) -> AsyncIterator[Callable[..., Slot]]:
    slots: list[Slot] = []
    # Short: the kernel allows 107 bytes for a socket's path.
    with tempfile.TemporaryDirectory(prefix="rl-") as root:

        def make(name: str = "a", **changes: Any) -> Slot:
            directory = Path(root) / name
            directory.mkdir()
            config = {
                "slot": name,
                "controller_address": f"127.0.0.1:{fleet.port}",
                "token": TOKEN,
                "state_dir": str(directory / "state"),
                "devices": [{"id": "cpu-0", "memory_bytes": 1 << 30}, {"id": "cpu-1", "memory_bytes": 1 << 30}],
                "engines": {"stub": {}},
                "health_seconds": 0.2,
                **changes,
            }
            slots.append(Slot(fleet, directory, config))
            return slots[-1]

        yield make
        for slot in slots:
            await slot.down()
            # Shown by pytest when the test failed.
            for log in slot.directory.rglob("*.log"):
                print(f"--- {log}\n{log.read_text()[-4000:]}")
        left = [pid for slot in slots for pid in slot.marked()]
        assert left == [], f"orphans: {left}"


@pytest.fixture
async def slot(make_slot: Callable[..., Slot]) -> Slot:
    made = make_slot()
    await made.up()
    return made

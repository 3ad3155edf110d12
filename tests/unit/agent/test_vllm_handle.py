"""What the handle on a vLLM with Relight inside does when its ranks are not of one mind, or cannot sleep at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relight.agent.engines.base import MemberContext
from relight.agent.engines.stub_http import Request, Response, serve_connection
from relight.agent.engines.vllm_handle import VllmHandle, endpoint_file
from relight.core.clock import SystemClock
from relight.core.errors import LocalFault
from relight.core.records import Desired, InstanceAssignment, ModelSpec
from relight.plugin.control import ControlServer


@dataclass
class Engine:
    """Two ranks as their control sockets tell of them, and vLLM's route that puts them to sleep."""

    states: list[str]
    unfit: str = ""
    obeys: bool = True
    """Whether vLLM's sleep reaches its ranks: it does nothing when it counts itself as asleep."""
    asked: list[str] = field(default_factory=list)

    def operations(self, rank: int) -> dict[str, Any]:
        def describe(arguments: Any, progress: Any) -> object:
            return {"state": self.states[rank], "level": 0, "unfit": self.unfit}

        def suspend(arguments: Any, progress: Any) -> None:
            self.asked.append(f"suspend {rank}")
            self.states[rank] = "asleep"

        return {"describe": describe, "suspend": suspend, "close_source": lambda a, _: 0}

    async def answer(self, request: Request) -> Response:
        self.asked.append(request.path.partition("?")[0])
        if self.obeys:
            self.states = ["asleep"] * len(self.states)
        return Response(200, {"status": "sleeping"})


@asynccontextmanager
async def handled(engine: Engine, directory: Path) -> AsyncIterator[VllmHandle]:
    connections: list[asyncio.Task[None]] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(serve_connection(reader, writer, engine.answer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint_file(directory).write_text(json.dumps({"host": "127.0.0.1", "port": port}))
    sockets = [ControlServer(directory / f"worker-{n}.sock", engine.operations(n)) for n in range(len(engine.states))]
    spec = ModelSpec("default", "m", "/models/m", "r1", "vllm", devices_per_member=len(engine.states))
    wanted = InstanceAssignment("i-a", spec.key, spec, 0, 1, ("gpu-0", "gpu-1"), Desired.READY)
    handle = VllmHandle(MemberContext(wanted, directory, directory / "log", "127.0.0.1"), SystemClock(), awaits=False)
    try:
        yield handle
    finally:
        await handle.close()
        server.close()
        for one in sockets:
            one.close()
        await asyncio.gather(*(t for t in connections if not t.done()), return_exceptions=True)


async def test_an_engine_that_cannot_sleep_is_not_asked_to_and_says_why(tmp_path: Path) -> None:
    engine = Engine(["awake", "awake"], unfit="its experts change places as it runs (EPLB)")
    async with handled(engine, tmp_path) as handle:
        with pytest.raises(LocalFault, match="EPLB"):
            await handle.sleep(2)
    assert engine.asked == []


async def test_an_awake_engine_is_suspended_by_vllms_own_sleep(tmp_path: Path) -> None:
    engine = Engine(["awake", "awake"])
    async with handled(engine, tmp_path) as handle:
        await handle.suspend()
    assert engine.asked == ["/sleep"]


@pytest.mark.parametrize("states", [["asleep", "refilled"], ["refilled", "refilled"], ["asleep", "asleep"]])
async def test_ranks_that_a_refill_has_left_half_done_give_their_memory_back(tmp_path: Path, states: list[str]) -> None:
    engine = Engine(states)
    async with handled(engine, tmp_path) as handle:
        await handle.suspend()
    assert sorted(engine.asked) == ["suspend 0", "suspend 1"]


async def test_ranks_that_woke_while_others_did_not_are_suspended_though_vllm_counts_itself_asleep(
    tmp_path: Path,
) -> None:
    engine = Engine(["awake", "refilled"], obeys=False)
    async with handled(engine, tmp_path) as handle:
        await handle.suspend()
    assert sorted(engine.asked) == ["/sleep", "suspend 0", "suspend 1"]
    assert engine.states == ["asleep", "asleep"]

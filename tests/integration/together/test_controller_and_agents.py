"""The real controller process with real agents, supervisors and stub engines: the main walk."""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.agent import Slot
from support.controlplane import DEADLINE, TOKENS, FakeGateway, Process, client, free_port, model

MODEL = "/api/v1/namespaces/default/models/m"


@pytest.fixture
async def fleet():
    """A controller process and agents a and b; no engine process outlives the test."""
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-")))
        port = free_port()
        process = Process(root, models=[model(replicas=1, guardians={"replicas": 1})], grpc={"port": port})
        http, rpc = await process.start()
        stack.push_async_callback(process.end)
        slots = []
        for name in ("a", "b"):
            directory = root / name
            directory.mkdir()
            slot = Slot(
                SimpleNamespace(port=port),
                directory,
                {
                    "slot": name,
                    "controller_address": rpc,
                    "token": TOKENS["agent"],
                    "state_dir": str(directory / "state"),
                    "devices": [{"id": "cpu-0", "memory_bytes": 1 << 30}],
                    "engines": {"stub": {}},
                    "health_seconds": 0.2,
                },
            )
            await slot.up()
            stack.push_async_callback(slot.down)
            slots.append(slot)
        door = FakeGateway(rpc)
        door.attach()
        stack.push_async_callback(door.detach)
        caller = await stack.enter_async_context(client(http))
        yield SimpleNamespace(process=process, slots=slots, door=door, caller=caller, root=root)


async def scale(caller, replicas, **body):
    reply = await caller.put(f"{MODEL}/scale", json={"replicas": replicas, **body})
    assert reply.status_code == 202, reply.text
    operation = reply.json()["id"]
    ended = await caller.get(f"/api/v1/operations/{operation}", params={"wait": DEADLINE})
    return ended.json()


async def guardian_there(caller):
    async with asyncio.timeout(DEADLINE):
        while (await caller.get(MODEL)).json()["dormant"] < 1:
            operations = (await caller.get("/api/v1/operations")).json()["items"]
            for operation in operations:
                await caller.get(f"/api/v1/operations/{operation['id']}", params={"wait": 2})


async def test_out_and_in_again_by_every_rung_then_to_zero_and_back_by_a_held_request(fleet):
    await fleet.door.until(lambda t: t.models and t.models[0].replicas)
    await guardian_there(fleet.caller)
    for rungs in (["peer_shm"], ["disk"], None):
        out = await scale(fleet.caller, 2, **({"rungs": rungs} if rungs else {}))
        assert out["state"] == "done", str(out)
        await fleet.door.until(lambda t: len(t.models[0].replicas) == 2)
        (name,) = out["instances"]
        start = (await fleet.caller.get(f"/api/v1/instances/{name}/timeline")).json()
        assert start["way"] == (rungs or ["peer_shm"])[0]
        back = await scale(fleet.caller, 1)
        assert back["state"] == "done", back
        await fleet.door.until(lambda t: len(t.models[0].replicas) == 1)
    zero = await scale(fleet.caller, 0)
    assert zero["state"] == "done", zero
    await fleet.door.until(lambda t: not t.models[0].replicas)
    fleet.door.demand(held=1)
    await fleet.door.until(lambda t: len(t.models[0].replicas) == 1)


async def test_a_killed_controller_finds_its_fleet_again_and_serving_goes_on(fleet):
    table = await fleet.door.until(lambda t: t.models and t.models[0].replicas)
    serving = table.models[0].replicas[0]
    await guardian_there(fleet.caller)
    await fleet.process.end(9)
    before = fleet.door.table.revision
    http, _ = await fleet.process.start()
    table = await fleet.door.until(lambda t: t.revision > before and t.models[0].replicas)
    assert table.models[0].replicas[0] == serving
    async with client(http) as caller:
        out = await scale(caller, 2)
        assert out["state"] == "done", str(out)

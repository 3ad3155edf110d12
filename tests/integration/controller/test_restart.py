"""The controller killed, restarted, and with its store lost: intent is kept, what serves goes on serving."""

import asyncio
import json
import signal
import sys
from contextlib import suppress

import httpx
import pytest

from relight.core.states import State
from support.controlplane import (
    DEADLINE,
    FakeAgent,
    FakeGateway,
    Process,
    Running,
    client,
    configuration,
    free_port,
    model,
    settled,
)


@pytest.mark.parametrize(
    "failpoint",
    [
        "controller.accept.after-operation",
        "controller.apply.before-assignment",
        "controller.apply.after-assignment",
    ],
)
async def test_a_scale_whose_controller_was_killed_ends_as_asked_after_its_restart(tmp_path, failpoint):
    grpc_port = free_port()
    process = Process(tmp_path, models=[model()], grpc={"port": grpc_port})
    http, rpc = await process.start(f"{failpoint}=exit")
    agent = FakeAgent("a", rpc)
    agent.attach()
    try:
        async with client(http) as caller:
            # The reply may or may not come before the end: what counts is that the process dies.
            with suppress(httpx.HTTPError):
                await caller.put("/api/v1/namespaces/default/models/m/scale", json={"replicas": 1})
        async with asyncio.timeout(DEADLINE):
            await process.process.wait()
        assert await process.end() == 137
        http, _ = await process.start()
        async with client(http) as caller:
            (operation,) = (await caller.get("/api/v1/operations")).json()["items"]
            ended = (await caller.get(f"/api/v1/operations/{operation['id']}", params={"wait": DEADLINE})).json()
            assert ended["state"] == "done", ended
            assert [i.state for i in agent.instances.values()] == [State.READY]
            instances = (await caller.get("/api/v1/instances")).json()["items"]
            assert len(instances) == 1
        assert await process.end() == 0
    finally:
        await agent.detach()
        if process.process.returncode is None:
            await process.end(signal.SIGKILL)


async def test_an_emptied_store_ends_nothing_that_serves(tmp_path):
    before = tmp_path / "before"
    after = tmp_path / "after"
    before.mkdir()
    after.mkdir()
    port = free_port()
    running = await Running.start(before, models=[model(replicas=1)], grpc={"port": port})
    agent, door = FakeAgent("a", running.rpc), FakeGateway(running.rpc)
    agent.attach()
    door.attach()
    table = await door.until(lambda t: t.models[0].replicas)
    serving = table.models[0].replicas[0].instance
    await settled(running, ready=1)
    seen = agent.assignment
    await door.detach()
    await running.stop()
    # A new store that knows the model but no assignment, and an epoch that starts over.
    running = await Running.start(after, models=[model(replicas=1)], grpc={"port": port})
    door = FakeGateway(running.rpc)
    door.attach()
    try:
        table = await door.until(lambda t: t.models[0].replicas)
        assert [r.instance for r in table.models[0].replicas] == [serving]
        await agent.until(lambda a: a.assignment.revision > seen.revision)
        assert agent.assignment.epoch >= seen.epoch
        assert agent.instances[serving].state is State.READY
        assert [len(a.instances) for a in agent.history[-2:]] == [1, 1]
    finally:
        await door.detach()
        await agent.detach()
        await running.stop()


async def test_a_slot_that_runs_an_unknown_model_is_left_alone(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    port = free_port()
    running = await Running.start(before, models=[model(replicas=1)], grpc={"port": port})
    agent = FakeAgent("a", running.rpc)
    agent.attach()
    await agent.until(lambda a: a.instances)
    await settled(running, ready=1)
    heard = len(agent.history)
    await running.stop()
    running = await Running.start(after, models=[model("other", replicas=1)], grpc={"port": port})
    try:
        async with asyncio.timeout(DEADLINE):
            while not running.controller.reconciler.fleet.seen:
                await running.controller.catalog.reached(running.controller.catalog.revision + 1)
        ended = await running.ended(await running.scale(2, "other"))
        assert ended["state"] == "failed"
        assert len(agent.history) == heard
        assert [i.state for i in agent.instances.values()] == [State.READY]
        assert [s.clear for s in running.controller.reconciler.snapshot().slots] == [False]
    finally:
        await agent.detach()
        await running.stop()


async def test_a_wrong_configuration_names_the_key_and_starts_nothing(tmp_path):
    path = tmp_path / "controller.json"
    path.write_text(json.dumps(configuration(tmp_path, colour="red", http={"port": 1, "host": "0.0.0.0"})))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "relight.controller", "--config", str(path), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE):
        _, told = await process.communicate()
    assert process.returncode == 2
    assert b"colour" in told
    assert b"loopback" in told
    assert not (tmp_path / "state.db").exists()

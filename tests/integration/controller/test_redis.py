"""Controllers whose state is in Redis: one leads and the next stands by; a lost store ends nothing that serves."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from relight.core.errors import Fenced
from relight.core.states import State
from support.controlplane import DEADLINE, FakeAgent, FakeGateway, Running, free_port, model, settled
from support.redisserver import RedisServer

PREFIXES = count()


@pytest.fixture(scope="module")
def server():
    running = RedisServer()
    yield running
    running.close()


@pytest.fixture
def where(server):
    """The configuration of a controller over a store of its own."""
    redis = {"url": server.url, "prefix": f"c{next(PREFIXES)}"}
    return {"state_path": None, "redis": redis, "grpc": {"port": free_port()}}


async def test_the_next_controller_leads_when_the_first_gives_up_and_finds_what_was_asked(tmp_path, where):
    first = await Running.start(tmp_path, models=[model()], **where)
    agent = FakeAgent("a", first.rpc)
    agent.attach()
    assert (await first.ended(await first.scale(1)))["state"] == "done"
    epoch = first.controller.reconciler.lease.epoch
    standing_by = asyncio.create_task(Running.start(tmp_path, **{**where, "grpc": {"port": 0}}))
    await first.stop()
    async with asyncio.timeout(DEADLINE):
        second = await standing_by
    try:
        assert second.controller.reconciler.lease.epoch > epoch
        assert second.controller.catalog.models["default/m"].record.spec.replicas == 1
        await agent.detach()
        agent.rpc = second.rpc
        agent.attach()
        await settled(second, ready=1)
    finally:
        await agent.detach()
        await second.stop()


async def test_a_controller_whose_server_was_emptied_ends_and_the_next_adopts_what_serves(tmp_path, where, server):
    running = await Running.start(tmp_path, models=[model(replicas=1)], **where)
    agent, door = FakeAgent("a", running.rpc), FakeGateway(running.rpc)
    agent.attach()
    door.attach()
    table = await door.until(lambda t: t.models[0].replicas)
    serving = table.models[0].replicas[0].instance
    await settled(running, ready=1)
    told = door.table.revision
    server.client().flushall()
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(Fenced):
            await running.controller.wait()
    await running.stop()
    # It told nobody that there is nothing any more.
    assert door.table.revision == told
    running = await Running.start(tmp_path, models=[model(replicas=1)], **where)
    try:
        await settled(running, ready=1)
        table = await door.until(lambda t: t.models[0].replicas)
        assert [r.instance for r in table.models[0].replicas] == [serving]
        assert agent.instances[serving].state is State.READY
    finally:
        await door.detach()
        await agent.detach()
        await running.stop()

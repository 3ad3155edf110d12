"""Fixtures: a controller in this process with scripted agents and gateways attached to it."""

import pytest

from support.controlplane import FakeAgent, FakeGateway, Running


@pytest.fixture
async def fleet(tmp_path, request):
    """A controller, agents a and b of one host with a device each, and a gateway; started as asked."""
    opened = []

    async def start(agents=("a", "b"), devices=1, gateway=True, **changes):
        running = await Running.start(tmp_path, **changes)
        opened.append(running.stop)
        found = [FakeAgent(name, running.rpc, devices=devices) for name in agents]
        for agent in found:
            agent.attach()
            opened.append(agent.detach)
        door = FakeGateway(running.rpc)
        if gateway:
            door.attach()
            opened.append(door.detach)
        return running, found, door

    yield start
    for close in reversed(opened):
        await close()

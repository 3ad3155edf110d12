"""The compile-cache ring as agents hear of it from a real controller, over its own death and theirs."""

from __future__ import annotations

import asyncio

from relight.core.records import CacheReport, Desired
from relight.transfer.grants import check, new_key
from support.controlplane import CLOCK, FakeAgent, Running, model


def _agent(running: Running, name: str, n: int, key: str | None = None) -> FakeAgent:
    made = FakeAgent(name, running.rpc)
    made.cache = CacheReport(f"tcp:127.0.0.1:{n}", f"{n:064x}", grant_key=key or new_key())
    return made


def _nodes(agent: FakeAgent) -> list[str]:
    ring = agent.assignment.ring if agent.assignment else None
    return [n.slot for n in ring.nodes] if ring else []


async def test_each_agent_hears_of_all_living_nodes_with_grants_of_its_own(tmp_path):
    running = await Running.start(tmp_path, models=[model(replicas=1)])
    key = new_key()
    first, second = _agent(running, "a", 1), _agent(running, "b", 2, key)
    for agent in (first, second):
        agent.attach()
    for agent in (first, second):
        heard = (await agent.until(lambda a: _nodes(a) == ["a", "b"])).ring
        assert heard.signers == (f"{1:064x}", f"{2:064x}")
        grant = next(n.grant for n in heard.nodes if n.slot == "b")
        claims = check(key, grant, now=CLOCK.now(), source_instance="b", generation=0, manifest_digest=str)
        assert claims.receiver == agent.slot
    # Nothing but the ring changed meanwhile: what runs is the same under the same revision.
    assert sum(len(a.instances) for a in (first, second)) == 1
    before = first.assignment
    await second.detach()
    after = await first.until(lambda a: _nodes(a) == ["a"])
    assert after.ring.revision > before.ring.revision
    assert after.ring.signers == before.ring.signers
    assert [i.desired for i in after.instances] in ([], [Desired.READY])
    await first.detach()
    await running.stop()


async def test_a_node_that_only_fills_up_is_told_to_nobody(tmp_path):
    running = await Running.start(tmp_path)
    agent = _agent(running, "a", 1)
    agent.attach()
    first = await agent.until(lambda a: _nodes(a) == ["a"])
    count = len(agent.history)
    agent.cache = CacheReport(agent.cache.address, agent.cache.signer, 5, 99, grant_key=agent.cache.grant_key)
    agent.dirty.set()
    other = _agent(running, "b", 2)
    other.attach()
    after = await agent.until(lambda a: _nodes(a) == ["a", "b"])
    assert len(agent.history) == count + 1
    assert after.revision == first.revision
    for each in (agent, other):
        await each.detach()
    await running.stop()


async def test_a_restarted_controller_waits_for_everybody_and_still_trusts_who_is_gone(tmp_path):
    running = await Running.start(tmp_path)
    agents = [_agent(running, "a", 1), _agent(running, "b", 2)]
    for agent in agents:
        agent.attach()
    before = (await agents[0].until(lambda a: _nodes(a) == ["a", "b"])).ring
    catalog = running.controller.catalog
    async with asyncio.timeout(10):
        while len(catalog.slots) < 2:
            await catalog.reached(catalog.revision + 1)
    for agent in agents:
        await agent.detach()
    await running.stop()
    again = await Running.start(tmp_path)
    agent = _agent(again, "a", 1)
    agent.attach()
    told = await agent.until(lambda a: a.assignment.ring)
    # The first word on the ring came when the other one had missed its grace time, not as a ring of whoever was first.
    assert _nodes(agent) == ["a"]
    assert told.ring.revision > before.revision
    assert told.ring.signers == before.signers
    await agent.detach()
    await again.stop()

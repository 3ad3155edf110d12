"""The host tier as agents hear of it from a real controller, and who reads the copies."""

from __future__ import annotations

import pytest

from relight.core.records import RungKind
from relight.core.states import State
from relight.transfer.grants import check
from support.controlplane import CLOCK, FakeAgent, Running, free_port, model

BUDGET = 64 << 20


def copies(agent: FakeAgent) -> list[str]:
    tier = agent.assignment.host_tier if agent.assignment else None
    return [w.copy for w in tier.wanted] if tier else []


@pytest.fixture
async def pair(tmp_path):
    """A model with one replica on slot a, and slot b that has a budget and no device."""
    running = await Running.start(tmp_path, models=[model(replicas=1)])
    engine, keeper = FakeAgent("a", running.rpc), FakeAgent("b", running.rpc, devices=0)
    keeper.budget = BUDGET
    for agent in (engine, keeper):
        agent.attach()
    yield running, engine, keeper
    for agent in (engine, keeper):
        await agent.detach()
    await running.stop()


async def test_after_the_last_replica_went_the_next_wake_reads_the_copy_before_the_disk(pair):
    running, engine, keeper = pair
    heard = await keeper.until(copies)
    (wanted,) = heard.host_tier.wanted
    source = wanted.rungs[0].source
    claims = check("ab" * 32, source.grant, now=CLOCK.now(), source_instance=source.instance, generation=1,
                   manifest_digest=lambda: "digest")  # fmt: skip
    assert claims.receiver == wanted.copy
    assert (await running.ended(await running.scale(0)))["state"] == "done"
    await engine.until(lambda a: all(i.state is not State.READY for i in a.instances.values()))
    assert copies(keeper) == [wanted.copy]
    ended = await running.ended(await running.scale(1))
    assert ended["state"] == "done"
    (assigned,) = [i for i in engine.assignment.instances if i.instance in ended["instances"]]
    assert [r.kind for r in assigned.rungs] == [RungKind.HOST_SHM, RungKind.HOST_TCP, RungKind.DISK]
    first = assigned.rungs[0]
    assert first.source.instance == wanted.copy
    assert "is a copy in the memory on the same host" in first.reason
    claims = check("cd" * 32, first.source.grant, now=CLOCK.now(), source_instance=wanted.copy, generation=1,
                   manifest_digest=lambda: "digest")  # fmt: skip
    assert claims.receiver == assigned.instance


async def test_a_copy_is_shown_without_its_key_and_is_no_instance(pair):
    running, _, keeper = pair
    await keeper.until(copies)
    await running.ended(await running.scale(1))
    slots = {s["name"]: s for s in (await running.client.get("/api/v1/slots")).json()["items"]}
    assert slots["a"]["host_tier"] is None
    shown = slots["b"]["host_tier"]
    assert [(c["id"], c["model"], c["state"]) for c in shown["copies"]] == [(*copies(keeper), "default/m", "ready")]
    assert (shown["budget_bytes"], shown["bytes"]) == (BUDGET, 2 << 20)
    assert "cd" * 32 not in str(slots)
    assert len(await running.instances()) == 1


async def test_the_copy_goes_with_its_model(pair):
    running, _, keeper = pair
    await keeper.until(copies)
    reply = await running.client.delete("/api/v1/namespaces/default/models/m")
    assert reply.status_code < 300, reply.text
    await keeper.until(lambda a: a.assignment.host_tier is not None and not copies(a))


async def test_a_controller_that_comes_back_leaves_the_last_copy_where_it_is(tmp_path):
    port = free_port()
    running = await Running.start(tmp_path, models=[model(replicas=1)], grpc={"port": port})
    engine, keeper = FakeAgent("a", running.rpc), FakeAgent("b", running.rpc, devices=0)
    keeper.budget = BUDGET
    for agent in (engine, keeper):
        agent.attach()
    await keeper.until(copies)
    before = copies(keeper)
    await running.ended(await running.scale(0))
    # Its keys are reported with it: what was sent before the report of a copy names none.
    await keeper.until(lambda a: not a.assignment.host_tier.wanted[0].rungs)
    epoch = keeper.assignment.epoch
    await running.stop()
    running = await Running.start(tmp_path, grpc={"port": port})
    try:
        heard = await keeper.until(lambda a: a.assignment.epoch > epoch and a.assignment.host_tier is not None)
        assert [w.copy for w in heard.host_tier.wanted] == before
    finally:
        for agent in (engine, keeper):
            await agent.detach()
        await running.stop()

"""Demand above what the written number is for wakes guardians at once, without writing the number."""

from __future__ import annotations

from relight.controller.decide.replicas import decide
from relight.core.records import HeldLevel
from support.controlplane import Running, model, settled

BURST = {"max_replicas": 3, "hold_seconds": 0.2}


async def bursting(fleet, **changes):
    models = [model(replicas=1, guardians={"replicas": 2}, scaling={"requests_per_replica": 4}, **changes)]
    running, _, door = await fleet(agents=("a", "b", "c"), models=models)
    await settled(running, ready=1, dormant=2)
    return running, door


async def kinds(running):
    return [o["kind"] for o in (await running.client.get("/api/v1/operations")).json()["items"]]


async def test_guardians_wake_for_a_burst_and_sleep_again_after_it(fleet):
    running, door = await bursting(fleet, burst=BURST)
    door.demand(held=2, in_flight=8)
    shown = await settled(running, ready=3)
    assert shown["spec"]["replicas"] == 1
    assert "burst" in await kinds(running)
    door.demand(in_flight=1)
    shown = await settled(running, ready=1, dormant=2)
    assert shown["spec"]["replicas"] == 1


async def test_a_number_written_up_to_the_burst_keeps_what_it_woke(fleet):
    running, door = await bursting(fleet, burst={"max_replicas": 3, "hold_seconds": 600.0})
    door.demand(in_flight=12)
    await settled(running, ready=3)
    before = {i["id"] for i in await running.instances() if i["state"] == "ready"}
    operation = await running.ended(await running.scale(3))
    assert operation["state"] == "done"
    assert operation["instances"] == []
    assert {i["id"] for i in await running.instances() if i["state"] == "ready"} == before


async def test_a_burst_outlives_its_controller_while_no_gateway_tells_of_demand(fleet, tmp_path):
    running, door = await bursting(fleet, burst=BURST)
    door.demand(in_flight=12)
    await settled(running, ready=3)
    await door.detach()
    await running.stop()
    again = await Running.start(tmp_path)
    try:
        (decision,) = decide(again.controller.reconciler.snapshot())
        assert (decision.replicas, decision.burst) == (3, (HeldLevel(3),))
        assert "the demand is missing" in decision.reason
    finally:
        await again.stop()

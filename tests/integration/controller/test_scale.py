"""A scale-out and its way back, through the REST API and real gRPC, with scripted agents and gateways."""

from relight.core.records import Desired, Failure, RungKind
from relight.core.states import State
from support.controlplane import model, settled


def in_state(state, count=1):
    return lambda agent: sum(i.state is state for i in agent.instances.values()) >= count


async def one_ready_one_dormant(fleet, **changes):
    running, agents, door = await fleet(models=[model(replicas=1, guardians={"replicas": 1}, **changes)])
    await door.until(lambda t: t.models[0].replicas)
    both = lambda a: any(i.state is State.DORMANT for x in agents for i in x.instances.values())  # noqa: E731
    for agent in agents:
        await agent.until(lambda a: a.instances)
    assert both(None)
    return running, agents, door


async def test_a_guardian_is_woken_from_the_peer_on_its_host_and_routed_when_ready(fleet):
    running, agents, door = await one_ready_one_dormant(fleet)
    await settled(running, ready=1, dormant=1)
    operation = await running.scale(2)
    ended = await running.ended(operation)
    assert ended["state"] == "done", ended
    (name,) = ended["instances"]
    agent = next(a for a in agents if name in a.instances)
    (assigned,) = [i for i in agent.assignment.instances if i.instance == name]
    assert [r.kind for r in assigned.rungs] == [RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.DISK]
    assert assigned.rungs[0].source.address.startswith("unix:")
    assert assigned.rungs[0].source.grant
    table = await door.until(lambda t: len(t.models[0].replicas) == 2)
    assert name in {r.instance for r in table.models[0].replicas}
    start = (await running.client.get(f"/api/v1/instances/{name}/timeline")).json()
    assert [p["name"] for p in start["phases"][:3]] == ["accept", "decide", "dispatch"]
    for before, after in zip(start["phases"][:3], start["phases"][1:4], strict=True):
        assert before["end"] == after["start"]


async def test_a_replica_sleeps_only_after_every_gateway_let_go_of_it(fleet):
    running, agents, door = await one_ready_one_dormant(fleet)
    await settled(running, ready=1, dormant=1)
    await running.ended(await running.scale(2))
    table = await door.until(lambda t: len(t.models[0].replicas) == 2)
    door.open = {(r.instance, r.incarnation): 1 for r in table.models[0].replicas}
    door.dirty.set()
    operation = await running.scale(1)
    table = await door.until(lambda t: len(t.models[0].replicas) == 1)
    (leaving,) = {i for i, _ in door.open} - {r.instance for r in table.models[0].replicas}
    agent = next(a for a in agents if leaving in a.instances)
    await agent.until(lambda a: a.instances[leaving].state is State.DRAINING)
    assert (await running.client.get(f"/api/v1/operations/{operation['id']}")).json()["state"] == "running"
    door.open = {}
    door.dirty.set()
    assert (await running.ended(operation))["state"] == "done"
    assert agent.instances[leaving].state is State.DORMANT
    wanted = [i.desired for a in agent.history for i in a.instances if i.instance == leaving]
    assert wanted[-2:] == [Desired.DRAINED, Desired.DORMANT]


async def test_requests_that_outlive_the_drain_time_hold_nothing_up(fleet):
    running, _, door = await one_ready_one_dormant(fleet, drain={"timeout_seconds": 0.05})
    await settled(running, ready=1, dormant=1)
    await running.ended(await running.scale(2))
    table = await door.until(lambda t: len(t.models[0].replicas) == 2)
    door.open = {(r.instance, r.incarnation): 1 for r in table.models[0].replicas}
    door.dirty.set()
    assert (await running.ended(await running.scale(1)))["state"] == "done"


async def test_a_vanished_gateway_counts_as_drained(fleet):
    running, _, door = await one_ready_one_dormant(fleet)
    await settled(running, ready=1, dormant=1)
    await running.ended(await running.scale(2))
    table = await door.until(lambda t: len(t.models[0].replicas) == 2)
    door.open = {(r.instance, r.incarnation): 1 for r in table.models[0].replicas}
    door.dirty.set()
    operation = await running.scale(1)
    await door.detach()
    assert (await running.ended(operation))["state"] == "done"


async def test_held_requests_at_zero_wake_one_replica_which_stays_while_it_is_asked(fleet):
    running, _, door = await one_ready_one_dormant(fleet, scale_to_zero={"idle_seconds": 0.5})
    await settled(running, ready=1, dormant=1)
    assert (await running.ended(await running.scale(0)))["state"] == "done"
    await door.until(lambda t: not t.models[0].replicas)
    door.demand(held=50)
    table = await door.until(lambda t: t.models[0].replicas)
    assert len(table.models[0].replicas) == 1
    kinds = [o["kind"] for o in (await running.client.get("/api/v1/operations")).json()["items"]]
    assert kinds.count("activate") == 1
    door.demand(in_flight=1)
    await settled(running, ready=1)
    door.demand()
    # Nothing is asked any more: after the idle time it sleeps again, woken by the clock alone.
    await door.until(lambda t: not t.models[0].replicas)
    await settled(running, ready=0)


async def test_a_newer_scale_supersedes_the_one_that_runs(fleet):
    running, agents, _ = await one_ready_one_dormant(fleet)
    await settled(running, ready=1, dormant=1)
    for agent in agents:
        agent.hold.add(State.READY)
    first = await running.scale(2)
    second = await running.scale(1)
    assert (await running.ended(first))["state"] == "superseded"
    assert (await running.ended(second))["state"] == "done"


async def test_an_operation_whose_only_way_failed_for_good_fails_with_the_reason(fleet):
    running, agents, _ = await one_ready_one_dormant(fleet)
    await settled(running, ready=1, dormant=1)
    for agent in agents:
        agent.hold.add(State.READY)
    operation = await running.scale(2)
    sleeper = next(a for a in agents if any(i.state is State.DORMANT for i in a.instances.values()))
    await sleeper.until(in_state(State.WAKING))
    (name,) = sleeper.instances
    sleeper.set(name, state=State.FAILED, failure=Failure("tensor model.embed differs", None))
    ended = await running.ended(operation)
    assert ended["state"] == "failed"
    assert "tensor model.embed differs" in ended["reason"]
    # Asked anew, it has a fresh chance.
    for agent in agents:
        agent.hold.clear()
    assert (await running.ended(await running.scale(2)))["state"] == "done"


async def test_a_failure_with_a_retry_time_is_replaced_after_it(fleet):
    running, agents, _ = await one_ready_one_dormant(fleet)
    await settled(running, ready=1, dormant=1)
    for agent in agents:
        agent.hold.add(State.READY)
    operation = await running.scale(2)
    sleeper = next(a for a in agents if any(i.state is State.DORMANT for i in a.instances.values()))
    await sleeper.until(in_state(State.WAKING))
    (name,) = sleeper.instances
    for agent in agents:
        agent.hold.clear()
    sleeper.set(name, state=State.FAILED, failure=Failure("no memory", 0.1))
    assert (await running.ended(operation))["state"] == "done"
    assert name not in sleeper.instances


async def test_what_cannot_be_placed_fails_naming_what_is_missing(fleet):
    running, _, door = await fleet(agents=("a",), models=[model(replicas=1)])
    await door.until(lambda t: t.models[0].replicas)
    ended = await running.ended(await running.scale(3))
    assert ended["state"] == "failed"
    assert "free devices" in ended["reason"]


async def test_an_instance_of_two_members_is_ready_when_both_are(fleet):
    running, agents, door = await fleet(models=[model(members=2)])
    agents[1].hold.add(State.READY)
    operation = await running.scale(1)
    for agent in agents:
        await agent.until(lambda a: a.instances)
    (name,) = agents[0].instances
    assert list(agents[1].instances) == [name]
    assert [i.rank for a in agents for i in a.assignment.instances] == [0, 1]
    shown = await settled(running, coming=1)
    assert shown["ready"] == 0
    assert not door.table.models[0].replicas
    agents[1].hold.clear()
    agents[1].obey()
    assert (await running.ended(operation))["state"] == "done"
    await door.until(lambda t: t.models[0].replicas)


async def test_a_lost_slot_is_replaced_after_its_grace_and_one_goes_when_it_is_back(fleet):
    running, agents, door = await fleet(models=[model(replicas=1)], slot_grace_seconds=0.2)
    table = await door.until(lambda t: t.models[0].replicas)
    first = table.models[0].replicas[0].instance
    owner = next(a for a in agents if first in a.instances)
    await owner.detach()
    table = await door.until(lambda t: t.models[0].replicas and t.models[0].replicas[0].instance != first)
    owner.attach()
    # Back again, it is one too many: the older of the two stays, the other is drained and ended.
    table = await door.until(lambda t: [r.instance for r in t.models[0].replicas] == [first])
    await settled(running, ready=1, dormant=0)

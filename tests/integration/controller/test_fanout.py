"""Guardians that wake together are told of each other, with permissions that are theirs alone, and whom to try."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from relight.core.clock import SystemClock
from relight.core.errors import Denied
from relight.core.fingerprint import digest
from relight.core.records import Reach, SourceOffer, Verdict
from relight.core.states import State
from relight.transfer.grants import check
from support.controlplane import DEADLINE, model, settled

KEYS = {"a": "aa" * 32, "b": "bb" * 32, "c": "cc" * 32}


def relay(slot: str) -> SourceOffer:
    addresses = {"shm": f"unix:/{slot}", "tcp": f"tcp:{slot}:9"}
    return SourceOffer(7, "", "", digest({"dtype": "bf16"}), addresses, 0, grant_key=KEYS[slot])


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


async def two_asleep(fleet, **changes):
    """Three agents on hosts of their own, with a replica on one and a guardian on each of the others."""
    running, agents, door = await fleet(
        agents=("a", "b", "c"), models=[model(replicas=1, guardians={"replicas": 2}, **changes)]
    )
    for agent in agents:
        agent.boot, agent.relay = f"boot {agent.slot}", relay(agent.slot)
        agent.dirty.set()
    await door.until(lambda t: t.models and t.models[0].replicas)
    await settled(running, ready=1, dormant=2)
    sleepers = [a for a in agents if any(i.state is State.DORMANT for i in a.instances.values())]
    for agent in sleepers:
        for name in agent.instances:
            # Those that fell asleep before the test had said what they offer.
            agent.set(name, relay=agent.relay)
    seen = running.controller.reconciler.fleet.seen
    await eventually(lambda: all(i.relay for a in sleepers for i in seen[a.slot].report.instances))
    return running, agents, sleepers


async def test_each_is_granted_what_its_neighbour_passes_on_and_nobody_else_is(fleet):
    running, _, sleepers = await two_asleep(fleet)
    ended = await running.ended(await running.scale(3))
    assert ended["state"] == "done", ended
    taken = Counter()
    for agent, other in (sleepers, sleepers[::-1]):
        (name,) = agent.instances
        (told,) = (i for i in agent.assignment.instances if i.instance == name)
        rung = told.rungs[0]
        assert (rung.deal.shape, rung.deal.receivers) == ("swarm", 2)
        (filling,) = (h for h in rung.helpers if h.filling)
        assert filling.address == f"tcp:{other.slot}:9"
        assert filling.slot == other.slot
        now = SystemClock().now()
        claims = check(
            KEYS[other.slot], filling.grant, now=now, source_instance=filling.instance, generation=7,
            manifest_digest=str,
        )  # fmt: skip
        assert claims.receiver == name
        with pytest.raises(Denied):
            check(
                KEYS[agent.slot], filling.grant, now=now, source_instance=filling.instance, generation=7,
                manifest_digest=str,
            )  # fmt: skip
        taken.update(rung.source.parts)
        assert all(later.deal is None for later in told.rungs[1:])
    assert taken == Counter(range(rung.deal.parts))
    for path in ("/api/v1/instances", "/api/v1/slots", "/metrics"):
        text = (await running.client.get(path)).text
        assert not any(key in text for key in KEYS.values())
    assert not any(key in repr(running.controller.reconciler.snapshot()) for key in KEYS.values())


async def test_slots_are_told_whose_doors_to_try_and_what_came_of_it_is_shown(fleet, monkeypatch):
    monkeypatch.setattr("relight.controller.observe.neighbours.EVERY_SECONDS", 0.05)
    running, agents, _ = await two_asleep(fleet)
    first = agents[0]
    await first.until(lambda a: a.neighbours and {d.slot for d in a.neighbours.doors} == {"b", "c"})
    assert all(d.grant for d in first.neighbours.doors)
    first.reach = (
        Reach("b", "tcp", Verdict.NO, "no route", 5.0),
        Reach("c", "tcp", Verdict.YES, "it answered at tcp:c:9", 6.0),
    )
    first.dirty.set()
    seen = running.controller.reconciler.fleet.seen
    await eventually(lambda: seen["a"].report.reach)
    assert (await running.client.get("/api/v1/paths")).json()["items"] == [
        {"slot": "a", "to": "b", "transport": "tcp", "verdict": "no", "reason": "no route", "at": 5.0},
        {"slot": "a", "to": "c", "transport": "tcp", "verdict": "yes", "reason": "it answered at tcp:c:9", "at": 6.0},
    ]


async def test_a_report_of_too_many_ways_is_refused_by_name(fleet):
    running, agents, _ = await two_asleep(fleet)
    agents[0].reach = tuple(Reach(f"s{n}", "tcp", Verdict.YES, "x", 0.0) for n in range(65))
    agents[0].dirty.set()
    seen, before = running.controller.reconciler.fleet.seen, agents[0].sequence
    # Its stream is ended with the reason, and it comes back, and says the same again.
    await eventually(lambda: agents[0].sequence >= before + 3)
    assert not seen["a"].report.reach

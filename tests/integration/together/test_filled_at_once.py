"""Several guardians wake at once over tcp: real agents, real weights and sources, one controller; vLLM is a double.

Each slot stands for a host of its own (`force_tcp`), and each engine gives at most RATE, so that what passes through
whom is the plan's doing and not the machine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from tests.integration.together.test_compile_cache_ring import Fleet

from support.controlplane import relight
from support.doubles import doubles

MEBIBYTES, RATE = 24, 16 << 20
BODY = MEBIBYTES << 20
RECEIVERS = ("b", "c", "d", "e")


class Waking(Fleet):
    """One replica on slot a, and a guardian on each other slot."""

    async def begin(self) -> None:
        for name in ("a", *RECEIVERS):
            await self.add(name)
        await self.until(self.instances, lambda found: states(found) == ["dormant"] * 4 + ["ready"])
        (self.source,) = (i["id"] for i in await self.instances() if i["state"] == "ready")

    async def instances(self) -> list[dict[str, Any]]:
        return sorted(await self.running.instances(), key=lambda i: i["state"])

    async def on(self, slot: str) -> dict[str, Any]:
        return next(i for i in await self.instances() if i["members"][0]["slot"] == slot)

    async def pid(self, instance: str) -> int:
        return next(i["members"][0]["pid"] for i in await self.instances() if i["id"] == instance)

    async def brought(self, instance: str) -> dict[str, int]:
        """How many bytes its engine has had of whom, by its own word."""
        directory = next(self.root.glob(f"*/state/i/{instance}"))
        where = json.loads((directory / "endpoint.json").read_text())
        async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
            return (await client.get(f"http://{where['host']}:{where['port']}/brought")).json()

    async def rungs(self, *instances: str) -> dict[str, list[dict[str, Any]]]:
        """What each did, once all of them are recorded awake."""

        async def records() -> dict[str, list[dict[str, Any]]]:
            found = {}
            for instance in instances:
                reply = await self.running.client.get(f"/api/v1/instances/{instance}/timeline")
                if reply.status_code == 200 and reply.json()["mode"] == "guardian":
                    found[instance] = reply.json()["rungs"]
            return found

        return await self.until(records, lambda found: len(found) == len(instances))

    async def ready(self, count: int) -> list[str]:
        found = await self.until(self.instances, lambda all_: states(all_).count("ready") == count)
        return [i["id"] for i in found if i["state"] == "ready"]


def states(found: list[dict[str, Any]]) -> list[str]:
    return sorted(i["state"] for i in found)


@pytest.fixture
async def fleet() -> AsyncIterator[Waking]:
    changes = {"replicas": 1, "guardians": {"replicas": 4}, "rungs": ["peer_tcp", "disk"]}
    async with doubles(Waking, MEBIBYTES, changes, force_tcp=True, source_rate=RATE) as made:
        await made.begin()
        yield made


async def meanwhile(work: Awaitable[Any], until: Callable[[], Awaitable[bool]], then: Callable[[], None]) -> Any:
    """`work`, and `then` as soon as `until` is true while it goes on."""
    task = asyncio.ensure_future(work)
    while True:
        assert not task.done(), "it was over before anything could be done to it"
        if await until():
            break
        await asyncio.sleep(0.02)
    then()
    return await task


async def test_the_source_gives_each_byte_about_once_and_the_records_say_who_gave_the_others(fleet: Waking) -> None:
    await fleet.scale(5)
    woken = [name for name in await fleet.ready(5) if name != fleet.source]
    rungs = await fleet.rungs(*woken)
    given = {name: rung["brought"] for name, (rung,) in rungs.items()}
    assert all(sum(by.values()) == BODY for by in given.values()), given
    assert sum(by.get(fleet.source, 0) for by in given.values()) < 1.75 * BODY, given
    for name, (rung,) in rungs.items():
        assert rung["passed_on"] == BODY - given[name].get(fleet.source, 0)
        assert "of 4 at once: swarm takes" in rung["deal"]
        assert "star" in rung["deal"]
    status, shown, err = await relight(fleet.running, "timeline", woken[0])
    assert status == 0, err
    assert f"MiB from {fleet.source}" in shown
    assert "of 4 at once: swarm takes" in shown
    metrics = (await fleet.running.client.get("/metrics")).text
    assert 'relight_transfer_passed_on_bytes_total{model="default/m",rung="peer_tcp"}' in metrics


async def test_one_that_is_killed_in_the_middle_holds_nobody_up(fleet: Waking) -> None:
    victim = (await fleet.on("c"))["id"]
    pid = await fleet.pid(victim)

    async def half() -> bool:
        return sum((await fleet.brought(victim)).values()) > BODY // 4

    others = [i["id"] for i in await fleet.instances() if i["id"] not in (victim, fleet.source)]
    operation = await fleet.running.scale(5)
    await meanwhile(fleet.rungs(*others), half, lambda: os.kill(pid, signal.SIGKILL))
    rungs = await fleet.rungs(*others)
    assert all(r["kind"] == "peer_tcp" and r["ok"] for (r,) in rungs.values()), rungs
    assert sum(r["brought"].get(fleet.source, 0) for (r,) in rungs.values()) < 2 * BODY
    assert (await fleet.running.ended(operation))["state"] in ("done", "failed")


async def test_one_that_never_comes_is_waited_for_shortly(fleet: Waking) -> None:
    fleet.slots["c"].process.send_signal(signal.SIGSTOP)
    missing = (await fleet.on("c"))["id"]
    others = [i["id"] for i in await fleet.instances() if i["id"] not in (missing, fleet.source)]
    await fleet.running.scale(5)
    rungs = await fleet.rungs(*others)
    assert all(r["kind"] == "peer_tcp" and r["ok"] for (r,) in rungs.values()), rungs
    assert all(missing not in r["brought"] for (r,) in rungs.values()), rungs
    assert sum(r["brought"].get(fleet.source, 0) for (r,) in rungs.values()) < 2.5 * BODY


async def test_a_source_that_dies_after_it_gave_everything_once_is_not_missed(fleet: Waking) -> None:
    pid = await fleet.pid(fleet.source)
    others = [i["id"] for i in await fleet.instances() if i["id"] != fleet.source]

    async def all_given() -> bool:
        said = [await fleet.brought(name) for name in others]
        return sum(by.get(fleet.source, 0) for by in said) >= BODY

    await fleet.running.scale(5)
    rungs = await meanwhile(fleet.rungs(*others), all_given, lambda: os.kill(pid, signal.SIGKILL))
    assert all(r["kind"] == "peer_tcp" and r["ok"] for (r,) in rungs.values()), rungs
    assert all(sum(r["brought"].values()) == BODY for (r,) in rungs.values())

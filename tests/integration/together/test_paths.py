"""What slots found out about the ways to each other, and what the next wake makes of it: real agents and sources."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.integration.together.test_compile_cache_ring import Fleet

from support.controlplane import relight
from support.doubles import doubles, python

GUARDED = {"replicas": 1, "guardians": {"replicas": 1}}


@pytest.fixture(autouse=True)
def _told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.controller.observe.neighbours.EVERY_SECONDS", 0.2)


async def asleep(fleet: Fleet, count: int) -> None:
    await fleet.until(
        fleet.running.instances, lambda found: sum(i["state"] == "dormant" for i in found) == count and any(
            i["state"] == "ready" for i in found
        ),
    )  # fmt: skip


async def paths(fleet: Fleet, **wanted: str) -> list[dict[str, Any]]:
    """All that is known once the ways `slot_to_transport` have these verdicts."""

    async def known() -> dict[str, dict[str, Any]]:
        items = (await fleet.running.client.get("/api/v1/paths")).json()["items"]
        return {f"{p['slot']}_{p['to']}_{p['transport']}": p for p in items}

    def told(found: dict[str, dict[str, Any]]) -> bool:
        return all(way in found and found[way]["verdict"] == verdict for way, verdict in wanted.items())

    return await fleet.until(known, told)


async def woken(fleet: Fleet, slot: str) -> dict[str, Any]:
    """The timeline of the guardian on `slot`, once it is awake."""

    async def timeline() -> dict[str, Any]:
        for instance in await fleet.running.instances():
            if instance["members"][0]["slot"] == slot and instance["state"] == "ready":
                reply = await fleet.running.client.get(f"/api/v1/instances/{instance['id']}/timeline")
                if reply.status_code == 200 and reply.json()["mode"] == "guardian":
                    return reply.json()
        return {}

    return await fleet.until(timeline, bool)


async def test_a_port_that_one_slot_does_not_reach_is_known_before_the_wake_that_would_fail_by_it() -> None:
    changes = {**GUARDED, "guardians": {"replicas": 2}, "rungs": ["peer_tcp", "disk"]}
    async with doubles(Fleet, 2, changes, force_tcp=True) as fleet:
        closed = {"vllm": {"python": str(python(fleet.root, DOUBLE_CLOSES="tcp")), "zygote": False}}
        await fleet.add("a", engines=closed)
        await fleet.until(fleet.running.instances, lambda found: any(i["state"] == "ready" for i in found))
        await fleet.add("b")
        await fleet.add("c")
        await asleep(fleet, 2)
        found = await paths(fleet, b_a_tcp="no", c_a_tcp="no", b_c_tcp="yes", c_b_tcp="yes", a_b_tcp="yes")
        assert "cannot connect" in found["b_a_tcp"]["reason"]
        status, out, err = await relight(fleet.running, "capabilities", "--paths", "--slot", "b", "--output", "json")
        assert status == 0, err
        assert {(p["to"], p["verdict"]) for p in json.loads(out)} == {("a", "no"), ("c", "yes")}
        await fleet.scale(3)
        for slot in "bc":
            start = await woken(fleet, slot)
            assert [(r["kind"], r["ok"]) for r in start["rungs"]] == [("disk", True)]
            assert f"{slot} does not reach a by tcp" in start["planned_reason"]
        metrics = (await fleet.running.client.get("/metrics")).text
        assert 'relight_paths{slot="b",transport="tcp",verdict="no"} 1.0' in metrics


async def test_memory_that_is_not_shared_is_found_out_by_a_socket_and_not_by_the_hosts_name() -> None:
    async with doubles(Fleet, 2, {**GUARDED, "rungs": ["peer_shm", "peer_tcp", "disk"]}) as fleet:
        closed = {"vllm": {"python": str(python(fleet.root, DOUBLE_CLOSES="shm")), "zygote": False}}
        await fleet.add("a", engines=closed)
        await fleet.until(fleet.running.instances, lambda found: any(i["state"] == "ready" for i in found))
        await fleet.add("b")
        await asleep(fleet, 1)
        found = await paths(fleet, b_a_shm="no", b_a_tcp="yes", a_b_shm="yes")
        assert found["a_b_shm"]["reason"] == "a descriptor was passed"
        await fleet.scale(2)
        start = await woken(fleet, "b")
        assert [(r["kind"], r["ok"]) for r in start["rungs"]] == [("peer_tcp", True)]
        assert "b does not reach a by shm" in start["planned_reason"]
        assert "probed: it answered at tcp:" in start["rungs"][0]["reason"]

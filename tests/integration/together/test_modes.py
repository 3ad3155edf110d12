"""Modes from the request to the record: the controller plans one, agents fork or spawn, timelines say so."""

from __future__ import annotations

from tests.integration.together.test_compile_cache_ring import CHECKOUT, made_of

ZYGOTE = {"engines": {"stub": {"zygote": CHECKOUT}}, "devices_seconds": 0.1}


async def test_a_zygote_that_stands_by_leaves_its_slots_devices_free_and_the_next_replica_is_forked() -> None:
    async with made_of({}, ZYGOTE, mode="auto") as fleet:
        for name in ("a", "b"):
            await fleet.add(name)

        async def reports() -> list[dict[str, object]]:
            return (await fleet.running.client.get("/api/v1/slots")).json()["items"]

        await fleet.until(reports, lambda found: len(found) == 2)
        await fleet.scale(1)
        first = await fleet.starts(1)
        # Measured again while the zygotes live: what they hold is no device's memory.
        await fleet.scale(2)
        both = await fleet.starts(2)
        assert [t["mode"] for t in both.values()] == ["lazy", "lazy"]
        assert all(t["process"].startswith("forked from a zygote") for t in both.values()), both
        second = next(t for slot, t in both.items() if slot not in first)
        assert second["rungs"][-1]["kind"] == "peer_shm"
        found = (await fleet.running.client.get(f"/api/v1/instances/{second['instance']}/explanation")).json()
        assert found["process"] == second["process"]
        assert {m["mode"] for m in found["modes"]} == {"guardian", "lazy", "normal", "cold"}
        devices = (await fleet.running.client.get("/api/v1/devices")).json()["items"]
        assert len(devices) == 2
        assert all(d["healthy"] for d in devices), devices

"""What an agent's own metrics say of a slot where something happened."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import httpx

from relight.core.records import Desired, RungKind
from relight.core.states import State
from support.agent import DEADLINE, Slot, rungs
from support.live import free_ports


async def test_transitions_are_timed_by_how_they_ended_and_a_sleepers_memory_is_a_guardians(
    make_slot: Callable[..., Slot],
) -> None:
    (port,) = free_ports(1)
    slot = make_slot(metrics_port=port, devices_seconds=0.2)
    await slot.up()
    slot.want(slot.instance("i-a", Desired.DORMANT, 'wake_errors={"disk": "local"}'))
    await slot.until("i-a", State.DORMANT)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

        async def value(series: str) -> float:
            text = (await client.get("/metrics")).text
            found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
            return float(found[1]) if found else 0.0

        assert await value("relight_agent_attached") == 1
        assert await value('relight_agent_transition_seconds_count{kind="start",outcome="ok"}') == 1
        slot.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
        await slot.until("i-a", State.FAILED)
        assert await value('relight_agent_transition_seconds_count{kind="wake",outcome="failed"}') == 1
        slot.want(slot.instance("i-b", Desired.DORMANT))
        await slot.until("i-b", State.DORMANT)
        async with asyncio.timeout(DEADLINE):
            while True:
                if await value('relight_device_memory_bytes{device="cpu-0",kind="guardian"}') > 1 << 20:
                    break
                await asyncio.sleep(0.1)
        assert await value('relight_device_memory_bytes{device="cpu-0",kind="orphan"}') == 0

"""What engines run, from their agents' reports to the assignment of the next start."""

from __future__ import annotations

import asyncio

from relight.core.records import Shapes
from support.controlplane import DEADLINE, FakeAgent, Running, model


async def _until(running: Running, *, stored: bool) -> None:
    catalog = running.controller.catalog
    async with asyncio.timeout(DEADLINE):
        while bool(catalog.shapes) is not stored:
            await catalog.reached(catalog.revision + 1)


async def test_a_start_is_told_what_the_models_engines_run_and_still_after_all_of_them_are_gone(tmp_path):
    guardians = {"guardians": {"replicas": 0}, "scale_to_zero": {"keep": "nothing"}}
    running = await Running.start(tmp_path, models=[model(replicas=1, mode="lazy", **guardians)])
    agent = FakeAgent("a", running.rpc, devices=2)
    agent.attach()
    try:
        first = (await agent.until(lambda a: a.assignment.instances)).instances[0]
        assert first.shapes is None
        ran = Shapes(5.0, {1: 40.0, 8: 3.0}, {16: 20.0})
        agent.set(first.instance, shapes=ran)
        await _until(running, stored=True)
        await running.ended(await running.scale(2))
        second = next(i for i in agent.assignment.instances if i.instance != first.instance)
        assert second.shapes == ran
        await running.ended(await running.scale(0))
        await agent.until(lambda a: not a.instances)
        await running.ended(await running.scale(1))
        (third,) = agent.assignment.instances
        assert third.shapes == ran
        await running.client.delete("/api/v1/namespaces/default/models/m")
        await _until(running, stored=False)
    finally:
        await agent.detach()
        await running.stop()

"""A load step: how long clients wait too long, by what is told to scale. HPAs here look every 2 s, not every 15."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx
import pytest
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.figures import FIGURES
from tests.kubernetes.load import front_door
from tests.kubernetes.test_scaling import autoscaler, external, serving  # noqa: F401 - a fixture

from relight.controller.kubernetes.resources import MODEL_DEPLOYMENT
from relight.protos.externalscaler import externalscaler_pb2 as keda
from relight.protos.externalscaler.externalscaler_pb2_grpc import ExternalScalerStub

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

AT_ONCE = 2
"""Requests that one replica runs; more wait in it."""
ARGS = [f"at_once={AT_ONCE}", "token_delay=0.1"]
TARGET_OVER_UNLOADED = 2.0
"""The objective: p99 of the time to first token at most so many times that of a replica without a queue."""
IN_A_ROW = 40
"""So many first tokens in a row within the objective, and it is met again."""
LONGEST_SECONDS = 45.0
FOLLOWS = external("relight_demand", {"type": "AverageValue", "averageValue": str(AT_ONCE)})


@dataclass
class Clients:
    """Closed loops of streams; `waits` are (when the first token came, how long it took)."""

    url: str
    waits: list[tuple[float, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def ask(self, client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 6, "stream": True}
        while True:
            begun = time.monotonic()
            async with client.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    self.failed.append(f"{reply.status_code}")
                lines = reply.aiter_lines()
                async for line in lines:
                    if line.startswith("data: {"):
                        break
                async with self.changed:
                    self.waits.append((time.monotonic(), time.monotonic() - begun))
                    self.changed.notify_all()
                async for _ in lines:
                    pass

    async def until(self, holds: Any) -> None:
        async with self.changed:
            await self.changed.wait_for(holds)


def p99(waits: list[float]) -> float:
    """The largest but one hundredth."""
    return sorted(waits)[max(0, -(-99 * len(waits) // 100) - 1)]


@asynccontextmanager
async def asking(clients: Clients, count: int) -> AsyncIterator[None]:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        tasks = [asyncio.create_task(clients.ask(client)) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def recovered(clients: Clients, objective: float, begun: float) -> float:
    """Seconds from the step to the last first token outside of the objective."""

    def met() -> bool:
        last = [w for at, w in clients.waits if at > begun][-IN_A_ROW:]
        return len(last) == IN_A_ROW and max(last) <= objective

    async with asyncio.timeout(LONGEST_SECONDS):
        await clients.until(met)
    late = [at for at, w in clients.waits if at > begun and w > objective]
    return round(max(late, default=begun) - begun, 2)


async def _push(cluster: Cluster, port: int) -> None:
    """What KEDA does with a push: from zero to one at once. What comes after is its autoscaler's."""
    metadata = {"model": "m", "target": str(AT_ONCE)}
    asked = keda.ScaledObjectRef(name="m", namespace=cluster.namespace, scalerMetadata=metadata)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async for said in ExternalScalerStub(channel).StreamIsActive(asked):
            if said.result:
                body = {"spec": {"replicas": 1}}
                await cluster.api.patch(
                    MODEL_DEPLOYMENT, cluster.namespace, "m", body, subresource="scale", manager="keda"
                )
                return


async def _step(cluster: Cluster, way: str, objective: float) -> tuple[float, float]:
    """(objective, seconds until it is met again) of one way to scale; measures the objective where it is 0."""
    spec: dict[str, Any] = {"args": ARGS, "replicas": 1, "guardians": {"replicas": 3}}
    if way == "burst":
        spec["burst"] = {"maxReplicas": 4, "holdSeconds": 20}
    if way == "keda":
        spec |= {"replicas": 0, "guardians": {"replicas": 4}}
    spec["scaling"] = {"requestsPerReplica": AT_ONCE}
    await cluster.apply(cluster.model(**spec))
    await cluster.shows(**({"guardian": 4} if way == "keda" else {"ready": 1, "guardian": 3}))
    async with AsyncExitStack() as stack:
        clients = Clients(await stack.enter_async_context(front_door(cluster)))
        if not objective:
            async with asking(clients, AT_ONCE):
                await clients.until(lambda: len(clients.waits) >= IN_A_ROW)
            objective = TARGET_OVER_UNLOADED * p99([w for _, w in clients.waits])
        await cluster.apply(autoscaler(cluster, "m", FOLLOWS))
        pushed = None
        if way == "keda":
            port = cluster.controllers[0].config["external_scaler"]["port"]
            pushed = asyncio.create_task(_push(cluster, port))
        begun = time.monotonic()
        async with asking(clients, 4 * AT_ONCE):
            took = await recovered(clients, objective, begun)
        if pushed is not None:
            await pushed
        assert not clients.failed
    await cluster.kubectl("delete", "horizontalpodautoscalers.v2beta2.autoscaling/m")
    await cluster.kubectl("delete", "modeldeployment/m")
    await cluster.shows(idle=4)
    return objective, took


async def test_the_objective_is_met_again_after_a_load_step_by_each_way_to_scale(
    serving: Cluster,  # noqa: F811 - as above
) -> None:
    cluster = serving
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(4), cluster.service())
    objective, took = 0.0, dict[str, float]()
    for way in ("hpa", "keda", "burst"):
        objective, took[way] = await _step(cluster, way, objective)
    FIGURES["slo_recovery_seconds"] = took
    FIGURES["slo_objective_seconds"] = round(objective, 3)

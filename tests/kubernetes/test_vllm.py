"""A real autoscaler's number becomes a real vLLM replica that a plain Service reaches: how long that takes."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from tests.kubernetes.cluster import ENDPOINTS, ROOT, Cluster
from tests.kubernetes.external_metrics import GROUP, READERS, VERSION, ExternalMetrics
from tests.kubernetes.figures import FIGURES
from tests.kubernetes.plane import ControlPlane

from relight.controller.kubernetes.api import POD, Kind, Object
from relight.controller.kubernetes.resources import ENGINE_RUNTIME, MODEL_DEPLOYMENT, PROVEN_GATE

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(400)]

HPA = Kind("autoscaling", "v2beta2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
ARGS = [
    "--dtype=bfloat16", "--max-model-len=512", "--max-num-seqs=16", "--enforce-eager",
    "--kv-cache-memory-bytes=134217728",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
]  # fmt: skip
TIMES = 5


@pytest.fixture
async def metrics(plane: ControlPlane) -> AsyncIterator[ExternalMetrics]:
    served = ExternalMetrics(plane.server_certificate("queue-metrics"), plane.front_proxy_authority)
    try:
        await asyncio.to_thread(plane.register_api, GROUP, VERSION, "queue-metrics", served.port)
        await asyncio.to_thread(plane.apply, READERS)
        yield served
    finally:
        served.close()


class Seen:
    """When a watch first saw what it was asked for; times are of one clock."""

    def __init__(self, cluster: Cluster, kind: Kind, number: Callable[[Object], int], name: str = "m") -> None:
        """Of the one object called `name`; with an empty one the sum over all of the namespace."""
        self._of: dict[str, int] = {}
        self._cluster, self._kind, self._number, self._name = cluster, kind, number, name
        self.history: list[tuple[float, int]] = []
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        items, version = await self._cluster.api.list(self._kind)
        for item in items:
            await self._note(item)
        async for event in self._cluster.api.watch(self._kind, version):
            if event.type in ("ADDED", "MODIFIED"):
                await self._note(event.object)

    async def _note(self, found: Object) -> None:
        metadata = found["metadata"]
        if metadata.get("namespace") != self._cluster.namespace or self._name not in ("", metadata["name"]):
            return
        async with self._changed:
            self._of[metadata["name"]] = self._number(found)
            self.history.append((time.monotonic(), sum(self._of.values())))
            self._changed.notify_all()

    async def first(self, number: int, since: float) -> float:
        """When it first was `number` at or after `since`."""
        found: list[float] = []

        def holds() -> bool:
            found[:] = [at for at, n in self.history if n == number and at >= since]
            return bool(found)

        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(holds)
        return found[0]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _addresses(endpoints: Object) -> int:
    return sum(len(s.get("addresses") or []) for s in endpoints.get("subsets") or [])


def _open_gate(pod: Object) -> int:
    return _condition(pod, PROVEN_GATE)


def _pod_ready(pod: Object) -> int:
    return _condition(pod, "Ready")


def _condition(pod: Object, name: str) -> int:
    told = (pod.get("status") or {}).get("conditions") or []
    return int(any(c["type"] == name and c["status"] == "True" for c in told))


def _hpa(cluster: Cluster) -> Object:
    metric = {"metric": {"name": "queue_depth"}, "target": {"type": "AverageValue", "averageValue": "10"}}
    spec = {
        "scaleTargetRef": {"apiVersion": MODEL_DEPLOYMENT.api_version, "kind": MODEL_DEPLOYMENT.kind, "name": "m"},
        "minReplicas": 1,
        "maxReplicas": 2,
        "metrics": [{"type": "External", "external": metric}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
    }
    return cluster.object(HPA, "m", spec)


async def test_an_autoscalers_number_becomes_a_proven_vllm_replica_behind_a_service(
    cluster: Cluster, metrics: ExternalMetrics
) -> None:
    assert ENGINE_PYTHON.exists(), "no engine environment: run `make setup-engine`"
    await cluster.controller()
    runtime = cluster.object(ENGINE_RUNTIME, "stub", {"engine": "vllm", "image": "example/vllm:0.32", "args": ARGS})
    secret = cluster.secret(
        engines={"vllm": {"python": str(ENGINE_PYTHON)}}, devices=[{"id": "cpu-0", "memory_bytes": 6 << 30}]
    )
    await cluster.apply(secret, runtime, cluster.pool(2), cluster.service())
    uri = str(ROOT / ".cache" / "smollm2")
    await cluster.apply(cluster.model(guardians={"replicas": 1}, model={"uri": uri, "revision": "r1"}))
    await cluster.kubectl("scale", "modeldeployment/m", "--replicas=1")
    await cluster.until(
        cluster.pods, "one ready, one guardian", lambda pods: _states(pods) == ["guardian", "ready"], 240
    )
    metrics.values["queue_depth"] = "5"
    await cluster.apply(_hpa(cluster))
    numbers = Seen(cluster, MODEL_DEPLOYMENT, lambda m: int(m["spec"].get("replicas", 0)))
    endpoints = Seen(cluster, ENDPOINTS, _addresses)
    # The gate is Relight's part; what follows it is a kubelet's and the endpoints controller's.
    gates, readiness = (Seen(cluster, POD, number, "") for number in (_open_gate, _pod_ready))
    took, parts = [], []
    try:
        for _ in range(TIMES):
            begun = time.monotonic()
            metrics.values["queue_depth"] = "15"
            written = await numbers.first(2, begun)
            took.append(await endpoints.first(2, begun) - written)
            steps = [await seen.first(2, begun) - written for seen in (gates, readiness)]
            parts.append((*(round(s, 2) for s in steps), round(took[-1], 2)))
            await _answers_everywhere(cluster)
            begun = time.monotonic()
            metrics.values["queue_depth"] = "5"
            await numbers.first(1, begun)
            await endpoints.first(1, begun)
            await cluster.shows(ready=1, guardian=1)
    finally:
        await numbers.close()
        for seen in (endpoints, gates, readiness):
            await seen.close()
        print("gate open, pod ready, in Endpoints, in seconds after the number was written:", parts)
    FIGURES["hpa_write_to_ready_seconds"] = round(statistics.median(took), 3)
    found = await cluster.until(
        cluster.status, "a guardian for each of the autoscaler's numbers", lambda s: s["guardians"]["hits"] >= TIMES
    )
    assert found["lastScale"]["by"]


def _states(pods: list[Object]) -> list[str]:
    return sorted(p["metadata"]["labels"]["relight.dev/state"] for p in pods)


async def _answers_everywhere(cluster: Cluster) -> None:
    """Each address that the Service has, as the agents report it, answers the model's requests with the same text."""
    body = {"model": "m", "prompt": "The replica wakes", "max_tokens": 8, "temperature": 0}
    slots = cluster.kubelets.slots.values()
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        replies = [await client.post(f"http://{slot.address}:8000/v1/completions", json=body) for slot in slots]
        assert [r.status_code for r in replies] == [200] * 2, [r.text[:200] for r in replies]
        assert len({r.json()["choices"][0]["text"] for r in replies}) == 1
        wrong = await client.post(
            f"http://{next(iter(slots)).address}:8000/v1/completions", json={**body, "model": "another"}
        )
        assert (wrong.status_code, wrong.headers["retry-after"]) == (503, "1")

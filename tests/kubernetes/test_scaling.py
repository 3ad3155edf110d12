"""What HPAs follow, served by the controller behind a real API server, and the number going up and down by it."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import aclosing
from typing import Any

import httpx
import pytest
import yaml
from tests.kubernetes.cluster import SYSTEM, Cluster, ControllerProcess
from tests.kubernetes.load import front_door
from tests.kubernetes.plane import ControlPlane
from tests.kubernetes.plane.processes import free_ports

from relight.controller.kubernetes.api import Kind

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]

EXTERNAL, CUSTOM = "/apis/external.metrics.k8s.io/v1beta1", "/apis/custom.metrics.k8s.io/v1beta2"
SERVICE = "relight-metrics"
HPA = Kind("autoscaling", "v2beta2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")


@pytest.fixture
async def serving(cluster: Cluster, plane: ControlPlane) -> Cluster:
    """A cluster whose controller serves metrics, made known to the API server; no model yet."""
    certificate = plane.server_certificate(SERVICE, SYSTEM)
    port, scaler = free_ports(2)
    controller = ControllerProcess(cluster, "one")
    controller.config["external_scaler"] = {"port": scaler}
    files = {"certificate": str(certificate.certificate), "private_key": str(certificate.private_key)}
    controller.config["kubernetes"]["metrics"] = {"port": port, "tls": files}
    cluster.controllers.append(controller)
    await controller.start()
    await controller.leads()
    for path in (EXTERNAL, CUSTOM, "/apis/custom.metrics.k8s.io/v1beta1"):
        group, version = path.split("/")[2:]
        await asyncio.to_thread(plane.register_api, group, version, SERVICE, port, SYSTEM)
    return cluster


class Endless:
    """Requests to a gateway that end when they are told to."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.AsyncClient(timeout=120, trust_env=False)
        self._asking: list[asyncio.Task[None]] = []

    def ask(self, count: int) -> None:
        """So many requests at once, that go on until `quiet`."""
        self._asking += [asyncio.create_task(self._one()) for _ in range(count)]

    async def _one(self) -> None:
        body = {"model": "m", "prompt": "hello", "max_tokens": 1_000_000, "stream": True}
        async with self._client.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
            async for _ in reply.aiter_raw():
                pass

    async def quiet(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        self._asking = []

    async def aclose(self) -> None:
        await self.quiet()
        await self._client.aclose()


def autoscaler(cluster: Cluster, name: str, metric: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "autoscaling/v2beta2", "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "namespace": cluster.namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "relight.dev/v1alpha1", "kind": "ModelDeployment", "name": "m"},
            "minReplicas": 1, "maxReplicas": 4, "metrics": [metric],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }  # fmt: skip


def external(name: str, target: dict[str, str]) -> dict[str, Any]:
    metric = {"name": name, "selector": {"matchLabels": {"model": "m"}}}
    return {"type": "External", "external": {"metric": metric, "target": target}}


def of_the_object(name: str, target: dict[str, str]) -> dict[str, Any]:
    described = {"apiVersion": "relight.dev/v1alpha1", "kind": "ModelDeployment", "name": "m"}
    return {"type": "Object", "object": {"metric": {"name": name}, "describedObject": described, "target": target}}


KINDS = {
    "external-average": external("relight_demand", {"type": "AverageValue", "averageValue": "2"}),
    "external-value": external("relight_target_ratio", {"type": "Value", "value": "1"}),
    "object": of_the_object("relight_demand", {"type": "AverageValue", "averageValue": "2"}),
}


async def agrees(cluster: Cluster, replicas: int) -> None:
    """The number is written, and status, Endpoints and `kubectl get pods` say the same."""
    await cluster.stands(readyReplicas=replicas, replicas=replicas, drainingReplicas=0)
    await cluster.until(cluster.endpoints, f"{replicas} endpoints", lambda n: n == replicas)
    said = await cluster.kubectl("get", "pods", "-l", "relight.dev/model=m,relight.dev/state=ready", "-o", "name")
    assert len(said.split()) == replicas


async def blind(cluster: Cluster, name: str) -> dict[str, Any]:
    """What the autoscaler says of its inputs."""
    found = await cluster.get(HPA, name)
    conditions = (found.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == "ScalingActive" and c["status"] == "False"), {})


async def test_each_kind_of_autoscaler_drives_a_model_through_its_guardians_and_back(serving: Cluster) -> None:
    await serving.apply(
        serving.secret(), serving.runtime(), serving.pool(4), serving.service(),
        serving.model(
            replicas=1, writer="HPA", guardians={"replicas": 3}, bounds={"maxReplicas": 4},
            args=["token_delay=0.5", "stall_seconds=60"], scaling={"requestsPerReplica": 2},
            drain={"timeoutSeconds": 5},
        ),
        autoscaler(serving, *next(iter(KINDS.items()))),
    )  # fmt: skip
    await serving.stands(readyReplicas=1, guardians={"desired": 3, "ready": 3, "hits": 0, "misses": 1})
    # Nobody knows the demand yet: that is an error, and no number is written for it.
    await serving.until(
        lambda: blind(serving, next(iter(KINDS))),
        "the autoscaler to say that it is blind",
        lambda said: "not known: no gateway is attached" in said.get("message", ""),
    )
    async with front_door(serving) as url, aclosing(Endless(url)) as door:
        for number, (name, metric) in enumerate(KINDS.items(), start=1):
            await serving.apply(autoscaler(serving, name, metric))
            door.ask(8)
            await agrees(serving, 4)
            found = await serving.status()
            assert found["guardians"]["hits"] == 3 * number, found
            assert (found["lastScale"]["from"], found["lastScale"]["to"]) == (1, 4)
            await door.quiet()
            await agrees(serving, 1)
            await serving.kubectl("delete", "hpa", name)
            # What drained sleeps again before the next one asks for it.
            await serving.until(serving.status, "three guardians", lambda s: s["guardians"]["ready"] == 3)


async def test_metrics_are_for_those_who_may_read_them(serving: Cluster, plane: ControlPlane) -> None:
    await serving.apply(serving.runtime(), serving.pool(0), serving.model(replicas=0))
    await serving.stands(replicas=0)
    space = f"{EXTERNAL}/namespaces/{serving.namespace}"
    reader = plane.service_account("metrics-reader", serving.namespace)
    stranger = plane.service_account("stranger", serving.namespace)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "metrics", "namespace": serving.namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "relight-metrics-reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "metrics-reader", "namespace": serving.namespace}],
    }  # fmt: skip
    await asyncio.to_thread(plane.apply, yaml.safe_dump(binding))
    trusted = ssl.create_default_context(cafile=str(reader.authority))
    port = serving.controllers[0].config["kubernetes"]["metrics"]["port"]

    async def get(path: str, token: str | None, base: str = f"https://127.0.0.1:{port}") -> tuple[int, Any]:
        """Past the API server, unless `base` is it."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(verify=trusted, trust_env=False, headers=headers) as client:
            reply = await client.get(base + path)
            return reply.status_code, reply.json() if reply.headers["Content-Type"].startswith("application") else {}

    ready = f"{space}/relight_ready_replicas"
    for base in (plane.server, f"https://127.0.0.1:{port}"):
        code, found = await get(f"{ready}?labelSelector=model%3Dm", reader.token, base)
        assert code == 200, found
        (item,) = found["items"]
        assert (code, item["value"], item["metricLabels"]) == (200, "0", {"model": "m"})
        assert (await get(ready, stranger.token, base))[0] == 403
        assert (await get(ready, "nonsense", base))[0] == 401
        assert (await get(f"{ready}?labelSelector=team%3Da", reader.token, base))[1]["items"] == []
        code, found = await get(f"{space}/relight_demand", reader.token, base)
        assert (code, "no gateway" in found["message"]) == (500, True)
    # Headers are believed of the front proxy alone.
    forged = {"X-Remote-User": "admin", "X-Remote-Group": "system:masters"}
    async with httpx.AsyncClient(verify=trusted, trust_env=False, headers=forged) as client:
        assert (await client.get(f"https://127.0.0.1:{port}{ready}")).status_code == 401
    one = f"{CUSTOM}/namespaces/{serving.namespace}/modeldeployments.relight.dev"
    code, found = await get(f"{one}/m/relight_current_replicas", reader.token)
    assert (code, found["items"][0]["describedObject"]["name"]) == (200, "m")
    assert (await get(f"{one}/other/relight_current_replicas", reader.token))[0] == 404
    with plane.admin.client() as client:
        assert client.get(f"{space}/queue_depth").json()["code"] == 404
    said = await serving.kubectl("get", "--raw", f"{EXTERNAL}")
    assert "relight_target_ratio" in {r["name"] for r in json.loads(said)["resources"]}

"""The built-in autoscaler writes numbers by resources; the examples for other writers are what a server takes."""

from __future__ import annotations

import asyncio
import json

import pytest
import yaml
from tests.kubernetes.cluster import ROOT, Cluster

from relight.controller.kubernetes.resources import MODEL_DEPLOYMENT
from relight.core.clock import SystemClock
from relight.core.records import GatewayModel
from support.controlplane import FakeGateway

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

EXAMPLES = ROOT / "examples" / "kubernetes"
KNOWN = ("v1", "apps", "autoscaling", "relight.dev")
"""Groups that this server has; other examples are for what a cluster has besides."""


class Door(FakeGateway):
    """A scripted gateway that tells of this cluster's model."""

    def asks(self, cluster: Cluster, in_flight: int) -> None:
        now = SystemClock().now()
        self.models = (GatewayModel(cluster.namespace, "m", 0, 0.0, in_flight, now),)
        self.dirty.set()


async def test_where_it_is_the_writer_it_writes_the_resources_number_under_a_name_of_its_own(cluster: Cluster) -> None:
    await cluster.controller()
    await cluster.apply(
        cluster.secret(), cluster.runtime(), cluster.pool(2),
        cluster.model(
            writer="Autoscaler", bounds={"minReplicas": 1, "maxReplicas": 2}, guardians={"replicas": 1},
            scaling={"requestsPerReplica": 2}, autoscaler={"windowSeconds": 1},
        ),
    )  # fmt: skip
    door = Door(f"127.0.0.1:{cluster.grpc_port}")
    door.asks(cluster, 0)
    door.attach()
    try:
        await cluster.stands(readyReplicas=1, replicas=1)
        door.asks(cluster, 4)
        found = await cluster.stands(readyReplicas=2, replicas=2)
        assert (await cluster.get(MODEL_DEPLOYMENT, "m"))["spec"]["replicas"] == 2
        assert found["lastScale"]["by"] == "relight-autoscaler"
        (conflict,) = (c for c in found["conditions"] if c["type"] == "ConflictingWriters")
        assert conflict["status"] == "False", conflict
        door.asks(cluster, 1)
        await cluster.stands(readyReplicas=1, replicas=1)
        assert (await cluster.get(MODEL_DEPLOYMENT, "m"))["spec"]["replicas"] == 1
        said = await cluster.rest(f"/api/v1/namespaces/{cluster.namespace}/models/m/autoscaler")
        assert {"up", "down"} <= {d["action"] for d in said["decisions"]}
    finally:
        await door.detach()
    asked = [json.loads(line)["requestURI"] for line in cluster.plane.audit_log.read_text().splitlines()]
    mine = [a for a in asked if f"/{cluster.namespace}/modeldeployments/m/scale" in a]
    assert mine
    assert all("fieldManager=relight-autoscaler" in a for a in mine)


async def test_the_examples_are_what_a_server_takes(cluster: Cluster) -> None:
    for path in sorted(EXAMPLES.glob("*.yaml")):
        documents = [d for d in yaml.safe_load_all(path.read_text()) if d["apiVersion"].split("/")[0] in KNOWN]
        for found in documents:
            # Of the same shape, for a server that is older than v2.
            found["apiVersion"] = found["apiVersion"].replace("autoscaling/v2", "autoscaling/v2beta2")
        if documents:
            words = ("--namespace", cluster.namespace, "apply", "--dry-run=server", "-f", "-")
            await asyncio.to_thread(cluster.plane.kubectl, *words, stdin=yaml.safe_dump_all(documents))

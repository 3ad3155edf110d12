"""Models and pools as users write them, on a real control plane: what kubectl, Services and status show agrees."""

from __future__ import annotations

import pytest
from tests.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


async def test_a_model_is_scaled_by_kubectl_through_guardians_and_everybody_sees_it(cluster: Cluster) -> None:
    await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(4), cluster.service())
    await cluster.apply(cluster.model(replicas=1, guardians={"replicas": 3}))
    await cluster.stands(readyReplicas=1, guardians={"desired": 3, "ready": 3, "hits": 0, "misses": 1})
    await cluster.kubectl("scale", "modeldeployment/m", "--replicas=4")
    found = await cluster.stands(readyReplicas=4, replicas=4)
    assert await cluster.until(cluster.endpoints, "four endpoints", lambda n: n == 4)
    assert found["lastScale"]["to"] == 4
    assert found["lastScale"]["by"]
    ready = await cluster.kubectl("get", "pods", "-l", found["selector"], "-o", "name")
    assert len(ready.split()) == 4
    await cluster.kubectl("scale", "modeldeployment/m", "--replicas=1")
    await cluster.stands(readyReplicas=1, replicas=1, drainingReplicas=0)
    assert await cluster.until(cluster.endpoints, "one endpoint", lambda n: n == 1)
    print(await cluster.kubectl("get", "modeldeployments,devicepools,engineruntimes,pods", "-L", "relight.dev/state"))
    print(await cluster.kubectl("describe", "modeldeployment", "m"))

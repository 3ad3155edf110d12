"""Fields of a model that only a whole cluster can honour."""

from __future__ import annotations

import pytest
from tests.kubernetes.cluster import Cluster

from relight.controller.kubernetes.api import Object

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


def condition(status: Object, name: str) -> Object:
    return next((c for c in status.get("conditions") or [] if c["type"] == name), {})


async def test_the_only_slot_goes_to_the_model_whose_priority_class_is_higher(cluster: Cluster) -> None:
    await cluster.controller()
    env = [{"name": "VLLM_DISABLE_COMPILE_CACHE", "value": "1"}]
    urgent = cluster.model("z", replicas=1, priorityClassName="system-cluster-critical", env=env)
    wrong = cluster.model("wrong", replicas=1, priorityClassName="no-such-class")
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.model("a", replicas=1), urgent, wrong)
    # The slot comes when both wait for it.
    for name in ("a", "z"):
        await cluster.until(
            lambda name=name: cluster.status(name), "a pool to be missing", lambda s: condition(s, "Accepted")
        )
    await cluster.apply(cluster.pool(1))
    await cluster.stands("z", readyReplicas=1)
    waits = condition(await cluster.stands("a", readyReplicas=0), "Progressing")
    assert (waits["status"], waits["reason"]) == ("True", "WaitsForRoom")
    refused = condition(await cluster.status("wrong"), "Accepted")
    assert refused["status"] == "False"
    said = await cluster.kubectl("get", "events", "--field-selector=involvedObject.name=z", "-o=jsonpath={.items}")
    assert "VLLM_DISABLE_COMPILE_CACHE=1" in said, "what was written is judged at once"
    assert "[caches_off]" in said
    assert "spec.priorityClassName: expected a PriorityClass of the cluster, got no-such-class" in refused["message"]

"""What tests build on: that this control plane behaves as a cluster's does."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import yaml
from tests.kubernetes.external_metrics import GROUP, READERS, VERSION, ExternalMetrics
from tests.kubernetes.plane import ControlPlane, HollowNode, PlaneError, User, wait_for

pytestmark = pytest.mark.kubernetes

PANS = "/apis/test.example/v1/namespaces/default/pans"


def pan(plane: ControlPlane, name: str, replicas: int) -> str:
    """Makes one with its selector, without which nothing scales it; returns its path."""
    made = {"apiVersion": "test.example/v1", "kind": "Pan", "metadata": {"name": name}, "spec": {"replicas": replicas}}
    plane.apply(yaml.safe_dump(made))
    status = {"status": {"replicas": replicas, "selector": f"app={name}"}}
    merge(plane.admin, f"{PANS}/{name}/status", status).raise_for_status()
    return f"{PANS}/{name}"


def merge(user: User, path: str, body: dict) -> httpx.Response:
    with user.client() as client:
        return client.patch(path, json=body, headers={"Content-Type": "application/merge-patch+json"})


def replicas(plane: ControlPlane, path: str) -> int:
    return plane.get(path)["spec"]["replicas"]


def condition(found: dict, name: str) -> str:
    return next((c["status"] for c in found["status"].get("conditions", []) if c["type"] == name), "")


def test_a_custom_resource_is_scaled_by_kubectl_within_its_schema(plane: ControlPlane) -> None:
    path = pan(plane, "scaled", 1)
    plane.kubectl("scale", "pans.test.example/scaled", "--replicas=4")
    assert replicas(plane, path) == 4
    with pytest.raises(PlaneError, match="less than or equal to 50"):
        plane.kubectl("scale", "pans.test.example/scaled", "--replicas=51")


def test_of_two_writers_of_one_version_the_second_gets_a_conflict(plane: ControlPlane) -> None:
    path = pan(plane, "written", 1)
    read = plane.get(path)
    with plane.admin.client() as client:
        assert client.put(path, json={**read, "spec": {"replicas": 2}}).status_code == httpx.codes.OK
        second = client.put(path, json={**read, "spec": {"replicas": 3}})
    assert (second.status_code, second.json()["reason"]) == (httpx.codes.CONFLICT, "Conflict")
    assert replicas(plane, path) == 2


def test_a_service_account_may_do_what_was_bound_to_it_and_no_more(plane: ControlPlane) -> None:
    path = pan(plane, "guarded", 1)
    account = plane.service_account("reader")
    with pytest.raises(PlaneError, match="Forbidden"):
        plane.kubectl("get", "pans.test.example/guarded", user=account)
    plane.kubectl("create", "role", "reader", "--verb=get", "--resource=pans.test.example")
    plane.kubectl("create", "rolebinding", "reader", "--role=reader", "--serviceaccount=default:reader")
    plane.kubectl("get", "pans.test.example/guarded", user=account)
    assert merge(account, path, {"spec": {"replicas": 2}}).status_code == httpx.codes.FORBIDDEN
    asked = [json.loads(line) for line in plane.audit_log.read_text().splitlines()]
    assert {e["responseStatus"]["code"] for e in asked if e["user"]["username"] == account.name} == {200, 403}


def test_what_was_stored_is_there_after_the_api_server_was_killed(plane: ControlPlane) -> None:
    path = pan(plane, "kept", 3)
    before = plane.get(path)
    plane.kill_apiserver()
    with pytest.raises(httpx.TransportError):
        plane.get(path)
    plane.start_apiserver()
    assert plane.get(path) == before
    plane.restart_apiserver()
    assert plane.get(path) == before


@pytest.fixture(scope="module")
def metrics(plane: ControlPlane) -> Iterator[ExternalMetrics]:
    served = ExternalMetrics(plane.server_certificate("metrics"), plane.front_proxy_authority)
    served.values["depth"] = "40"
    plane.register_api(GROUP, VERSION, "metrics", served.port)
    # The autoscaler has no right to them by itself: whoever serves them gives it.
    plane.apply(READERS)
    yield served
    served.close()


def test_an_autoscaler_follows_an_external_metric_up_and_down(plane: ControlPlane, metrics: ExternalMetrics) -> None:
    path = pan(plane, "followed", 1)
    plane.apply("""
        apiVersion: autoscaling/v2beta2
        kind: HorizontalPodAutoscaler
        metadata: {name: followed}
        spec:
          scaleTargetRef: {apiVersion: test.example/v1, kind: Pan, name: followed}
          minReplicas: 1
          maxReplicas: 8
          metrics:
            - type: External
              external: {metric: {name: depth}, target: {type: AverageValue, averageValue: "10"}}
    """)
    wait_for(lambda: replicas(plane, path) == 4, "4 replicas for a depth of 40", 60)
    metrics.values["depth"] = "5"
    wait_for(lambda: replicas(plane, path) == 1, "1 replica for a depth of 5", 60)
    events = plane.kubectl("get", "events", "--field-selector=involvedObject.name=followed")
    assert "SuccessfulRescale" in events


@pytest.fixture(scope="module")
def node(plane: ControlPlane) -> HollowNode:
    return plane.hollow_node("gpu-0", {"pool": "slots"}, {"nvidia.com/gpu": 2})


def pods(plane: ControlPlane, app: str) -> list[dict]:
    return plane.get(f"/api/v1/namespaces/default/pods?labelSelector=app%3D{app}")["items"]


def running(plane: ControlPlane, app: str) -> int:
    return sum(p["status"]["phase"] == "Running" for p in pods(plane, app))


WORKLOAD = """
apiVersion: apps/v1
kind: {kind}
metadata: {{name: {app}}}
spec:
  selector: {{matchLabels: {{app: {app}}}}}
  template:
    metadata: {{labels: {{app: {app}}}}}
    spec:
      nodeSelector: {{pool: slots}}
      containers: [{{name: c, image: test.example/c:1, resources: {{limits: {{{resource}: "1"}}}}}}]
"""


def test_a_daemon_set_runs_a_pod_on_a_hollow_node(plane: ControlPlane, node: HollowNode) -> None:
    plane.apply(WORKLOAD.format(kind="DaemonSet", app="daemon", resource="cpu"))
    wait_for(lambda: running(plane, "daemon") == 1, "the daemon set's pod to run", 60)
    (pod,) = pods(plane, "daemon")
    assert (pod["spec"]["nodeName"], pod["status"]["hostIP"]) == (node.name, node.address)


def test_of_three_pods_with_a_gpu_a_node_with_two_runs_two(plane: ControlPlane, node: HollowNode) -> None:
    plane.apply(WORKLOAD.format(kind="Deployment", app="served", resource="nvidia.com/gpu"))
    plane.kubectl("scale", "deployment/served", "--replicas=3")
    wait_for(lambda: running(plane, "served") == 2, "two of three pods to run", 60)

    def unschedulable() -> bool:
        return [condition(p, "PodScheduled") for p in pods(plane, "served")].count("False") == 1

    wait_for(unschedulable, "the scheduler to say that the third fits nowhere", 30)


def test_a_node_that_vanished_is_not_ready_until_it_is_back(plane: ControlPlane, node: HollowNode) -> None:
    path = f"/api/v1/nodes/{node.name}"
    node.kill()
    wait_for(lambda: condition(plane.get(path), "Ready") == "Unknown", "the node to be missed", 60)
    node.start()
    assert condition(plane.get(path), "Ready") == "True"
    assert plane.get(path)["status"]["allocatable"]["nvidia.com/gpu"] == "2"

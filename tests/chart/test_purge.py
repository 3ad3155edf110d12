"""`relight definitions` and `relight purge`, on a cluster with and without a controller."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from tests.chart.helm import CHART, RELEASE, SYSTEM, Helm
from tests.chart.values import EVERYTHING, SMALL, merged
from tests.kubernetes.plane import ControlPlane
from tests.kubernetes.slots import SOURCES

from relight.controller.kubernetes.definitions import definitions
from relight.controller.kubernetes.resources import FINALIZER

pytestmark = [pytest.mark.chart, pytest.mark.timeout(120)]
TENANT = "purged"
OBJECTS = """
apiVersion: relight.dev/v1alpha1
kind: EngineRuntime
metadata: {name: r, namespace: purged}
spec: {engine: stub, image: "example/engine:1"}
---
apiVersion: relight.dev/v1alpha1
kind: DevicePool
metadata: {name: p, namespace: purged}
spec: {replicas: 0, runtimeRef: {name: r}, slot: {resourceName: example.com/device}}
---
apiVersion: relight.dev/v1alpha1
kind: ModelDeployment
metadata: {name: m, namespace: purged, finalizers: [relight.dev/instances]}
spec: {model: {uri: /m, revision: r1}, runtimeRef: {name: r}, poolRef: {name: p}, replicas: 0}
"""


def relight(plane: ControlPlane, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "KUBECONFIG": str(plane.admin.kubeconfig)}
    command = [sys.executable, "-m", "relight.controller.cli", *words]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=110, check=False)


@pytest.fixture
def tenant(plane: ControlPlane) -> Iterator[ControlPlane]:
    plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TENANT}}))
    done = relight(plane, "definitions", "--apply")
    assert done.returncode == 0, done.stderr
    yield plane
    assert relight(plane, "purge", "--yes", "--patience", "0").returncode == 0


def test_definitions_are_made_and_brought_up_to_date_and_left_alone_when_they_are(tenant: ControlPlane) -> None:
    assert relight(tenant, "definitions", "--apply").stdout == "the cluster's definitions are current\n"
    name = "devicepools.relight.dev"
    patch = '{"spec": {"names": {"shortNames": ["old"]}}}'
    tenant.kubectl("patch", "customresourcedefinition", name, "--type=merge", "-p", patch)
    assert relight(tenant, "definitions", "--apply").stdout == f"updated: {name}\n"
    assert list(yaml.safe_load_all(relight(tenant, "definitions").stdout)) == definitions()


def test_nothing_is_purged_unless_it_is_asked_for_twice(tenant: ControlPlane) -> None:
    tenant.apply(OBJECTS)
    done = relight(tenant, "purge")
    assert done.returncode == 2
    assert "to delete 1 modeldeployments, 1 devicepools, 1 engineruntimes and 3 definitions" in done.stderr
    assert "m" in tenant.kubectl("-n", TENANT, "get", "modeldeployments", "-o", "name")


def test_a_finalizer_of_somebody_else_is_named_and_not_taken_away(tenant: ControlPlane) -> None:
    tenant.apply(OBJECTS)
    both = f'{{"metadata": {{"finalizers": ["{FINALIZER}", "example.com/mine"]}}}}'
    tenant.kubectl("-n", TENANT, "patch", "modeldeployment", "m", "--type=merge", "-p", both)
    process = relight(tenant, "purge", "--yes", "--patience", "0", "--timeout", "2")
    assert process.returncode == 3
    assert f"not gone after 2 s: {TENANT}/m" in process.stderr
    found = tenant.get(f"/apis/relight.dev/v1alpha1/namespaces/{TENANT}/modeldeployments/m")
    assert found["metadata"]["finalizers"] == ["example.com/mine"]
    none = '{"metadata": {"finalizers": null}}'
    tenant.kubectl("-n", TENANT, "patch", "modeldeployment", "m", "--type=merge", "-p", none)


async def test_a_cluster_takes_what_is_rendered_for_it(tenant: ControlPlane) -> None:
    """By what it serves: this one is older than autoscaling/v2 and policy/v1."""
    values = merged(SMALL, EVERYTHING, {
        "metrics": {"enabled": True}, "externalScaler": {"enabled": True}, "redis": {"enabled": True},
        "models": {"chat": {"hpa": {"maxReplicas": 4}}}, "serviceMonitor": {"enabled": False},
        "podMonitor": {"enabled": False}, "prometheusRule": {"enabled": False},
    })  # fmt: skip
    helm = Helm("helm3", tenant.admin.kubeconfig)
    words = ("template", RELEASE, str(CHART), "--namespace", SYSTEM, "--validate")
    text = await asyncio.to_thread(helm.run, *words, values=values)
    kinds = {(o["apiVersion"], o["kind"]) for o in yaml.safe_load_all(text) if o}
    assert ("autoscaling/v2beta2", "HorizontalPodAutoscaler") in kinds
    assert ("policy/v1beta1", "PodDisruptionBudget") in kinds
    said = tenant.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
    assert said.count("(server dry run)") > 40

"""A release's whole life on a real control plane, while clients ask: nothing is lost, and nothing is left over."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
import yaml
from tests.chart.figures import COUNTS
from tests.chart.helm import RELEASE, SYSTEM, Helm, HelmError
from tests.chart.release import HERE, TENANT, VALUES, Release, made
from tests.chart.values import merged
from tests.kubernetes.plane import ControlPlane
from tests.kubernetes.slots import SECRET
from tests.kubernetes.test_roles import Rights, listed

from relight.controller.kubernetes.api import Object
from relight.controller.kubernetes.installed import DEFINITION
from relight.controller.kubernetes.resources import FINALIZER, MODEL_DEPLOYMENT

pytestmark = [pytest.mark.chart, pytest.mark.timeout(300)]
DEFINITIONS = {
    ("CustomResourceDefinition", "", f"{plural}.relight.dev")
    for plural in ("modeldeployments", "devicepools", "engineruntimes")
}
APIS = {("APIService", "", "v1alpha1.relight.dev")}
OWN = {("ModelDeployment", TENANT, "chat"), ("DevicePool", TENANT, "large"), ("EngineRuntime", TENANT, "stub"),
       ("Service", TENANT, "chat")}  # fmt: skip
LEASE = {("Lease", SYSTEM, f"{RELEASE}-controller")}

STORE = {"redis": {"enabled": True, "persistence": {"enabled": False}, **HERE}}


async def _answering(release: Release) -> dict[str, str]:
    """Which incarnation of an engine answers at each slot's serving port, which plain Services lead to."""
    found = {}
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        for slot in release.slots.slots.values():
            body = {"model": "chat", "prompt": "hello", "max_tokens": 4}
            reply = await client.post(f"http://{slot.address}:8000/v1/completions", json=body)
            if reply.status_code == 200:
                found[slot.name] = reply.headers["x-relight-incarnation"]
    return found


async def test_a_release_comes_serves_changes_and_goes_and_nothing_is_lost(
    ready: ControlPlane, helm: Helm, tmp_path: Path
) -> None:
    async with made(ready, helm, tmp_path) as release:
        before = await release.everything()
        # One of the two with the chart's own store.
        values = merged(VALUES, STORE if helm.version == "helm3" else {})
        said = await release.install(values)
        assert "kubectl -n team-a get modeldeployment chat" in said
        await release.stands(readyReplicas=1)
        await release.until(release.status, "a guardian", lambda s: s["guardians"]["ready"] == 1)
        assert "Succeeded" in await release.run("test", RELEASE)
        if helm.version == "helm3":
            assert await _kept_keys(release) > 0
        replica = await _answering(release)
        assert len(replica) == 1
        _rights_are_those_of_the_manifest(ready, yaml.safe_load_all(await release.run("get", "manifest", RELEASE)))

        # Of an earlier version, so that the upgrade has something to bring up to date.
        patch = json.dumps({"spec": {"names": {"shortNames": ["old"]}}})
        await asyncio.to_thread(
            ready.kubectl, "patch", "customresourcedefinition", "devicepools.relight.dev", "--type=merge", "-p", patch
        )
        changed = merged(values, {"logLevel": "debug", "image": {"tag": "0.1.1"}})
        async with release.load() as asked:
            await asked.some_more(60)
            await release.upgrade(changed)
            definition = await release.api.get(DEFINITION, "", "devicepools.relight.dev")
            assert definition["spec"]["names"]["shortNames"] == ["dp", "pool"]
            await asked.some_more(60)
            await release.run("rollback", RELEASE, "1", "--wait", "--timeout", "120s", *release.helm.unserved)
            await asked.some_more(60)
        assert await _answering(release) == replica, "the very same process all the time, and no other beside it"
        await release.stands(readyReplicas=1)

        # Scaled by hand, and upgraded: the number is who wrote it last's.
        await asyncio.to_thread(
            ready.kubectl, "-n", TENANT, "scale", "modeldeployment/chat", "--replicas=2"
        )  # fmt: skip
        await release.stands(readyReplicas=2)

        if helm.version == "helm4":
            await _comes_back(release, values)
        await release.run("uninstall", RELEASE, "--wait")
        slots = {("Pod", TENANT, s.name) for s in release.slots.slots.values()}
        # Pods of its Deployments go a moment later; what serves, serves on.
        left = await release.until(
            lambda: release.left(before), "what is the users' own to be left", lambda f: not f - _kept(slots)
        )
        assert left == _kept(slots)
        assert len(await _answering(release)) == 2
        assert FINALIZER in (await release.api.get(MODEL_DEPLOYMENT, TENANT, "chat"))["metadata"]["finalizers"]

        purged = await release.relight("purge", "--yes", "--patience", "0")
        assert "modeldeployments: team-a/chat" in purged
        left = await release.until(lambda: release.left(before), "nothing to be left", lambda f: not f)
        COUNTS["resources_left_after_purge"] += len(left)


async def _comes_back(release: Release, values: dict[str, Any]) -> None:
    """Installed again under the same name, it takes over what ran on without it."""
    before = await _answering(release)
    await release.run("uninstall", RELEASE, "--wait")
    # Helm 4 waits for pools too, and so for agents, which have to be given the new certificates by then.
    refreshing = asyncio.create_task(_refresh(release))
    await release.install(values)
    refreshing.cancel()
    await release.stands(readyReplicas=2)
    assert await _answering(release) == before


async def _refresh(release: Release) -> None:
    while True:
        await asyncio.sleep(1)
        await release.slots.mount_again()


async def _kept_keys(release: Release) -> int:
    """Keys in the chart's own store, by the password that it made."""
    secret = await release.api.get(SECRET, SYSTEM, f"{RELEASE}-redis")
    host, _, port = release.pods.proxies.names[f"{RELEASE}-redis.{SYSTEM}.svc:6379"].partition(":")
    client = redis.asyncio.Redis(
        host=host, port=int(port), password=base64.b64decode(secret["data"]["password"]).decode()
    )  # fmt: skip
    try:
        return int(await client.dbsize())
    finally:
        await client.aclose()


def _kept(slots: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    return DEFINITIONS | APIS | OWN | LEASE | slots


def _rights_are_those_of_the_manifest(plane: ControlPlane, objects: Any) -> None:
    """`kubectl auth can-i --list` of each account, against the roles that the release says."""
    found = [o for o in objects if o]
    anyone = listed(plane, plane.service_account("anyone", "default"), TENANT)
    for account in (f"{RELEASE}-controller", f"{RELEASE}-gateway"):
        user = plane.service_account(account, SYSTEM)
        for namespace in (SYSTEM, TENANT):
            assert listed(plane, user, namespace) - anyone == _written(found, account, namespace) - anyone
    plane.kubectl("-n", "default", "delete", "serviceaccount", "anyone")


def _written(objects: list[Object], account: str, namespace: str) -> Rights:
    from tests.kubernetes.test_roles import _rights

    subject = {"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}
    rights: Rights = set()
    for binding in objects:
        if not binding["kind"].endswith("Binding") or subject not in binding["subjects"]:
            continue
        if binding["kind"] == "ClusterRoleBinding" or binding["metadata"]["namespace"] == namespace:
            wanted = (binding["roleRef"]["kind"], binding["roleRef"]["name"])
            (role,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == wanted)
            rights |= _rights(role)
    return rights


async def test_somebody_elses_autoscaler_of_a_model_is_found_at_the_installation(
    ready: ControlPlane, helm: Helm, tmp_path: Path
) -> None:
    other: dict[str, Any] = {
        "apiVersion": "autoscaling/v1", "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "mine", "namespace": TENANT},
        "spec": {
            "scaleTargetRef": {"apiVersion": "relight.dev/v1alpha1", "kind": "ModelDeployment", "name": "chat"},
            "maxReplicas": 3,
        },
    }  # fmt: skip
    ready.apply(yaml.safe_dump(other))
    values = merged(VALUES, {"metrics": {"enabled": True}, "models": {"chat": {"hpa": {"maxReplicas": 2}}}})
    cluster = Helm(helm.version, ready.admin.kubeconfig)
    words = ("install", RELEASE, "deploy/helm/relight", "--namespace", SYSTEM, "--dry-run=server")
    try:
        with pytest.raises(HelmError, match=f"HorizontalPodAutoscaler {TENANT}/mine writes it too"):
            await asyncio.to_thread(cluster.run, *words, values=copy.deepcopy(values))
    finally:
        ready.kubectl("-n", TENANT, "delete", "horizontalpodautoscaler", "mine")


async def test_a_purge_lets_a_controller_that_runs_end_what_serves(ready: ControlPlane, tmp_path: Path) -> None:
    async with made(ready, Helm("helm3"), tmp_path) as release:
        before = await release.everything()
        await release.install(VALUES)
        await release.stands(readyReplicas=1)
        begun = asyncio.get_running_loop().time()
        await release.relight("purge", "--yes", "--patience", "60")
        # The finalizer was the controller's to take: nobody waited for the patience to end.
        assert asyncio.get_running_loop().time() - begun < 60
        await release.run("uninstall", RELEASE, "--wait")
        # The Lease was the controller's again as long as it ran.
        await release.relight("purge", "--yes")
        left = await release.until(lambda: release.left(before), "nothing to be left", lambda f: not f)
        COUNTS["resources_left_after_purge"] += len(left)

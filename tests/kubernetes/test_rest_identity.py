"""The REST API to users of the cluster: their own tokens, their own rights, nothing of another namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.kubernetes.cluster import Cluster, ControllerProcess

from relight.controller.kubernetes.resources import MODEL_DEPLOYMENT

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


async def _account(cluster: Cluster, name: str, role: str = "", namespace: str = "") -> str:
    """A token of a service account that `role` is bound to, in `namespace` or everywhere."""
    user = await asyncio.to_thread(cluster.plane.service_account, name, cluster.namespace)
    subject = f"--serviceaccount={cluster.namespace}:{name}"
    if role:
        words = (
            ["rolebinding", name, "-n", namespace]
            if namespace
            else ["clusterrolebinding", f"{cluster.namespace}-{name}"]
        )
        await asyncio.to_thread(cluster.plane.kubectl, "create", *words, f"--clusterrole={role}", subject)
    return user.token


@asynccontextmanager
async def _as(controller: ControllerProcess, token: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {token}"}
    base = f"http://127.0.0.1:{controller.http_port}"
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=20, trust_env=False) as client:
        yield client


async def test_a_user_does_by_rest_what_the_cluster_lets_them_do_to_the_resource(cluster: Cluster) -> None:
    controller = await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(1), cluster.model(replicas=1))
    await cluster.stands(readyReplicas=1)
    here = f"/api/v1/namespaces/{cluster.namespace}/models"
    editor = await _account(cluster, "editor", "relight-editor", cluster.namespace)
    viewer = await _account(cluster, "viewer", "relight-viewer", cluster.namespace)
    stranger = await _account(cluster, "stranger")
    auditor = await _account(cluster, "auditor", "relight-viewer")

    async with _as(controller, viewer) as client:
        assert [m["spec"]["name"] for m in (await client.get(here)).json()["items"]] == ["m"]
        assert (await client.get("/api/v1/namespaces/default/models")).status_code == 403
        refused = await client.put(f"{here}/m/scale", json={"replicas": 0})
        assert (refused.status_code, refused.headers["content-type"]) == (403, "application/problem+json")
        assert "may not patch modeldeployments/scale" in refused.json()["detail"]
        (instance,) = (await client.get("/api/v1/instances")).json()["items"]
        # Reading a log takes the right to read its pod's.
        assert (await client.get(f"/api/v1/instances/{instance['id']}/logs")).status_code == 403
    async with _as(controller, editor) as client:
        scaled = await client.put(f"{here}/m/scale", json={"replicas": 0})
        assert scaled.status_code == 202, scaled.text
        assert scaled.json()["by"] == f"system:serviceaccount:{cluster.namespace}:editor"
    # By the controller's own right, which is why the user's was asked for.
    assert (await cluster.get(MODEL_DEPLOYMENT, "m"))["spec"]["replicas"] == 0

    async with _as(controller, stranger) as client:
        assert (await client.get(here)).status_code == 403
        for path in ("instances", "operations", "starts", "slots", "devices"):
            assert (await client.get(f"/api/v1/{path}")).json()["items"] == []
        for path in (f"operations/{scaled.json()['id']}", f"instances/{instance['id']}"):
            assert (await client.get(f"/api/v1/{path}")).status_code == 404
    async with _as(controller, auditor) as client:
        assert (await client.get(here)).status_code == 200
        slots = {s["name"] for s in (await client.get("/api/v1/slots")).json()["items"]}
        assert any(name.endswith(f".{cluster.namespace}") for name in slots)
    async with _as(controller, "nobody's") as client:
        refused = await client.get(here)
        assert (refused.status_code, refused.json()["type"]) == (401, "urn:relight:problem:denied")

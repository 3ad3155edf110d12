"""Parts of a cluster that run no engine: a controller that waits for its turn, a node that keeps things for others."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from pathlib import Path

import httpx
import pytest
import yaml
from tests.kubernetes.cluster import ROOT, Cluster

from relight.controller.kubernetes.api import POD
from relight.controller.kubernetes.leader import LABEL

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


async def test_a_stand_by_lives_and_sends_everybody_to_the_leader_which_labels_its_pod(cluster: Cluster) -> None:
    for name in ("one", "two"):
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{cluster.namespace}-{name}"},
            "spec": {"containers": [{"name": "c", "image": "example/c:1"}], "nodeSelector": {"nowhere": "yes"}},
        }  # fmt: skip
        await cluster.api.create(POD, "relight-system", pod)
    first = await cluster.controller("one", **_identity(cluster, "one"))
    await first.leads()
    second = await cluster.controller("two", **_identity(cluster, "two"))

    async def said(path: str) -> httpx.Response | None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{second.http_port}", trust_env=False) as client:
            try:
                return await client.get(path)
            except httpx.TransportError:
                return None

    lives = await cluster.until(lambda: said("/livez"), "the stand-by to listen")
    assert (lives.status_code, lives.json()) == (200, {"status": "standby"})
    sent = await said("/readyz")
    assert sent is not None
    assert (sent.status_code, sent.headers["retry-after"]) == (503, "1")
    assert await _leading(cluster) == ["one"]
    await first.crash()
    await second.leads()
    await cluster.until(lambda: _leading(cluster), "the label to move", lambda names: names == ["two"])


def _identity(cluster: Cluster, name: str) -> dict[str, object]:
    settings = {
        "kubeconfig": str(cluster.kubeconfig), "namespace": "relight-system", "lease": cluster.lease,
        "lease_seconds": 3.0, "identity": f"{cluster.namespace}-{name}", "agent_image": "relight/agent:test",
        "controller_address": f"127.0.0.1:{cluster.grpc_port}",
    }  # fmt: skip
    return {"kubernetes": settings}


async def _leading(cluster: Cluster) -> list[str]:
    items, _ = await cluster.api.list(POD, LABEL)
    prefix = f"{cluster.namespace}-"
    return [n.removeprefix(prefix) for p in items if (n := p["metadata"]["name"]).startswith(prefix)]


async def test_a_node_without_devices_is_of_its_tenants_ring_and_is_asked_to_keep_copies(cluster: Cluster) -> None:
    state = cluster.root / "node"
    secret, daemon = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "node.yaml").read_text())
    config = json.loads(secret["stringData"]["agent.json"])
    config |= {
        "controller_address": f"127.0.0.1:{cluster.grpc_port}", "state_dir": str(state), "tls": None,
        "host_tier": {"budget_bytes": 64 << 20},
        # The stub's weights are on its host alone.
        "force_tcp": False,
    }  # fmt: skip
    secret["stringData"]["agent.json"] = json.dumps(config)
    body = daemon["spec"]["template"]["spec"]
    # One of the two nodes: they would share the directory. And these nodes have no memory to set aside.
    body["nodeSelector"] = {"kubernetes.io/hostname": "slots-0"}
    body["containers"][0]["resources"] = {}
    for found in (secret, daemon):
        found["metadata"]["namespace"] = cluster.namespace
    await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(1), cluster.model(replicas=1, hostCopies=1))
    await cluster.stands(readyReplicas=1)
    try:
        await cluster.apply(secret, daemon)
        node = await cluster.until(lambda: _node(cluster), "the node to be asked for a copy", lambda n: n and _asked(n))
        assert (node["devices"], node["engines"]) == (0, {})
        assert node["cache"] is not None
        assert {c["model"] for c in node["host_tier"]["copies"]} == {f"{cluster.namespace}/m"}
        # Its pod is of no pool that would take it for one of its own.
        pods = {p["metadata"]["name"] for p in await cluster.pods() if not p["metadata"].get("deletionTimestamp")}
        assert len(pods) == 2
    finally:
        await cluster.kubectl("delete", "daemonset", "relight-node")
        await cluster.kubelets.stop()
        _end_supervisor(state)


async def _node(cluster: Cluster) -> dict | None:
    slots = (await cluster.rest("/api/v1/slots"))["items"]
    own = [s for s in slots if s["name"].startswith("relight-node-") and s["name"].endswith(f".{cluster.namespace}")]
    return own[0] if own else None


def _asked(node: dict) -> bool:
    return bool((node["host_tier"] or {}).get("copies"))


def _end_supervisor(state: Path) -> None:
    """What the end of the container would do."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(state / "s" / "supervisor.sock"))
        pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.kill(pid, signal.SIGTERM)

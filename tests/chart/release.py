"""One release on the control plane: Helm, the chart's pods as processes, slot pods of its tenant, clients."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.chart.figures import COUNTS
from tests.chart.helm import CHART, RELEASE, SYSTEM, Helm, HelmError
from tests.chart.pods import SELECTOR, ReleasePods
from tests.kubernetes.load import Load, asking
from tests.kubernetes.plane import ControlPlane
from tests.kubernetes.slots import SOURCES, Kubelets

from relight.controller.kubernetes.api import Api, Kind, Object
from relight.controller.kubernetes.resources import MODEL_DEPLOYMENT
from relight.core.errors import RelightError

TENANT, RESOURCE = "team-a", "example.com/device"
DEADLINE = 60.0
HERE = {"nodeSelector": SELECTOR}
VALUES: dict[str, Any] = {
    "controller": {**HERE, "settings": {"leaseSeconds": 3}},
    "gateway": {**HERE, "preStopSeconds": 2},
    "hooks": HERE,
    "agent": {
        "config": {
            "devices": [{"id": "cpu-0", "memory_bytes": 1 << 30}], "engines": {"vllm": None, "stub": {}},
            "health_seconds": 0.5,
        },
    },
    "runtimes": {"stub": {"engine": "stub", "image": "example/engine:1"}},
    "pools": {
        "large": {
            "namespace": TENANT, "replicas": 2, "slot": {"devices": 1, "resourceName": RESOURCE}, "runtime": "stub",
        },
    },
    "models": {
        "chat": {
            "namespace": TENANT, "service": {"port": 80},
            "spec": {
                "model": {"uri": "/models/chat", "revision": "r1"}, "runtimeRef": {"name": "stub"},
                "poolRef": {"name": "large"}, "replicas": 1, "guardians": {"replicas": 1},
            },
        },
    },
}  # fmt: skip
"""A pool of two stub slots in a tenant's namespace, and a model with one replica and one guardian."""
Found = set[tuple[str, str, str]]
"""(kind, namespace, name)"""
MADE_BY_OTHERS = {"Event", "EndpointSlice", "Endpoints", "CSINode", "PodMetrics", "ControllerRevision"}


class Release:
    """`made` has one; `helm` is without what only a cluster needs."""

    def __init__(self, plane: ControlPlane, api: Api, helm: Helm, root: Path) -> None:
        self.plane, self.api, self.root = plane, api, root
        self.helm = Helm(helm.version, plane.admin.kubeconfig)
        self.pods = ReleasePods(plane, api, SYSTEM, root)
        self.slots = Kubelets(api, TENANT, self.pods.proxies.names)

    async def run(self, *words: str, values: dict[str, Any] | None = None) -> str:
        try:
            return await asyncio.to_thread(self.helm.run, *words, "--namespace", SYSTEM, values=values)
        except HelmError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    async def install(self, values: dict[str, Any]) -> str:
        return await self.run(
            "install", RELEASE, str(CHART), "--wait", "--timeout", "60s", *self.helm.unserved, values=values
        )  # fmt: skip

    async def upgrade(self, values: dict[str, Any]) -> str:
        return await self.run(
            "upgrade", RELEASE, str(CHART), "--wait", "--timeout", "60s", *self.helm.unserved, values=values
        )  # fmt: skip

    async def relight(self, *words: str) -> str:
        """The command line, as the administrator."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relight.controller.cli", *words, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(SOURCES), "KUBECONFIG": str(self.plane.admin.kubeconfig)},
        )  # fmt: skip
        said, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, said.decode()
        return said.decode()

    async def status(self) -> Object:
        return dict((await self.api.get(MODEL_DEPLOYMENT, TENANT, "chat")).get("status") or {})

    async def stands(self, **fields: Any) -> Object:
        return dict(
            await self.until(
                self.status, f"chat to say {fields}", lambda s: all(s.get(k) == v for k, v in fields.items())
            )
        )

    async def until(
        self, ask: Callable[[], Awaitable[Any]], what: str, holds: Callable[[Any], Any] = bool,
        seconds: float = DEADLINE,
    ) -> Any:  # fmt: skip
        said: Any = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        said = await ask()
                        if holds(said):
                            return said
                    except RelightError as error:
                        said = error
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"expected {what}, got {said}\n{self.story()}") from None

    def story(self) -> str:
        return "\n".join([self.pods.story(), *(s.logs for s in self.slots.slots.values())])

    async def everything(self) -> Found:
        """All objects of the cluster but those that its own controllers keep for others."""
        found: Found = set()
        for kind in await asyncio.to_thread(kinds, self.plane):
            if kind.kind in MADE_BY_OTHERS:
                continue
            for each in (await self.api.list(kind))[0]:
                metadata = each["metadata"]
                found.add((kind.kind, metadata.get("namespace", ""), metadata["name"]))
        return found

    async def left(self, before: Found) -> Found:
        """What is there now and was not before; without tokens that the server keeps for accounts."""
        now = await self.everything() - before
        return {f for f in now if f[1] != "kube-node-lease" and not (f[0] == "Secret" and "-token-" in f[2])}

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Load]:
        """Clients that ask through the gateways' Service until the block is left; then no request may be lost."""
        url = f"http://{self.pods.proxies.names[f'{RELEASE}-gateway.{SYSTEM}.svc:80']}"
        # Each over a connection of its own, as a load balancer has them.
        async with asking(url, "chat", keep_connections=False) as found:
            yield found
        COUNTS.update(requests_sent=found.sent, requests_lost=len(found.lost))
        assert not found.lost, f"{found.lost[:5]}\n{self.story()}"


def kinds(plane: ControlPlane) -> list[Kind]:
    """Every kind that can be listed, each in one version."""
    groups = plane.get("/apis")["groups"]
    found = []
    for version in ["v1", *(g["preferredVersion"]["groupVersion"] for g in groups)]:
        listed = plane.get(f"/apis/{version}" if "/" in version else f"/api/{version}")
        group, _, number = version.rpartition("/")
        found += [
            Kind(group, number, r["name"], r["kind"], r["namespaced"])
            for r in listed.get("resources", ())
            if "list" in r["verbs"] and "/" not in r["name"]
        ]
    return found


@asynccontextmanager
async def made(plane: ControlPlane, helm: Helm, root: Path) -> AsyncIterator[Release]:
    """What runs a release's pods, for one test."""
    api = await Api.open(plane.admin.kubeconfig)
    release = Release(plane, api, helm, root)
    await release.pods.start()
    release.slots.start()
    try:
        yield release
    finally:
        await release.pods.stop()
        await release.slots.stop()
        await api.close()

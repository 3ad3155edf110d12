"""Relight in the test's cluster: controllers as processes under their service account, slot pods, models, requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.kubernetes.plane import ControlPlane
from tests.kubernetes.plane.processes import free_ports
from tests.kubernetes.slots import Kubelets, end

from relight.controller.kubernetes.api import POD, Api, Kind, Object
from relight.controller.kubernetes.marks import state_of
from relight.controller.kubernetes.resources import DEVICE_POOL, ENGINE_RUNTIME, GROUP, MODEL_DEPLOYMENT
from relight.core.auth import hash_token

DEADLINE = 40.0
TOKENS = {"viewer": "t-viewer", "operator": "t-operator", "gateway": "t-gateway"}
ENDPOINTS = Kind("", "v1", "endpoints", "Endpoints")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
SYSTEM = "relight-system"
LEASE_SECONDS = 3.0
RESOURCE = "example.com/device"


def manifests() -> list[str]:
    """What a cluster installs, without what this server is too old for."""
    definitions = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "definitions.yaml").read_text()))
    for found in definitions:
        for version in found["spec"]["versions"]:
            version["schema"]["openAPIV3Schema"]["properties"]["spec"].pop("x-kubernetes-validations", None)
    return [yaml.safe_dump_all(definitions), (ROOT / "deploy" / "kubernetes" / "rbac.yaml").read_text()]


class ControllerProcess:
    """One candidate, with a store of its own: losing it loses no intent."""

    def __init__(self, cluster: Cluster, name: str, lease_seconds: float = LEASE_SECONDS, **settings: Any) -> None:
        self.name, self._cluster = name, cluster
        self.directory = cluster.root / name
        self.directory.mkdir()
        self.http_port, self.grpc_port = free_ports(2)
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self.frozen = False
        self._wanted = True
        self._tending: asyncio.Task[None] | None = None
        self.config = {
            "state_path": str(self.directory / "state.db"),
            "http": {"port": self.http_port},
            "grpc": {"port": self.grpc_port},
            "tokens": [{"sha256": hash_token(t), "name": role, "roles": [role]} for role, t in TOKENS.items()],
            "slot_grace_seconds": 10.0,
            "gateway_grace_seconds": 0.5,
            "kubernetes": {
                "kubeconfig": str(cluster.kubeconfig),
                "namespace": SYSTEM,
                "lease": cluster.lease,
                "lease_seconds": lease_seconds,
                "identity": name,
                "agent_image": "relight/agent:test",
                "controller_address": f"127.0.0.1:{cluster.grpc_port}",
            },
            **settings,
        }
        # Told as None: left out, as where another setting stands in its place.
        self.config = {name: value for name, value in self.config.items() if value is not None}

    @property
    def log(self) -> Path:
        return self.directory / "controller.log"

    def events(self) -> list[dict[str, Any]]:
        """What it has logged."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def said(self, event: str) -> int:
        return sum(e["event"] == event for e in self.events())

    async def start(self) -> None:
        self.starts = self.said("controller.ready") + 1
        path = self.directory / "controller.json"
        path.write_text(json.dumps(self.config))
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "relight.controller", "--config", str(path),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(SOURCES)},
                start_new_session=True,
            )  # fmt: skip
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())

    async def _tend(self) -> None:
        """One that ended is started again, as a Deployment's pod would be."""
        while True:
            assert self.process is not None
            await self.process.wait()
            await asyncio.sleep(0.5)
            if not self._wanted:
                return
            await self.start()

    @property
    def leading(self) -> bool:
        """Whether a Service would send connections here."""
        alive = self.process is not None and self.process.returncode is None
        return alive and not self.frozen and self.said("controller.ready") >= self.starts

    async def leads(self) -> None:
        await self._cluster.until(lambda: self.leading, f"{self.name} to lead")

    async def crash(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        self.frozen = True
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    async def stop(self) -> None:
        self._wanted = False
        if self.frozen and self.process is not None and self.process.returncode is None:
            self.thaw()
        # The tending may be about to start it again.
        while self._tending is not None and not self._tending.done():
            await end(self.process)
            await asyncio.wait({self._tending}, timeout=0.2)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class Service:
    """What a Service with one ready pod does: new connections go to the leader, open ones stay where they are."""

    def __init__(self, port: int, controllers: list[ControllerProcess]) -> None:
        self._port, self._controllers = port, controllers
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        self._stopped = False
        self.override = 0
        """A port that gets all new connections instead."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        port = self.override or next((c.grpc_port for c in self._controllers if c.leading), 0)
        if not port:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        if self._stopped:
            there[1].transport.abort()
            writer.transport.abort()
            return
        pumps = [asyncio.create_task(_pump(reader, there[1])), asyncio.create_task(_pump(there[0], writer))]
        self._open.update(pumps)
        await asyncio.wait(pumps)
        self._open.difference_update(pumps)

    def cut(self) -> None:
        """Breaks every open connection."""
        for task in list(self._open):
            task.cancel()

    async def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.close()
        self.cut()
        # Those that connect just now as well: what they open must be closed before the loop is.
        await asyncio.gather(*self._serving, return_exceptions=True)


class Cluster:
    """Everything of one test: a namespace of its own, one or more controllers, the pods' processes."""

    def __init__(self, plane: ControlPlane, api: Api, namespace: str, root: Path) -> None:
        self.plane, self.api, self.namespace, self.root = plane, api, namespace, root
        self.lease = f"relight-{namespace}"
        (self.grpc_port,) = free_ports(1)
        self.controllers: list[ControllerProcess] = []
        self.service_for_agents = Service(self.grpc_port, self.controllers)
        self.kubelets = Kubelets(api, namespace)
        account = plane.service_account("relight-controller", SYSTEM)
        self.kubeconfig, self.account = account.kubeconfig, account.name

    async def controller(self, name: str = "one", **settings: Any) -> ControllerProcess:
        made = ControllerProcess(self, name, **settings)
        self.controllers.append(made)
        await made.start()
        return made

    def api_calls(self) -> Counter[tuple[str, str]]:
        """What the controller's account asked of the API server so far, by the server's own record: verb, resource."""
        found = Counter[tuple[str, str]]()
        for line in self.plane.audit_log.read_text().splitlines():
            event = json.loads(line)
            if event["stage"] == "ResponseComplete" and event["user"]["username"] == self.account:
                found[event["verb"], event["objectRef"]["resource"]] += 1
        return found

    # -- objects

    async def apply(self, *objects: Object) -> None:
        await asyncio.to_thread(self.plane.apply, yaml.safe_dump_all(objects))

    async def kubectl(self, *words: str) -> str:
        return await asyncio.to_thread(self.plane.kubectl, "--namespace", self.namespace, *words)

    def object(self, kind: Kind, name: str, spec: Object, **metadata: Any) -> Object:
        return {
            "apiVersion": kind.api_version, "kind": kind.kind,
            "metadata": {"name": name, "namespace": self.namespace, **metadata}, "spec": spec,
        }  # fmt: skip

    def runtime(self, **spec: Any) -> Object:
        return self.object(ENGINE_RUNTIME, "stub", {"engine": "stub", "image": "example/engine:1", **spec})

    def pool(self, replicas: int, name: str = "pool", **spec: Any) -> Object:
        body = {"replicas": replicas, "slot": {"devices": 1, "resourceName": RESOURCE}, "runtimeRef": {"name": "stub"}}
        return self.object(DEVICE_POOL, name, {**body, **spec})

    def model(self, name: str = "m", **spec: Any) -> Object:
        body = {
            "model": {"uri": "/models/m", "revision": "r1"},
            "runtimeRef": {"name": "stub"},
            "poolRef": {"name": "pool"},
            **spec,
        }
        return self.object(MODEL_DEPLOYMENT, name, body)

    def secret(self, **agent: Any) -> Object:
        """What agents in slot pods start with."""
        config = {
            "slot": "told-on-the-command-line",
            "controller_address": "told:1",
            "state_dir": "/told",
            "devices": [{"id": "cpu-0", "memory_bytes": 1 << 30}],
            "engines": {"stub": {}},
            "health_seconds": 0.5,
            **agent,
        }
        return {
            "apiVersion": "v1", "kind": "Secret", "stringData": {"agent.json": json.dumps(config)},
            "metadata": {"name": "relight-agent", "namespace": self.namespace},
        }  # fmt: skip

    def service(self, name: str = "m") -> Object:
        spec = {"selector": {f"{GROUP}/model": name}, "ports": [{"port": 80, "targetPort": "serving"}]}
        return self.object(Kind("", "v1", "services", "Service"), name, spec)

    async def get(self, kind: Kind, name: str) -> Object:
        return await self.api.get(kind, self.namespace, name)

    async def status(self, name: str = "m") -> Object:
        found = await self.get(MODEL_DEPLOYMENT, name)
        return found.get("status") or {}

    async def pods(self) -> list[Object]:
        items, _ = await self.api.list(POD)
        return [p for p in items if p["metadata"]["namespace"] == self.namespace]

    async def endpoints(self, name: str = "m") -> int:
        """How many addresses a plain Service has for the model."""
        found = await self.get(ENDPOINTS, name)
        return sum(len(s.get("addresses") or []) for s in found.get("subsets") or [])

    async def leader(self) -> ControllerProcess:
        """The controller that leads now."""
        found: ControllerProcess = await self.until(
            lambda: next((c for c in self.controllers if c.leading), None), "a controller to lead"
        )
        return found

    async def rest(self, path: str, controller: ControllerProcess | None = None) -> Any:
        """What the REST API of the leader (or of `controller`) says."""
        leader = controller or await self.leader()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{leader.http_port}", timeout=10) as client:
            reply = await client.get(path, headers={"Authorization": f"Bearer {TOKENS['viewer']}"})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def ready_instances(self) -> dict[str, str]:
        """Ready instances of this namespace, each with its slot."""
        items = (await self.rest("/api/v1/instances?limit=500"))["items"]
        return {
            i["id"]: i["members"][0]["slot"]
            for i in items
            if i["state"] == "ready" and i["model"].startswith(f"{self.namespace}/")
        }

    # -- waiting

    async def until(
        self, ask: Callable[[], Awaitable[Any] | Any], what: str, holds: Callable[[Any], Any] = bool,
        seconds: float = DEADLINE,
    ) -> Any:  # fmt: skip
        """What `ask` says once `holds` is true of it."""
        said = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    said = ask()
                    if isinstance(said, Awaitable):
                        said = await said
                    if holds(said):
                        return said
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"expected {what}, got {said}\n{self.story()}") from None

    async def stands(self, name: str = "m", **fields: Any) -> Object:
        """The model's status once it says all of this."""
        return await self.until(
            lambda: self.status(name),
            f"{name} to say {fields}",
            lambda s: all(s.get(k) == v for k, v in fields.items()),
        )

    async def shows(self, **states: int) -> list[Object]:
        """The pods once so many of them are labelled with each of these states, and no others are."""

        def holds(pods: list[Object]) -> bool:
            return Counter(state_of(p) for p in pods if not p["metadata"].get("deletionTimestamp")) == states

        found: list[Object] = await self.until(self.pods, f"pods to show {states}", holds)
        return found

    def story(self) -> str:
        parts = [c.log.read_text()[-6000:] for c in self.controllers if c.log.exists()]
        parts += [s.logs for s in self.kubelets.slots.values()]
        return "\n".join(parts)

    async def stop(self) -> None:
        for kind in (MODEL_DEPLOYMENT, DEVICE_POOL):
            await asyncio.to_thread(
                self.plane.kubectl, "--namespace", self.namespace, "delete", f"{kind.plural}.{kind.group}", "--all",
                "--wait=false",
            )  # fmt: skip
        for controller in self.controllers:
            await controller.stop()
        # With no controller left nobody takes finalizers away.
        for found in (await self.api.list(MODEL_DEPLOYMENT))[0]:
            if found["metadata"]["namespace"] == self.namespace:
                await self.api.patch(
                    MODEL_DEPLOYMENT, self.namespace, found["metadata"]["name"], {"metadata": {"finalizers": None}}
                )
        await self.kubelets.stop()
        await self.service_for_agents.stop()


@asynccontextmanager
async def made(plane: ControlPlane, namespace: str) -> AsyncIterator[Cluster]:
    """A cluster of one test, ended with it."""
    with tempfile.TemporaryDirectory(prefix="rc-") as root:
        api = await Api.open(plane.admin.kubeconfig)
        plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}))
        cluster = Cluster(plane, api, namespace, Path(root))
        await cluster.service_for_agents.start()
        cluster.kubelets.start()
        try:
            yield cluster
        finally:
            await cluster.stop()
            await api.close()

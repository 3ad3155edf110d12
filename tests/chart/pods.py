"""What a node's kubelet would do for the chart's own pods, with real processes, and Services would do before them.

They run on a node of their own, which this module keeps Ready, so that no hollow kubelet pretends to run them.
Commands, files, environment, probes and hooks are taken from the pods; each has a loopback address of its own, and the
names of Services become addresses of proxies that follow the cluster's own Endpoints.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import ssl
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from tests.kubernetes.cluster import ENDPOINTS, ROOT
from tests.kubernetes.plane import ControlPlane, User
from tests.kubernetes.plane.processes import free_ports
from tests.kubernetes.slots import SECRET, SOURCES, end, pod_token

from relight.controller.kubernetes.api import NODE as NODES
from relight.controller.kubernetes.api import POD, Api, Kind, Object
from relight.controller.kubernetes.cache import Cache
from relight.core.errors import NotFound, RelightError

sys.path.insert(0, str(ROOT / "scripts"))

import redis_server

SERVICE = Kind("", "v1", "services", "Service")
MODULES = {
    "relight": "relight.controller.cli",
    "relight-controller": "relight.controller",
    "relight-gateway": "relight.gateway",
}
NODE = "processes-0"
SELECTOR = {"runs": "processes"}
BEAT_SECONDS = 2.0
AUDIENCE = "https://kubernetes.default.svc"
PROBE_SECONDS = 0.2
NUMBERS = itertools.count(1)


@dataclass
class Running:
    """One pod's process."""

    pod: Object
    directory: Path
    address: str
    ip: str
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None
    kubeconfig: Path | None = None
    ending: asyncio.Task[None] | None = field(default=None)

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def container(self) -> Object:
        (found,) = self.pod["spec"]["containers"]
        return dict(found)

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return f"--- {self.name}\n{path.read_text()[-4000:]}" if path.exists() else ""


class Proxies:
    """Services of one namespace, each port at one of the loopback; new connections go to what is ready, in turn."""

    def __init__(self, api: Api, namespace: str, addresses: dict[str, str]) -> None:
        self._api, self._namespace, self._addresses = api, namespace, addresses
        self._changed = asyncio.Event()
        self._endpoints = Cache(api, ENDPOINTS, self._changed.set, namespace=namespace)
        self._servers: list[asyncio.Server] = []
        self._turn = itertools.count()
        self._following: asyncio.Task[None] | None = None
        self._open: set[asyncio.Task[Any]] = set()
        self.names: dict[str, str] = {}
        """`service.namespace.svc:port`, as pods say it, and where it is here."""

    def start(self) -> None:
        self._following = asyncio.create_task(self._endpoints.run())

    async def learn(self) -> None:
        """Listens for every Service that there is by now."""
        for service in (await self._api.list(SERVICE, namespace=self._namespace))[0]:
            for port in service["spec"]["ports"]:
                name = f"{service['metadata']['name']}.{self._namespace}.svc:{port['port']}"
                if name not in self.names:
                    (here,) = free_ports(1)
                    key, of_port = service["metadata"]["name"], port.get("name")
                    serve = self._serving(key, of_port)
                    self._servers.append(await asyncio.start_server(serve, "127.0.0.1", here))
                    self.names[name] = f"127.0.0.1:{here}"

    def _ready(self, service: str, port_name: str | None) -> list[tuple[str, int]]:
        found = self._endpoints.objects.get(f"{self._namespace}/{service}") or {}
        return [
            (self._addresses[address["ip"]], port["port"])
            for subset in found.get("subsets") or []
            for port in subset.get("ports") or []
            if port.get("name") == port_name
            for address in subset.get("addresses") or []
            if address["ip"] in self._addresses
        ]

    def _serving(self, service: str, port_name: str | None) -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ready = self._ready(service, port_name)
            if not ready:
                writer.transport.abort()
                return
            try:
                there = await asyncio.open_connection(*ready[next(self._turn) % len(ready)])
            except OSError:
                writer.transport.abort()
                return
            task = asyncio.current_task()
            assert task is not None
            self._open.add(task)
            try:
                await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))
            except asyncio.CancelledError:
                pass
            finally:
                for end_of in (writer, there[1]):
                    end_of.transport.abort()
                self._open.discard(task)

        return serve

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
        for server in self._servers:
            server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


class ReleasePods:
    """Runs the pods of one namespace that carry the chart's labels, until they are deleted."""

    def __init__(self, plane: ControlPlane, api: Api, namespace: str, root: Path) -> None:
        self._plane, self._api, self._namespace, self._root = plane, api, namespace, root
        self._wanted = asyncio.Event()
        self._cache = Cache(api, POD, self._wanted.set, "app.kubernetes.io/part-of=relight", namespace=namespace)
        self._tasks: list[asyncio.Task[None]] = []
        self.addresses: dict[str, str] = {}
        """IP in the pod's status, and the loopback address it is here: endpoints must not be on the loopback."""
        self.proxies = Proxies(api, namespace, self.addresses)
        self.pods: dict[str, Running] = {}
        self.logs: list[str] = []

    async def start(self) -> None:
        body: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": SELECTOR}}
        await self._api.create(NODES, "", body)
        self.proxies.start()
        running = (self._beat(), self._cache.run(), self._run())
        self._tasks = [asyncio.create_task(task) for task in running]

    async def _beat(self) -> None:
        """A node that says nothing for a while is not ready, nor is what runs there."""
        amounts = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        while True:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now}
            status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
            with contextlib.suppress(RelightError):
                await self._api.patch(NODES, "", NODE, {"status": status}, subresource="status", strategic=True)
            await asyncio.sleep(BEAT_SECONDS)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(p) for p in list(self.pods.values())))
        await self.proxies.stop()
        await self._api.delete(NODES, "", NODE)

    def story(self) -> str:
        return "\n".join([*(p.log for p in self.pods.values()), *self.logs[-6:]])

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            present = {o["metadata"]["uid"]: o for o in self._cache.objects.values()}
            for uid, pod in present.items():
                if uid not in self.pods and _runs_here(pod):
                    number = next(NUMBERS)
                    address, ip = f"127.2.{os.getpid() % 250}.{number}", f"10.99.0.{number}"
                    running = Running(pod, self._root / f"{pod['metadata']['name']}-{number}", address, ip)
                    self.addresses[ip] = address
                    self.pods[uid] = running
                    running.task = asyncio.create_task(self._life(running))
            for uid, running in self.pods.items():
                now = present.get(uid)
                gone = now is None or now["metadata"].get("deletionTimestamp")
                if gone and running.ending is None:
                    running.ending = asyncio.create_task(self._leave(uid, running))

    async def _life(self, running: Running) -> None:
        running.directory.mkdir()
        await self.proxies.learn()
        if running.pod["spec"].get("automountServiceAccountToken", True):
            running.kubeconfig = await self._account(running)
        await self._lay_files(running)
        once = running.pod["spec"].get("restartPolicy") == "Never"
        while True:
            running.process = await self._process(running, _words(running.container))
            if once:
                status = await running.process.wait()
                await self._tell(running, "Succeeded" if status == 0 else "Failed", ready=False)
                return
            await self._tend(running)
            # It ended by itself: started again, as its restart policy says.
            await self._tell(running, "Running", ready=False)
            await asyncio.sleep(0.5)

    async def _tend(self, running: Running) -> None:
        """Asks the readiness probe until the process ends, and tells the cluster of each change."""
        assert running.process is not None
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        told: bool | None = None
        async with httpx.AsyncClient(verify=context, timeout=2, trust_env=False) as client:
            while running.process.returncode is None:
                ready = await _is_ready(running, client)
                if ready != told:
                    await self._tell(running, "Running", ready=ready)
                    told = ready
                await asyncio.sleep(PROBE_SECONDS)

    async def _tell(self, running: Running, phase: str, *, ready: bool) -> None:
        state = "True" if ready else "False"
        status: Object = {
            "phase": phase, "podIP": running.ip, "podIPs": [{"ip": running.ip}],
            "conditions": [{"type": kind, "status": state} for kind in ("Ready", "ContainersReady")],
        }  # fmt: skip
        with contextlib.suppress(NotFound):
            await self._api.patch(
                POD, self._namespace, running.name, {"status": status}, subresource="status", strategic=True
            )

    async def _leave(self, uid: str, running: Running) -> None:
        hook = ((running.container.get("lifecycle") or {}).get("preStop") or {}).get("exec")
        if hook and running.process is not None and running.process.returncode is None:
            process = await self._process(running, hook["command"])
            await process.wait()
        await self._end(running)
        self.logs.append(running.log)
        # As a kubelet says at last that nothing of it is there any more.
        metadata = running.pod["metadata"]
        with contextlib.suppress(RelightError):
            await self._api.delete(POD, self._namespace, metadata["name"], uid=metadata["uid"], grace=0)
        del self.pods[uid]

    async def _end(self, running: Running) -> None:
        if running.task is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
        await end(running.process)

    # -- what is in a pod

    async def _lay_files(self, running: Running) -> None:
        for volume in running.pod["spec"].get("volumes") or []:
            folder = running.directory / volume["name"]
            folder.mkdir()
            if "secret" in volume:
                secret = await self._secret(volume["secret"]["secretName"])
                items = volume["secret"].get("items") or [{"key": k, "path": k} for k in secret["data"]]
                for item in items:
                    data = base64.b64decode(secret["data"][item["key"]])
                    if item["path"].endswith(".json"):
                        data = json.dumps(self._configured(running, json.loads(self._inside(running, data.decode()))))
                        data = data.encode()
                    (folder / item["path"]).write_bytes(data)

    async def _secret(self, name: str) -> Object:
        """A kubelet waits for what a volume names."""
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(RelightError):
                    return await self._api.get(SECRET, self._namespace, name)
                await asyncio.sleep(0.1)

    def _configured(self, running: Running, config: Any) -> Any:
        """With what a pod has that a process of this machine has not: its account's token, its own host name."""
        if "kubernetes" in config:
            config["kubernetes"] |= {"kubeconfig": str(running.kubeconfig), "identity": running.name}
        return config

    async def _account(self, running: Running) -> Path:
        admin, token = self._plane.admin, await pod_token(self._api, running.pod, AUDIENCE)
        path = running.directory / "kubeconfig"
        return User(running.name, path, admin.authority, admin.server, token=token).write().kubeconfig

    async def _value(self, running: Running, variable: Object) -> str:
        source = variable.get("valueFrom") or {}
        if "secretKeyRef" in source:
            secret = await self._secret(source["secretKeyRef"]["name"])
            return base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
        return running.name if source.get("fieldRef") else str(variable.get("value", ""))

    def _inside(self, running: Running, text: str) -> str:
        """What stands for itself in a pod: its addresses, its directories, the cluster's names."""
        text = text.replace("0.0.0.0", running.address)
        for name, here in self.proxies.names.items():
            text = text.replace(name, here)
        mounts = {m["mountPath"]: m["name"] for m in running.container.get("volumeMounts") or []}
        paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        if not paths:
            return text
        # In one go: what was put in has such paths in it again.
        return re.sub(rf"(?<![\w/.-])({paths})(?![\w-])", lambda m: str(running.directory / mounts[m[1]]), text)

    async def _process(self, running: Running, words: list[str]) -> asyncio.subprocess.Process:
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(running.directory)}
        if running.kubeconfig is not None:
            env["KUBECONFIG"] = str(running.kubeconfig)
        for variable in running.container.get("env") or []:
            env[variable["name"]] = await self._value(running, variable)
        words = [re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), word) for word in words]
        words = [self._inside(running, word) for word in words]
        if words[0] in MODULES:
            words = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
        elif words[0] == "python3":
            words[0] = sys.executable
        if running.container["name"] == "redis":
            env |= _with_redis(running)
        with (running.directory / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )


async def _is_ready(running: Running, client: httpx.AsyncClient) -> bool:
    probe = running.container["readinessProbe"]
    asked = probe.get("httpGet") or probe["tcpSocket"]
    port = next(p["containerPort"] for p in running.container["ports"] if p["name"] == asked["port"])
    try:
        if "tcpSocket" in probe:
            _, writer = await asyncio.open_connection(running.address, port)
            writer.transport.abort()
            return True
        url = f"{asked.get('scheme', 'HTTP').lower()}://{running.address}:{port}{asked['path']}"
        return (await client.get(url)).status_code == 200
    except (httpx.HTTPError, OSError):
        return False


def _with_redis(running: Running) -> dict[str, str]:
    """A `valkey-server` on the PATH: this machine's Redis, on the pod's own address, as in a network of its own."""
    program, environment = redis_server.server(ROOT / ".cache" / "redis")
    wrapper = running.directory / "bin" / "valkey-server"
    wrapper.parent.mkdir(exist_ok=True)
    wrapper.write_text(f'#!/bin/sh\nexec {program} "$@" --bind {running.address}\n')
    wrapper.chmod(0o755)
    return {**environment, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}


def _words(container: Object) -> list[str]:
    return [*container["command"], *(container.get("args") or [])]


def _runs_here(pod: Object) -> bool:
    over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return pod["spec"].get("nodeName") == NODE and not pod["metadata"].get("deletionTimestamp") and not over

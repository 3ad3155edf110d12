"""What a node's kubelet would do for slot pods, with real processes: hollow kubelets only pretend to run containers.

Commands, arguments and mounts are taken from the pods that the controller made; each pod has a loopback address of its
own for its IP, and its shared volume is a directory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes.admission import KEPT

from relight.agent.procfs import Procfs
from relight.controller.kubernetes.api import POD, Api, Kind, Object
from relight.controller.kubernetes.cache import Cache
from relight.controller.kubernetes.pods import SHARED_PATH, TOKEN_PATH
from relight.controller.kubernetes.resources import POOL_LABEL
from relight.core.errors import NotFound

SECRET = Kind("", "v1", "secrets", "Secret")
MODULES = {"relight-agent": "relight.agent", "relight-inject": "relight.agent.inject"}
SOURCES = Path(__file__).resolve().parents[2] / "src"
GRACE_SECONDS = 20.0


@dataclass
class SlotPod:
    """The processes of one pod."""

    name: str
    address: str
    directory: Path
    engine: asyncio.subprocess.Process | None = None
    agent: asyncio.subprocess.Process | None = None
    pod: Object = field(default_factory=dict)

    @property
    def logs(self) -> str:
        return "".join(f"--- {p}\n{p.read_text()[-3000:]}" for p in sorted(self.directory.rglob("*.log")))


async def pod_token(api: Api, pod: Object, audience: str) -> str:
    """What a kubelet asks for to lay it into the pod: a token that is good as long as the pod is there."""
    metadata = pod["metadata"]
    account = (pod.get("spec") or {}).get("serviceAccountName") or "default"
    request = {
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": {
            "audiences": [audience], "expirationSeconds": 3600,
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]},
        },
    }  # fmt: skip
    kind = Kind("", "v1", f"serviceaccounts/{account}/token", "TokenRequest")
    made = await api.create(kind, metadata["namespace"], request)
    return str(made["status"]["token"])


class Kubelets:
    """Runs the slot pods that the scheduler has bound, until they are deleted."""

    def __init__(self, api: Api, namespace: str, names: Mapping[str, str] | None = None) -> None:
        """`names`: of Services, as pods say them, and where they are on this machine."""
        self._api, self._namespace, self._names = api, namespace, {} if names is None else names
        self._wanted = asyncio.Event()
        self._cache = Cache(api, POD, self._wanted.set, POOL_LABEL)
        self._tasks: list[asyncio.Task[None]] = []
        self._used = 0
        self.slots: dict[str, SlotPod] = {}
        self._stopped = False
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.root = Path(tempfile.mkdtemp(prefix="rk-"))
        self.hold: set[str] = set()
        """Pods of which nothing is ended when they are deleted, as if their node had been cut off."""

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._cache.run()), asyncio.create_task(self._run())]

    async def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for ending in self._ending.values():
            ending.cancel()
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        await asyncio.gather(*(self._end(s, leave=False) for s in list(self.slots.values())))
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def pods(self) -> dict[str, Object]:
        return {k: p for k, p in self._cache.objects.items() if p["metadata"]["namespace"] == self._namespace}

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for key, pod in self.pods.items():
                bound = (pod.get("spec") or {}).get("nodeName")
                if bound and key not in self.slots and not pod["metadata"].get("deletionTimestamp"):
                    self._used += 1
                    name = pod["metadata"]["name"]
                    slot = SlotPod(name, f"127.1.{os.getpid() % 250}.{self._used}", self.root / name, pod=pod)
                    self.slots[key] = slot
                    await self._begin(slot)
            for key, slot in list(self.slots.items()) if not self._stopped else ():
                present = self.pods.get(key)
                gone = present is None or present["metadata"].get("deletionTimestamp")
                if gone and key not in self._ending and slot.name not in self.hold:
                    self._ending[key] = asyncio.create_task(self._end(slot, leave=True))

    async def _begin(self, slot: SlotPod) -> None:
        slot.directory.mkdir()
        (slot.directory / "shared").mkdir()
        for container in json.loads(slot.pod["metadata"]["annotations"][KEPT]):
            process = await self._process(slot, container, container["command"])
            assert await process.wait() == 0, slot.logs
        await self._mount(slot)
        await self._give_token(slot)
        # The agents of nodes that run no engine are alone in their pods.
        if any(c["name"] == "engine" for c in slot.pod["spec"]["containers"]):
            await self.run_engine(slot)
        await self.run_agent(slot)

    async def mount_again(self) -> None:
        """What a kubelet does from time to time: files of Secrets that were written anew."""
        for slot in self.slots.values():
            await self._mount(slot)

    async def _mount(self, slot: SlotPod) -> None:
        (volume,) = (v for v in slot.pod["spec"]["volumes"] if "secret" in v and "relight" in v["name"])
        try:
            secret = await self._api.get(SECRET, self._namespace, volume["secret"]["secretName"])
        except NotFound:
            return
        for name, data in secret["data"].items():
            path = slot.directory / "etc" / name
            path.parent.mkdir(exist_ok=True)
            # Files name each other by where they are in the pod.
            path.write_text(self._inside(slot, base64.b64decode(data).decode()))

    async def _give_token(self, slot: SlotPod) -> None:
        (volume,) = (v for v in slot.pod["spec"]["volumes"] if "projected" in v and "relight" in v["name"])
        (source,) = volume["projected"]["sources"]
        path = slot.directory / "run" / source["serviceAccountToken"]["path"]
        path.parent.mkdir(exist_ok=True)
        path.write_text(await pod_token(self._api, slot.pod, source["serviceAccountToken"]["audience"]))

    def _container(self, slot: SlotPod, name: str) -> Object:
        return next(c for c in slot.pod["spec"]["containers"] if c["name"] == name)

    async def run_engine(self, slot: SlotPod) -> None:
        container = self._container(slot, "engine")
        slot.engine = await self._process(slot, container, container["command"])

    async def run_agent(self, slot: SlotPod) -> None:
        container = self._container(slot, "agent")
        slot.agent = await self._process(slot, container, container["command"])

    async def _process(self, slot: SlotPod, container: Object, command: list[str]) -> asyncio.subprocess.Process:
        env = {
            **os.environ, "PYTHONPATH": str(SOURCES), "RELIGHT_PYTHON": sys.executable,
            **{v["name"]: _value(v, slot) for v in container.get("env") or []},
        }  # fmt: skip
        words = [re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), word) for word in command]
        words = [self._inside(slot, word) for word in words]
        if words[0] in MODULES:
            words = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
        with (slot.directory / f"{container['name']}.log").open("ab") as log:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
                )
            )
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                # Nobody else would know of it.
                await end(await starting, signal.SIGKILL)
                raise

    def _inside(self, slot: SlotPod, word: str) -> str:
        for name, here in self._names.items():
            word = word.replace(name, here)
        word = word.replace("/etc/relight", str(slot.directory / "etc"))
        word = word.replace(TOKEN_PATH, str(slot.directory / "run"))
        return re.sub(rf"^{SHARED_PATH}(?=/|$)", str(slot.directory / "shared"), word)

    async def _end(self, slot: SlotPod, *, leave: bool) -> None:
        if leave:
            for container in (c for c in slot.pod["spec"]["containers"] if "lifecycle" in c):
                hook = await self._process(slot, container, container["lifecycle"]["preStop"]["exec"]["command"])
                try:
                    async with asyncio.timeout(GRACE_SECONDS):
                        await hook.wait()
                except TimeoutError:
                    pass
                finally:
                    await end(hook, signal.SIGKILL)
        for process in (slot.agent, slot.engine):
            await end(process)

    async def crash(self, slot: SlotPod) -> None:
        """All of its processes are gone without a word."""
        for process in (slot.agent, slot.engine):
            if process is not None:
                process.kill()
                await process.wait()
        # Nobody is left who would end what the supervisor had started.
        journal = (slot.directory / "shared" / "state" / "supervisor.journal").resolve()
        for stat, _ in Procfs().marked(hashlib.sha256(str(journal).encode()).hexdigest()[:16]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGKILL)

    async def upgrade_agent(self, slot: SlotPod) -> None:
        """The agent's container is replaced in place; the engine's runs on."""
        await end(slot.agent)
        await self.run_agent(slot)


async def end(process: asyncio.subprocess.Process | None, number: signal.Signals = signal.SIGTERM) -> None:
    if process is None or process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    try:
        await asyncio.wait_for(process.wait(), GRACE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _value(variable: dict[str, Any], slot: SlotPod) -> str:
    path = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
    if path == "status.podIP":
        return slot.address
    found: Any = slot.pod
    for part in path.split(".") if path else ():
        found = found[part]
    return str(found) if path else variable.get("value", "")

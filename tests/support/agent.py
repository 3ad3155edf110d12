"""A real agent process, its real supervisor and real stub engines against a scripted controller."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from relight.agent.procfs import Procfs
from relight.agent.supervisor.client import SupervisorClient
from relight.core.errors import Unavailable
from relight.core.records import (
    Assignment,
    CacheRing,
    Desired,
    HostTier,
    InstanceAssignment,
    InstanceReport,
    ModelSpec,
    Rung,
    RungKind,
    SlotReport,
    SourceRef,
)
from relight.core.states import State
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc

DEADLINE = 12.0
TOKEN = "rlt_agent"


class Fleet(fleet_pb2_grpc.FleetServicer):
    """A controller that says what the test tells it to, and remembers every report."""

    def __init__(self) -> None:
        self.reports: list[SlotReport] = []
        self.identities: list[str] = []
        self._changed = asyncio.Condition()
        self._outgoing: dict[str, asyncio.Queue[Assignment]] = {}
        self._current: dict[str, Assignment] = {}
        self.port = 0

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.identities.append(dict(context.invocation_metadata()).get("authorization", ""))
        queue: asyncio.Queue[Assignment] = asyncio.Queue()
        first = await anext(requests)
        if first.slot in self._current:
            queue.put_nowait(self._current[first.slot])
        self._outgoing[first.slot] = queue
        await self._note(first)
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                yield to_proto(await queue.get(), fleet_pb2.Assignment)
        finally:
            if self._outgoing.get(first.slot) is queue:
                del self._outgoing[first.slot]
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            await self._note(message)

    async def _note(self, message: Any) -> None:
        async with self._changed:
            self.reports.append(from_proto(message, SlotReport))
            self._changed.notify_all()

    def keep(self, assignment: Assignment) -> None:
        """Sends it, and again at each attachment."""
        self._current[assignment.slot] = assignment
        self.send(assignment)

    def send(self, assignment: Assignment) -> None:
        """Sends it once, if the slot is attached."""
        if assignment.slot in self._outgoing:
            self._outgoing[assignment.slot].put_nowait(assignment)

    async def until(self, holds: Callable[[SlotReport], Any], since: int = 0) -> SlotReport:
        """The first report after the first `since` ones of which `holds` is true."""
        async with asyncio.timeout(DEADLINE), self._changed:
            at = since
            while True:
                while at < len(self.reports):
                    if holds(self.reports[at]):
                        return self.reports[at]
                    at += 1
                await self._changed.wait()


@dataclass
class Slot:
    """One agent as a process, with everything it needs on disk."""

    fleet: Fleet
    directory: Path
    config: dict[str, Any]
    revision: int = 0
    epoch: int = 1
    wanted: dict[str, InstanceAssignment] = field(default_factory=dict)
    ring: CacheRing | None = None
    tier: HostTier | None = None
    process: asyncio.subprocess.Process | None = None
    address: str = ""

    async def up(self, **env: str) -> None:
        path = self.directory / "config.json"
        path.write_text(json.dumps(self.config))
        with (self.directory / "agent.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "relight.agent", "--config", str(path),
                stdout=asyncio.subprocess.PIPE, stderr=log, env={**os.environ, **env},
            )  # fmt: skip
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = await self.process.stdout.readline()
        assert line.startswith(b"agent listens on"), (self.directory / "agent.log").read_text()
        self.address = line.decode().split()[-1]

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE):
            await self.process.wait()

    def instance(self, name: str, desired: Desired, *args: str, **changes: Any) -> InstanceAssignment:
        spec = ModelSpec("default", "tiny", "/models/tiny", "r1", "stub", args=args)
        return InstanceAssignment(
            name, spec.key, spec, 0, 1, ("cpu-0",), desired,
            content_revision="r1", cause="test", deadline_seconds=20.0, **changes,
        )  # fmt: skip

    def want(self, *instances: InstanceAssignment) -> Assignment:
        """Sends a newer assignment that names exactly these."""
        self.revision += 1
        self.wanted = {i.instance: i for i in instances}
        assignment = Assignment(self.config["slot"], self.epoch, self.revision, instances, self.ring, self.tier)
        self.fleet.keep(assignment)
        return assignment

    def change(self, name: str, desired: Desired, **changes: Any) -> Assignment:
        self.wanted[name] = replace(self.wanted[name], desired=desired, **changes)
        return self.want(*self.wanted.values())

    async def until(
        self, name: str, state: State, holds: Callable[[InstanceReport], Any] = lambda _: True, since: int = 0
    ) -> InstanceReport:
        def found(report: SlotReport) -> InstanceReport | None:
            mine = [i for i in report.instances if i.instance == name and i.state is state and holds(i)]
            return mine[0] if mine and report.slot == self.config["slot"] else None

        report = await self.fleet.until(found, since)
        instance = found(report)
        assert instance is not None
        return instance

    async def supervisor(self) -> SupervisorClient:
        client = SupervisorClient(lambda _: None)
        await client.connect(self.directory / "state" / "s" / "supervisor.sock")
        return client

    def marked(self) -> list[int]:
        """Every living process that carries the mark of an instance of this slot."""
        journal = (self.directory / "state" / "supervisor.journal").resolve()
        owner = hashlib.sha256(str(journal).encode()).hexdigest()[:16]
        return [stat.pid for stat, _ in Procfs().marked(owner)]

    async def down(self) -> None:
        if self.process is not None and self.process.returncode is None:
            await self.kill(signal.SIGTERM)
        try:
            client = await self.supervisor()
        except Unavailable:
            return
        async with asyncio.timeout(DEADLINE):
            await client.shutdown(0)
        await client.close()


def rungs(*kinds: RungKind) -> tuple[Rung, ...]:
    source = SourceRef("i-source", "a", 1, "m", "c", "unix:/nowhere")
    return tuple(Rung(k, f"test wants {k}", source if k.startswith("peer") else None) for k in kinds)


async def complete(url: str, name: str, prompt: str = "hello", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        return await client.post(f"{url}/v1/completions", json={"model": name, "prompt": prompt, **body})

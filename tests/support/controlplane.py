"""A controller in this process, and scripted agents and gateways that speak real gRPC with it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx

from relight.controller.config import ControllerConfig
from relight.controller.runtime import Controller
from relight.core.auth import hash_token
from relight.core.clock import SystemClock
from relight.core.fingerprint import Fingerprint, digest
from relight.core.records import (
    Assignment,
    CacheAnswer,
    CacheBundle,
    CacheEntry,
    CacheReport,
    Desired,
    DeviceReport,
    Endpoint,
    GatewayInstance,
    GatewayModel,
    GatewayReport,
    HostCopyReport,
    HostReport,
    HostState,
    HostTier,
    InstanceReport,
    Mode,
    Neighbours,
    Phase,
    Reach,
    RouteTable,
    RungKind,
    RungResult,
    SlotReport,
    SourceOffer,
    StartRecord,
)
from relight.core.states import State
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc, routing_pb2, routing_pb2_grpc

TOKENS = {"viewer": "t-viewer", "operator": "t-operator", "agent": "t-agent", "gateway": "t-gateway"}
DEADLINE = 20.0
CLOCK = SystemClock()


def configuration(directory: Path, **changes) -> dict:
    return {
        "state_path": str(directory / "state.db"),
        "http": {"port": 0},
        "grpc": {"port": 0},
        "tokens": [{"sha256": hash_token(token), "name": role, "roles": [role]} for role, token in TOKENS.items()],
        "slot_grace_seconds": 2.0,
        "gateway_grace_seconds": 0.2,
        **changes,
    }


def model(name="m", **changes) -> dict:
    return {
        "namespace": "default",
        "name": name,
        "uri": f"/models/{name}",
        "revision": "r1",
        "engine": "stub",
        **changes,
    }


def _offer(name: str) -> SourceOffer:
    addresses = {"shm": f"unix:/{name}", "tcp": "tcp:h:1"}
    return SourceOffer(1, "digest", "content", "", addresses, 1 << 20, grant_key="ab" * 32)


def copy_offer(name: str) -> SourceOffer:
    addresses = {"shm": f"unix:/{name}", "tcp": "tcp:h:2"}
    return SourceOffer(1, "digest", "content", digest({"dtype": "bf16"}), addresses, 1 << 20, grant_key="cd" * 32)


class Running:
    """A started controller and a client for it."""

    def __init__(self, controller: Controller, http: str, rpc: str) -> None:
        self.controller, self.rpc = controller, rpc
        self.base = f"http://{http}"
        self.client = httpx.AsyncClient(
            base_url=self.base, headers={"Authorization": f"Bearer {TOKENS['operator']}"}, timeout=DEADLINE
        )

    @classmethod
    async def start(cls, directory: Path, **changes) -> Running:
        controller = Controller(ControllerConfig.model_validate(configuration(directory, **changes)), CLOCK)
        addresses = await controller.start()
        return cls(controller, addresses.http, addresses.grpc)

    async def stop(self) -> None:
        await self.client.aclose()
        await self.controller.stop()

    async def scale(self, replicas: int, name="m", **body) -> dict:
        path = f"/api/v1/namespaces/default/models/{name}/scale"
        reply = await self.client.put(path, json={"replicas": replicas, **body})
        assert reply.status_code == 202, reply.text
        return reply.json()

    async def ended(self, operation: dict) -> dict:
        reply = await self.client.get(f"/api/v1/operations/{operation['id']}", params={"wait": DEADLINE})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def instances(self) -> list[dict]:
        return (await self.client.get("/api/v1/instances")).json()["items"]


class _Logs(fleet_pb2_grpc.AgentServicer):
    def __init__(self) -> None:
        self.shown: list[str] = []
        """Tokens of who called."""

    async def Logs(self, request, context):  # noqa: N802 - the name is the protocol's
        self.shown.append(dict(context.invocation_metadata())["authorization"].removeprefix("Bearer "))
        yield fleet_pb2.LogChunk(data=f"log of {request.instance}\n".encode())

    async def Cache(self, request, context):  # noqa: N802 - as above
        if request.operation == "list":
            bundle = CacheBundle("0" * 32, "/models/m", "ab" * 32, 10, 1.0, ("a",))
            return to_proto(CacheAnswer((bundle,)), fleet_pb2.CacheAnswer)
        if request.operation == "show" and ("0" * 32).startswith(request.key):
            return to_proto(CacheAnswer((), CacheEntry("0" * 32, {"engine": "stub"})), fleet_pb2.CacheAnswer)
        return await context.abort(grpc.StatusCode.NOT_FOUND, f"the ring has no key {request.key}")


class FakeAgent:
    """An agent that does what it is told at once; `behave` may change what becomes of an instance."""

    def __init__(self, slot: str, rpc: str, *, devices=1, boot="boot", force_tcp=False) -> None:
        self.slot, self.rpc, self.boot, self.force_tcp = slot, rpc, boot, force_tcp
        self.devices = tuple(DeviceReport(f"d{n}", "cpu", f"d{n}", 1 << 30, 0) for n in range(devices))
        self.instances: dict[str, InstanceReport] = {}
        self.assignment: Assignment | None = None
        self.history: list[Assignment] = []
        self.received_at: list[float] = []
        self.sequence = self.incarnation = 0
        self.changed = asyncio.Condition()
        self.dirty = asyncio.Event()
        self.hold: set[State] = set()
        """States in which instances are left until the test lets them go on."""
        self.fail: str = ""
        self.task: asyncio.Task | None = None
        self.address = "127.0.0.1:1"
        self.logs = None
        self.cache: CacheReport | None = None
        self.tier: HostTier | None = None
        """The last one that was heard."""
        self.capabilities = ()
        self.relay: SourceOffer | None = None
        """What each sleeper of it offers to those that are filled with it."""
        self.reach: tuple[Reach, ...] = ()
        self.neighbours: Neighbours | None = None
        """The last ones that were heard."""
        self.budget: int | None = None
        """Of host memory; copies that are wanted are there at once."""

    async def serve_logs(self) -> None:
        self.logs = grpc.aio.server()
        self.asked = _Logs()
        fleet_pb2_grpc.add_AgentServicer_to_server(self.asked, self.logs)
        self.address = f"127.0.0.1:{self.logs.add_insecure_port('127.0.0.1:0')}"
        await self.logs.start()

    def attach(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def detach(self) -> None:
        if self.logs:
            await self.logs.stop(0)
        if self.task:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._attach()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)

    async def _attach(self) -> None:
        async with grpc.aio.insecure_channel(self.rpc) as channel:
            call = fleet_pb2_grpc.FleetStub(channel).Attach(metadata=(("authorization", f"Bearer {TOKENS['agent']}"),))
            writer = asyncio.create_task(self._write(call))
            try:
                async for message in call:
                    self.received_at.append(CLOCK.monotonic())
                    self.assignment = from_proto(message, Assignment)
                    self.history.append(self.assignment)
                    self.neighbours = self.assignment.neighbours or self.neighbours
                    self.obey()
                    async with self.changed:
                        self.changed.notify_all()
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                call.cancel()

    async def _write(self, call) -> None:
        self.dirty.set()
        while True:
            await self.dirty.wait()
            self.dirty.clear()
            await call.write(to_proto(self.report(), fleet_pb2.SlotReport))

    def report(self) -> SlotReport:
        self.sequence += 1
        return SlotReport(
            slot=self.slot,
            epoch=self.assignment.epoch if self.assignment else 0,
            revision=self.assignment.revision if self.assignment else 0,
            sequence=self.sequence,
            agent=f"a-{self.slot}",
            boot_id=self.boot,
            host="host",
            agent_address=self.address,
            force_tcp=self.force_tcp,
            engines={"stub": "1"},
            capabilities=self.capabilities,
            devices=self.devices,
            instances=tuple(self.instances.values()),
            cache=self.cache,
            host_tier=None if self.budget is None else HostReport(self.budget, tuple(self._copies())),
            reach=self.reach,
        )

    def _copies(self) -> Iterator[HostCopyReport]:
        if self.assignment is not None and self.assignment.host_tier is not None:
            self.tier = self.assignment.host_tier
        for wanted in self.tier.wanted if self.tier else ():
            yield HostCopyReport(wanted.copy, wanted.content, HostState.READY, "", 2 << 20, copy_offer(wanted.copy))

    def obey(self) -> None:
        """Moves every instance to where the assignment wants it, unless its state is on hold."""
        wanted = {i.instance: i for i in self.assignment.instances}
        for name in [n for n in self.instances if n not in wanted]:
            del self.instances[name]
        for name, want in wanted.items():
            state = {
                Desired.READY: State.READY,
                Desired.DRAINED: State.DRAINING,
                Desired.DORMANT: State.DORMANT,
                Desired.GONE: State.GONE,
            }[want.desired]
            self._move(name, want, state)
        self.dirty.set()

    def _move(self, name, want, state) -> None:
        old = self.instances.get(name)
        if old and (old.state is state or (old.state is State.FAILED and state is not State.GONE)):
            return
        if old is None and state is State.GONE:
            return
        begun = CLOCK.now()
        if state is State.READY and State.READY in self.hold:
            state = State.WAKING if old and old.state is State.DORMANT else State.STARTING
        ready, start = state is State.READY, None
        if ready:
            self.incarnation += 1
            kind = want.rungs[0].kind if want.rungs else RungKind.DISK
            start = StartRecord(
                name, self.incarnation, want.model, want.mode, want.operation, begun, CLOCK.now(), True, "",
                () if want.mode is Mode.COLD else (RungResult(kind, True, "", 0.001),),
                (Phase("pull", begun, CLOCK.now()),),
                process="" if want.mode is Mode.GUARDIAN else "spawned: no zygote is ready",
            )  # fmt: skip
        self.instances[name] = InstanceReport(
            instance=name,
            model=want.model,
            rank=want.rank,
            members=want.members,
            devices=want.devices,
            state=state,
            since=begun,
            cause="told",
            incarnation=self.incarnation,
            level=want.level,
            operation=want.operation,
            pid=7,
            endpoint=Endpoint(f"http://127.0.0.1:9/{name}", "m") if ready else None,
            source=_offer(name) if ready else None,
            relay=self.relay if state is State.DORMANT else None,
            fingerprint=Fingerprint(layout={"dtype": "bf16"}),
            start=start or (old.start if old else None),
        )

    def set(self, name: str, **changes) -> None:
        self.instances[name] = dataclasses.replace(self.instances[name], **changes)
        self.dirty.set()

    async def until(self, condition) -> Assignment:
        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(lambda: self.assignment is not None and condition(self))
        return self.assignment


class FakeGateway:
    """A gateway that acknowledges each table at once, unless told to keep requests open."""

    def __init__(self, rpc: str, name="gw") -> None:
        self.rpc, self.name = rpc, name
        self.table = RouteTable(0)
        self.open: dict[tuple[str, int], int] = {}
        self.models: tuple[GatewayModel, ...] = ()
        self.spans = ()
        self.changed = asyncio.Condition()
        self.dirty = asyncio.Event()
        self.task: asyncio.Task | None = None

    def attach(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def detach(self) -> None:
        if self.task:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._attach()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)

    async def _attach(self) -> None:
        async with grpc.aio.insecure_channel(self.rpc) as channel:
            call = routing_pb2_grpc.RoutingStub(channel).Attach(
                metadata=(("authorization", f"Bearer {TOKENS['gateway']}"),)
            )
            writer = asyncio.create_task(self._write(call))
            try:
                async for message in call:
                    self.table = from_proto(message, RouteTable)
                    self.dirty.set()
                    async with self.changed:
                        self.changed.notify_all()
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                call.cancel()

    async def _write(self, call) -> None:
        self.dirty.set()
        while True:
            await self.dirty.wait()
            self.dirty.clear()
            report = GatewayReport(
                self.name,
                self.table.revision,
                self.models,
                tuple(GatewayInstance(i, n, count) for (i, n), count in self.open.items()),
                self.spans,
            )
            await call.write(to_proto(report, routing_pb2.GatewayReport))

    def demand(self, held=0, in_flight=0, name="m") -> None:
        self.models = (GatewayModel("default", name, held, 0.0, in_flight, CLOCK.now()),)
        self.dirty.set()

    async def until(self, condition) -> RouteTable:
        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(lambda: self.table.revision > 0 and condition(self.table))
        return self.table


async def relight(running, *words):
    """What the command line answers: (status, stdout, stderr)."""
    env = {**os.environ, "RELIGHT_SERVER": running.base, "RELIGHT_TOKEN": TOKENS["viewer"], "COLUMNS": "200"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "relight.controller.cli", *words, env=env,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def as_config(directory: Path, **changes) -> Path:
    path = directory / "controller.json"
    path.write_text(json.dumps(configuration(directory, **changes)))
    return path


async def settled(running, **counts):
    """Waits, by the events of the API, until the model stands as told."""
    async with asyncio.timeout(20):
        while True:
            revision = running.controller.catalog.revision
            shown = (await running.client.get("/api/v1/namespaces/default/models/m")).json()
            if all(shown[k] == v for k, v in counts.items()):
                return shown
            await running.controller.catalog.reached(revision + 1)


class Process:
    """A controller in a process of its own."""

    def __init__(self, directory, **changes):
        self.path = directory / "controller.json"
        self.path.write_text(json.dumps(configuration(directory, **changes)))
        self.changes = changes

    async def start(self, failpoints=""):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relight.controller", "--config", str(self.path),
            env={**os.environ, "RELIGHT_FAILPOINTS": failpoints},
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(DEADLINE):
            while True:
                line = await self.process.stderr.readline()
                assert line, "the controller ended before it was ready"
                event = json.loads(line)
                if event["event"] == "controller.ready":
                    break
        self.drain = asyncio.create_task(self.process.stderr.read())
        return event["http"], event["grpc"]

    async def end(self, number=signal.SIGTERM):
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE):
            code = await self.process.wait()
            await self.drain
        return code


def client(http):
    return httpx.AsyncClient(
        base_url=f"http://{http}", headers={"Authorization": f"Bearer {TOKENS['operator']}"}, timeout=DEADLINE
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

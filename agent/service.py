"""One agent, put together: supervisor, journal, devices, engines, transitions, the controller's stream."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from relight.agent.asked import AgentServicer
from relight.agent.cache.service import CacheService
from relight.agent.capabilities import Capabilities
from relight.agent.config import AgentConfig
from relight.agent.devices.base import DeviceBackend
from relight.agent.devices.cpu import CpuDevices
from relight.agent.devices.elsewhere import DevicesElsewhere
from relight.agent.devices.host import Host
from relight.agent.devices.kinds import known, open_devices
from relight.agent.engines import registry
from relight.agent.fleet import fleet_stream
from relight.agent.hostcopy.keeper import HostCopies
from relight.agent.journal import Journal
from relight.agent.ledger import Claim, Ledger
from relight.agent.link import SupervisorLink
from relight.agent.member import Member
from relight.agent.metrics import Metrics
from relight.agent.rails import TRANSPORT, Rails, capacities, look, memlock
from relight.agent.reach import Ways
from relight.agent.serving import Serving
from relight.agent.stages.caches import Caches
from relight.agent.stages.common import Tools
from relight.agent.supervisor.client import Exit
from relight.agent.surroundings import Surroundings
from relight.agent.transitions import SETTLE, Transitions
from relight.agent.versions import check
from relight.agent.zygotes.keeper import Zygotes
from relight.core.auth import Identity, Role, TokenEntry
from relight.core.clock import Clock
from relight.core.errors import FieldError, InvalidInput, RelightError
from relight.core.ids import new_id
from relight.core.logs import get_logger
from relight.core.records import Assignment, Capability, DeviceReport, Door, SlotReport
from relight.protos.relight.v1 import fleet_pb2_grpc
from relight.transfer.knock import knock
from relight.transfer.topology import Rail, rails, read_accelerators, read_nics

_log = get_logger("agent")
CONTROLLER = Identity("controller", frozenset({Role.VIEWER, Role.OPERATOR}))
"""As whom the controller calls: it asked its own callers already."""
NOISE = 4 << 20
"""Bytes that a device's use may drift without being worth a report of its own."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class _Identity:
    agent: str
    boot_id: str
    address: str
    engines: dict[str, str]
    facts: dict[str, str]
    sequence: int = 0


class Agent:
    """Runs until cancelled; engines run on. `sleep` is the timer of the periodic looks."""

    def __init__(self, config: AgentConfig, clock: Clock, sleep: Sleep = asyncio.sleep) -> None:
        """Raises InvalidInput for devices, engines or journals that cannot be used."""
        self._config, self._clock, self._sleep = config, clock, sleep
        self._backend = _open_devices(config, clock)
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._journal = Journal(config.state_dir / "agent.journal")
        self._link = SupervisorLink(
            config.socket,
            config.state_dir / "supervisor.journal",
            config.state_dir / "logs" / "supervisor.log",
            clock,
            self._on_exit,
            beside=config.supervisor_beside,
        )
        self._surroundings = Surroundings(self._link, config.state_dir / "asks", here=not config.supervisor_beside)
        self._drivers = registry.build(config.engines, self._backend.enumerate(), self._surroundings)
        self._zygotes = Zygotes(self._drivers, config.state_dir / "zygotes", self._link, clock)
        self._copies = HostCopies(config.tier_settings(), self._link, clock, lambda: self._fleet.changed())
        self._fleet = fleet_stream(config.controller(), clock, self._report, self._accept, self._hear)
        self._metrics = Metrics(
            self._backend.readings, lambda: capacities(self._rails), lambda: self._fleet.attached
        )  # fmt: skip
        self._capabilities = Capabilities(config.state_dir / "capabilities.json")
        self._told: tuple[Capability, ...] = ()
        self._callers = config.known_tokens()
        self._ways = Ways(config.slot, self._knock, clock, lambda: self._fleet.changed(False), sleep)
        self._cache: CacheService | None = None
        self._devices: tuple[DeviceReport, ...] = ()
        self._rails = Rails(False)
        self._remeasure = asyncio.Event()
        self._transitions: Transitions | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._me = _Identity(new_id("a"), "", "", {}, {})

    async def run(self, ready: Callable[[str], None] = lambda _: None) -> None:
        """Adopts, attaches and serves. `ready` hears the address that the agent's own gRPC has.

        Raises Unavailable when no supervisor can be had.
        """
        running = await self._link.open()
        await self._surroundings.learn()
        running = await self._surroundings.take_over(running)
        running = self._copies.take_over(self._zygotes.take_over(running))
        await self._copies.begin()
        ledger = Ledger(self._backend, self._link.owner, rails=await asyncio.to_thread(_nearest_cards))
        own = self._config
        self._rails = await asyncio.to_thread(self._look_at_rails)
        self._loop = asyncio.get_running_loop()
        self._cache = await asyncio.to_thread(self._open_cache)
        caches = Caches(self._cache)
        tools = Tools(
            self._clock, self._drivers, self._link, self._zygotes, ledger, own.bind_host, own.force_tcp,
            own.weights_tls(), own.source_rate, lambda: self._rails.cards, own.digests, caches,
            self._copies.checkpoints,
        )  # fmt: skip
        parents = {d.id: d.parent for d in self._backend.enumerate()}
        transitions = Transitions(
            tools, self._journal, self._config.state_dir, parents, self._changed, self._over
        )  # fmt: skip
        self._transitions = transitions
        self._me.boot_id = self._backend.boot_id()
        await transitions.adopt(running, self._me.boot_id)
        await self._check_versions()
        self._devices = await asyncio.to_thread(ledger.measure, self._claims(transitions))
        self._metrics.measured(self._devices, transitions.reports())
        close_metrics = self._serve_metrics()
        server = await self._serve(transitions)
        serving = self._open_serving(transitions)
        ready(self._me.address)
        _log.info("agent.begun", slot=self._config.slot, agent=self._me.agent, address=self._me.address)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._link.keep(partial(transitions.reattached, beside=own.supervisor_beside)))
                group.create_task(self._fleet.run())
                group.create_task(self._zygotes.keep())
                group.create_task(self._copies.keep())
                group.create_task(self._ways.keep())
                group.create_task(self._watch_health(transitions))
                if serving is not None:
                    group.create_task(serving.serve())
                group.create_task(self._watch_devices(transitions, ledger))
        finally:
            await transitions.close()
            await caches.close()
            if self._copies.checkpoints is not None:
                self._copies.checkpoints.close()
            if self._cache is not None:
                await asyncio.to_thread(self._cache.close)
            await server.stop(0)
            await asyncio.to_thread(close_metrics)
            await self._link.close()
            self._journal.close()

    def _claims(self, transitions: Transitions) -> tuple[Claim, ...]:
        return (*transitions.claims(), *self._zygotes.claims(), *self._copies.claims())

    def _look_at_rails(self) -> Rails:
        # What a card moves is not encrypted: where that is asked for, nobody expects RDMA.
        names = () if self._config.data_tls else self._config.cards()
        return look(names, max((d.total_bytes for d in self._backend.enumerate()), default=0))

    def _look_at_facts(self) -> dict[str, str]:
        try:
            found = dict(self._backend.facts())
        except RelightError as error:
            _log.warning("devices.facts", reason=str(error))
            found = {}
        return {**{name: value for name, value in found.items() if value}, "memlock": memlock()}

    def _look_at_links(self) -> Mapping[tuple[str, str], str]:
        try:
            return self._backend.links()
        except RelightError as error:
            _log.warning("devices.links", reason=str(error))
            return {}

    def _open_cache(self) -> CacheService | None:
        settings = self._config.cache_settings()
        if settings is None:
            return None
        try:
            return CacheService(
                self._config.slot, settings, self._clock, self._cache_changed, self._config.weights_tls()
            )  # fmt: skip
        except (RelightError, OSError) as error:
            # Engines start all the same: without a ring they compile.
            _log.error("cache.unusable", reason=f"{type(error).__name__}: {error}")
            return None

    def _cache_changed(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fleet.changed, False)

    def _open_serving(self, transitions: Transitions) -> Serving | None:
        if self._config.serving_port is None:
            return None
        serving = Serving(lambda: iter(tuple(transitions.members.values())))
        address = serving.open(self._config.bind_host, self._config.serving_port)
        _log.info("serving.begun", address=address)
        return serving

    def _serve_metrics(self) -> Callable[[], None]:
        if self._config.metrics_port is None:
            return lambda: None
        address, close = self._metrics.serve(self._config.bind_host, self._config.metrics_port)
        _log.info("metrics.begun", address=address)
        return close

    async def _check_versions(self) -> None:
        engines, facts = await self._versions(), await asyncio.to_thread(self._look_at_facts)
        packages = {name: await self._packages(name) for name in engines}
        found = check(self._backend.kind, engines, packages, facts, self._config.ignore_locks)
        self._me.engines, self._me.facts = dict(found.engines), dict(found.facts)
        products = sorted({d.model_name for d in self._backend.enumerate()})
        links = await asyncio.to_thread(self._look_at_links)
        seen = {**found.facts, **engines}
        self._capabilities.begin(self._backend.kind, ", ".join(products), links, engines, seen)

    async def _packages(self, engine: str) -> dict[str, str]:
        """Versions beside an engine; none on the CPU, where no lock looks at them and asking takes a second."""
        python = self._config.engines[engine].get("python")
        if self._backend.kind == "cpu" or not isinstance(python, str):
            return {}
        try:
            return dict((await self._surroundings.ask(python, {"environment": True}))["versions"])
        except RelightError as error:
            _log.warning("engine.packages", engine=engine, reason=str(error))
            return {}

    async def _versions(self) -> dict[str, str]:
        found = {name: await driver.version() for name, driver in self._drivers.items()}
        return {name: version for name, version in found.items() if version is not None}

    async def _serve(self, transitions: Transitions) -> grpc.aio.Server:
        server = grpc.aio.server()
        ring = self._cache.ring if self._cache else None
        servicer = AgentServicer(transitions.log_path, lambda: self._callers, ring)
        fleet_pb2_grpc.add_AgentServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        address = f"{self._config.host}:{self._config.port}"
        if self._config.tls is None:
            port = server.add_insecure_port(address)
        else:
            certificate, key, _ = self._config.tls.files().read()
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        await server.start()
        self._me.address = f"{self._config.host}:{port}"
        return server

    # ------------------------------------------------------------------ events

    def _accept(self, assignment: Assignment, received_at: float) -> bool:
        if assignment.slot != self._config.slot:
            wrong = FieldError("slot", self._config.slot, repr(assignment.slot))
            raise InvalidInput("an assignment for another slot", [wrong])
        return self._transitions is not None and self._transitions.accept(assignment, received_at)

    def _hear(self, told: Assignment) -> None:
        if self._cache is not None and told.ring is not None:
            self._cache.hear(told.ring)
        if told.host_tier is not None:
            self._copies.hear(told.host_tier)
        if told.neighbours is not None:
            self._ways.hear(told.neighbours)
        if told.caller:
            self._callers = self._config.known_tokens().also(TokenEntry(told.caller, CONTROLLER))

    async def _knock(self, door: Door) -> str:
        return await asyncio.to_thread(knock, door, self._rails.cards, self._config.weights_tls())

    def _on_exit(self, exit_: Exit) -> None:
        kept = self._surroundings.on_exit(exit_) or self._zygotes.on_exit(exit_) or self._copies.on_exit(exit_)
        if not kept and self._transitions is not None:
            self._transitions.on_exit(exit_)

    def _over(self, member: Member, kind: str, outcome: str, seconds: float) -> None:
        self._metrics.transitioned(kind, outcome, seconds)
        engine = member.assignment.spec.engine
        direct = member.facts.direct if member.facts else {}
        if self._capabilities.over(kind, outcome, engine, member.report(), self._clock.now(), direct):
            self._fleet.changed(False)

    def _changed(self, urgent: bool) -> None:
        self._fleet.changed(urgent)
        self._remeasure.set()

    def _report(self) -> SlotReport:
        transitions = self._transitions
        epoch, revision = transitions.acted_on if transitions else (0, 0)
        self._me.sequence += 1
        self._told = self._capabilities.report(self._clock.now())
        return SlotReport(
            slot=self._config.slot,
            epoch=epoch,
            revision=revision,
            sequence=self._me.sequence,
            agent=self._me.agent,
            boot_id=self._me.boot_id,
            host=platform.node(),
            agent_address=self._me.address,
            force_tcp=self._config.force_tcp,
            transports=self._rails.transports,
            engines=self._me.engines,
            facts=self._me.facts,
            capabilities=self._told,
            devices=self._devices,
            instances=transitions.reports() if transitions else (),
            cache=self._cache.report() if self._cache else None,
            host_tier=self._copies.report(),
            reach=self._ways.report(),
        )

    # ------------------------------------------------------------------ periodic looks

    async def _watch_health(self, transitions: Transitions) -> None:
        while True:
            await self._sleep(self._config.health_seconds)
            await transitions.look()

    async def _watch_devices(self, transitions: Transitions, ledger: Ledger) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.devices_seconds):
                    await self._remeasure.wait()
            except TimeoutError:
                pass
            # Measuring walks page tables under the locks that a wake's own page faults need; and changes
            # come in bursts around a transition, so one measurement after them serves them all.
            await self._sleep(SETTLE)
            if transitions.moving:
                continue
            self._remeasure.clear()
            devices = await asyncio.to_thread(ledger.measure, self._claims(transitions))
            self._metrics.measured(devices, transitions.reports())
            rails = await asyncio.to_thread(self._look_at_rails)
            if self._cache is not None:
                self._cache.look()
            for member in transitions.members.values():
                self._capabilities.cached(member.assignment.spec.engine, member.start, self._clock.now())
            self._capabilities.remember_only(transitions.members)
            # Some change by time alone.
            capabilities = self._capabilities.report(self._clock.now())
            if rails != self._rails:
                self._ways.doubt(TRANSPORT)
            if _differs(devices, self._devices) or rails != self._rails or capabilities != self._told:
                self._devices, self._rails = devices, rails
                self._fleet.changed()


def _open_devices(config: AgentConfig, clock: Clock) -> DeviceBackend:
    if not config.engines:
        return CpuDevices(())
    if config.supervisor_beside and config.accelerators is not None:
        return DevicesElsewhere(config.reader_socket, config.device_kind(), config.wanted_devices(), clock)
    return open_devices(config.device_kind(), Host(), config.wanted_devices())


def _nearest_cards() -> dict[str, Rail]:
    """Which card carries the traffic of which accelerator of the host, by the accelerator's PCI address."""
    vendors = {kind.pci_vendor: kind.name for kind in known().values() if kind.pci_vendor}
    return rails(read_accelerators(vendors=vendors), read_nics())


def _differs(new: tuple[DeviceReport, ...], old: tuple[DeviceReport, ...]) -> bool:
    def shape(devices: tuple[DeviceReport, ...]) -> list[Any]:
        return [(d.id, d.healthy, d.reason, [(h.pid, h.instance) for h in d.holders]) for d in devices]

    drift = [abs(a.used_bytes - b.used_bytes) for a, b in zip(new, old, strict=False)]
    return shape(new) != shape(old) or max(drift, default=0) > NOISE

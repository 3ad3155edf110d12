"""What every stage works with: engine driver, supervisor, measuring, and how a start is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from relight.agent.engines.base import EngineCommand, EngineDriver, EngineHandle, MemberContext
from relight.agent.ledger import Ledger
from relight.agent.member import Member
from relight.agent.stages.caches import Caches
from relight.agent.storage.checkpoints import Checkpoints
from relight.agent.supervisor.client import Running
from relight.core.clock import Clock
from relight.core.errors import InvalidInput, LocalFault, RelightError, TransferError
from relight.core.records import MemoryReading, Mode, Phase, RungResult, StartRecord
from relight.core.tls import TlsFiles
from relight.transfer.verify import Digest

RETRY_AFTER = 5.0
"""Seconds until a failed start is worth another try: faults of sources and of memory pass."""
END_GRACE = 5.0
"""Seconds that an engine has after SIGTERM before its whole tree is killed."""
SUSPEND_DEADLINE = 20.0
"""Seconds that an engine has to give its memory back after a failed wake; then its tree is ended."""


class Spawner(Protocol):
    """The supervisor, as stages see it."""

    async def spawn(self, instance: str, command: EngineCommand, log: Path) -> Running:
        """Starts the main process."""
        ...

    async def end(self, instance: str, grace_seconds: float) -> None:
        """Returns when the whole tree is gone."""
        ...


class Forker(Protocol):
    """The slot's zygotes, as stages see them."""

    async def fork(self, engine: str, instance: str, command: EngineCommand, log: Path) -> tuple[Running, str]:
        """Forks the main process; one line says from what. Raises LocalFault: it has to be spawned, and why."""
        ...

    async def shared(self, engine: str) -> str:
        """What an engine's zygote shares with those forked from it, in words; empty where it shares nothing."""
        ...

    async def started(self, instance: str) -> None:
        """The instance serves, or sleeps: what it was forked from may prepare for its like."""
        ...


@dataclass(frozen=True, slots=True)
class Tools:
    """One set per agent."""

    clock: Clock
    drivers: Mapping[str, EngineDriver]
    spawner: Spawner
    forker: Forker
    ledger: Ledger
    bind_host: str
    force_tcp: bool
    data_tls: TlsFiles | None = None
    source_rate: int | None = None
    cards: Callable[[], tuple[str, ...]] = tuple
    """RDMA cards that may be used now, each as `name@address`."""
    digests: Digest = Digest.XXH3
    caches: Caches = field(default_factory=Caches)
    checkpoints: Checkpoints | None = None
    """What was read from remote storage; None where no memory is set aside for it."""

    def driver(self, member: Member) -> EngineDriver:
        """Raises InvalidInput when this slot has no such engine."""
        try:
            return self.drivers[member.assignment.spec.engine]
        except KeyError:
            known = ", ".join(sorted(self.drivers)) or "none"
            name = member.assignment.spec.engine
            raise InvalidInput(f"engine {name!r} is not configured on this slot (configured: {known})") from None

    def context(self, member: Member) -> MemberContext:
        """Where the member lives; its private directory is made when it is absent."""
        member.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return MemberContext(
            member.assignment, member.directory, member.log_path, self.bind_host, self.force_tcp, self.data_tls,
            self._rate(member), self.cards(), self.digests,
        )  # fmt: skip

    def _rate(self, member: Member) -> int | None:
        """What the host allows to be read of one engine, and what the model's owner does: the lower one."""
        limits = [rate for rate in (self.source_rate, member.assignment.spec.source_rate) if rate is not None]
        return min(limits, default=None)

    def attach(self, member: Member) -> EngineHandle:
        """The member's handle, made at the first call; it acts for the newest assignment, of whatever content."""
        if member.handle is None:
            member.handle = self.driver(member).handle(self.context(member))
        else:
            member.handle.follow(member.assignment)
        return member.handle

    async def end(self, member: Member, grace_seconds: float) -> None:
        """Ends the member's whole tree; returns when it is gone. The exit that follows is nobody's news."""
        member.ending = True
        try:
            await self.spawner.end(member.instance, grace_seconds)
        finally:
            member.ending = False

    async def measure(self, member: Member, residual_bytes: int | None = None) -> MemoryReading:
        """Measures the member's memory now and keeps it. Reading a large tree takes tens of milliseconds."""
        weights, kv, unmapped = await self.attach(member).resident()
        mapped = await asyncio.to_thread(self.ledger.tree_bytes, member.instance, member.pid)
        kept, unsafe = (member.memory.residual_bytes, member.memory.unsafe) if member.memory else (0, "")
        member.unmapped_bytes = unmapped
        member.memory = MemoryReading(
            measured_at=self.clock.now(),
            total_bytes=mapped + unmapped,
            weight_bytes=weights,
            kv_bytes=kv,
            residual_bytes=mapped + unmapped if residual_bytes is not None else kept,
            unsafe=unsafe,
        )
        return member.memory


@dataclass(slots=True)
class Recorder:
    """Builds one StartRecord: phases follow each other without a gap, failed rungs included."""

    member: Member
    clock: Clock
    mode: Mode
    begun_at: float
    phases: list[Phase] = field(default_factory=list)
    rungs: list[RungResult] = field(default_factory=list)
    process: str = ""

    @property
    def edge(self) -> float:
        """Where the last phase ended."""
        return max((p.end for p in self.phases), default=self.begun_at)

    def mark(self, name: str, detail: str) -> None:
        """A phase from the last edge to now."""
        self.phases.append(Phase(name, self.edge, self.clock.now(), detail))

    def add(self, phases: tuple[Phase, ...]) -> None:
        """Phases measured by the engine; the way there and back belongs to the first and the last of them."""
        if not phases:
            return
        edge, now = self.edge, self.clock.now()
        first = min(phases, key=lambda p: p.start)
        last = max(phases, key=lambda p: p.end)
        for phase in phases:
            start = min(phase.start, edge) if phase is first else phase.start
            end = max(phase.end, now) if phase is last else phase.end
            self.phases.append(Phase(phase.name, start, end, phase.detail))

    def weave(self, phases: tuple[Phase, ...]) -> None:
        """The engine's own phases of a start, put between those that the agent saw; what no one names becomes the
        process's own time before them and the server's after them."""
        before = [p for p in self.phases if p.name in ("dispatch", "cache")]
        begun = max((p.end for p in before), default=self.begun_at)
        seen = [p for p in self.phases if p not in before and p.name != "process"]
        woven = sorted((*seen, *(p for p in phases if p.start >= begun)), key=lambda p: (p.start, p.end))
        self.phases, edge = before, begun
        if woven:
            edge = woven[0].start
            self.phases.append(Phase("process", begun, edge, self.process))
        for phase in woven:
            self.phases.append(Phase(phase.name, min(edge, phase.end), phase.end, phase.detail))
            edge = max(edge, phase.end)
        self.mark("serve" if woven else "engine", "the engine's server, up to its first healthy answer")

    def finish(self, ok: bool, reason: str) -> None:
        """Stores the record on the member; the caller moves the state next."""
        assignment = self.member.assignment
        self.member.start = StartRecord(
            instance=assignment.instance,
            incarnation=self.member.incarnation,
            model=assignment.model,
            mode=self.mode,
            operation=assignment.operation,
            begun_at=self.begun_at,
            ended_at=self.clock.now(),
            ok=ok,
            reason=reason,
            rungs=tuple(self.rungs),
            phases=tuple(self.phases),
            process=self.process,
        )


def fault(error: BaseException) -> TransferError | None:
    """`error` as a fault that the ladder may go on after, or None when it is a defect."""
    if isinstance(error, TransferError):
        return error
    if isinstance(error, TimeoutError):
        return LocalFault("the deadline passed")
    if isinstance(error, OSError):
        return LocalFault(f"the engine cannot be reached: {error}")
    return None


def explain(error: BaseException) -> str:
    """One line for reports."""
    if isinstance(error, RelightError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "the deadline passed"
    return f"{type(error).__name__}: {error}"

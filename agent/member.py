"""One member of one instance on this slot: its state, story, and what is reported of it.

The only place that moves a state: along the table's edges, with a cause, journalled before anyone is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from relight.agent.engines.base import EngineFacts, EngineHandle
from relight.agent.journal import STORY, InstanceRecord
from relight.agent.reconcile import Kind
from relight.core.clock import Clock
from relight.core.logs import get_logger
from relight.core.records import (
    Failure,
    InstanceAssignment,
    InstanceReport,
    MemoryReading,
    Shapes,
    SourceOffer,
    StartRecord,
)
from relight.core.states import State, Step, check_edge

_log = get_logger("agent.member")

Keep = Callable[[InstanceRecord], None]
Changed = Callable[[bool], None]
"""Told whether the change is urgent, that is, more than words for people."""


@dataclass(slots=True, eq=False)
class Member:
    """Mutable, owned by the agent's event loop. `received_at` is when the newest assignment for it came."""

    assignment: InstanceAssignment
    directory: Path
    log_path: Path
    clock: Clock
    keep: Keep
    changed: Changed
    epoch: int
    revision: int
    received_at: float
    state: State = State.NONE
    since: float = 0.0
    cause: str = ""
    incarnation: int = 0
    level: int = 2
    pid: int = 0
    start_time: int = 0
    story: list[Step] = field(default_factory=list)
    handle: EngineHandle | None = None
    facts: EngineFacts | None = None
    source: SourceOffer | None = None
    relay: SourceOffer | None = None
    """Of a sleeper, for those that are filled when it is."""
    failure: Failure | None = None
    memory: MemoryReading | None = None
    start: StartRecord | None = None
    progress: str = ""
    requests_running: int = 0
    shapes: Shapes | None = None
    """What its engine ran lately; nothing of it outlives the agent."""
    counted: Shapes | None = None
    """The engine's own counts as last read, which `shapes` has taken in."""
    unmapped_bytes: int = 0
    retry_at: float = 0.0
    complete: bool = True
    """Nothing is left of what a lazy start put off."""
    exit_code: int | None = None
    """How its main process ended by itself, where that is known: minus a signal's number."""
    ending: bool = False
    """Its process is being ended by this agent."""
    task: asyncio.Task[None] | None = None
    """The transition under way, of this `kind`."""
    kind: Kind | None = None

    @property
    def instance(self) -> str:
        """Its instance's id."""
        return self.assignment.instance

    def move(self, state: State, cause: str) -> None:
        """Takes one edge. Raises InvariantViolated outside the table; nothing is changed then."""
        check_edge(self.state, state, self.story)
        now = self.clock.now()
        before = self.state
        self.story = [*self.story[-(STORY - 1) :], Step(before, state, cause, now)]
        self.state, self.since, self.cause, self.progress = state, now, cause, ""
        self.remember()
        _log.info("state.moved", instance=self.instance, before=before, after=state, cause=cause)

    def begin(self, state: State, cause: str) -> None:
        """Enters a transition, or takes it up again after the agent's own restart."""
        self.failure = None
        if self.state is not state:
            self.move(state, cause)

    def fail(self, reason: str, retry_after: float | None) -> None:
        """FAILED, with the reason, from any state that can fail."""
        if self.state in (State.FAILED, State.GONE):
            return
        self.failure, self.source = Failure(reason, retry_after), None
        self.move(State.FAILED, reason)

    def remember(self) -> None:
        """Writes the present record down, then tells."""
        self.keep(self.record())
        self.changed(True)

    def say(self, line: str) -> None:
        """One line of progress for people."""
        self.progress = line
        self.changed(False)

    def record(self) -> InstanceRecord:
        """What the journal keeps."""
        return InstanceRecord(
            assignment=self.assignment,
            epoch=self.epoch,
            revision=self.revision,
            state=self.state,
            since=self.since,
            incarnation=self.incarnation,
            level=self.level,
            pid=self.pid,
            start_time=self.start_time,
            story=tuple(self.story),
            failure=self.failure,
            memory=self.memory,
            start=self.start,
            source=self.source,
            relay=self.relay,
            facts=self.facts,
        )

    def restore(self, record: InstanceRecord) -> None:
        """Takes over what the journal kept."""
        self.state, self.since, self.incarnation = record.state, record.since, record.incarnation
        self.level, self.pid, self.start_time = record.level, record.pid, record.start_time
        self.story, self.failure, self.memory = list(record.story), record.failure, record.memory
        self.start, self.source, self.facts = record.start, record.source, record.facts
        self.relay = record.relay
        self.cause = self.story[-1].cause if self.story else ""

    def report(self) -> InstanceReport:
        """What the controller is told. The endpoint and the source are told only while they may be used."""
        ready = self.state is State.READY
        return InstanceReport(
            instance=self.instance,
            model=self.assignment.model,
            rank=self.assignment.rank,
            members=self.assignment.members,
            devices=self.assignment.devices,
            state=self.state,
            since=self.since,
            cause=self.cause,
            incarnation=self.incarnation,
            level=self.level,
            operation=self.assignment.operation,
            pid=self.pid,
            endpoint=self.facts.endpoint if self.facts and ready else None,
            source=self.source if ready else None,
            relay=self.relay if self.state is State.DORMANT else None,
            fingerprint=self.facts.fingerprint if self.facts else None,
            failure=self.failure,
            memory=self.memory,
            start=self.start,
            progress=self.progress,
            requests_running=self.requests_running,
            shapes=self.shapes,
        )

"""One start as a timeline that accounts for its wall time, made of what each component measured. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from relight.controller.plan.prices import SLEEP, way_of
from relight.core.fingerprint import Fingerprint, digest
from relight.core.records import GatewaySpan, Mode, Operation, Phase, Price, RungResult, StartCache, StartRecord

GATEWAY = "gateway"
"""The detail of phases that a gateway measured: they say when somebody asked, not how long a start took."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What was expected of a placement when it was written: before its start, and kept until it is recorded."""

    instance: str
    operation: str
    mode: Mode
    reason: str
    """Why this mode, and not another."""
    seconds: float
    placed_at: float
    prices: tuple[Price, ...] = ()
    """What every mode would have cost."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One start from the request that asked for it to the first token, in named phases.

    `seconds` runs from the assignment to ready: it is what `predicted_seconds` predicted.
    """

    id: str
    instance: str
    incarnation: int
    model: str
    mode: Mode
    way: str
    """The rung that brought a guardian its weights, `lazy/RUNG` or `normal/RUNG` of a start, or `cold`."""
    device_kind: str
    operation: str
    begun_at: float
    ended_at: float
    ok: bool
    reason: str
    seconds: float
    predicted_seconds: float | None = None
    rungs: tuple[RungResult, ...] = ()
    phases: tuple[Phase, ...] = ()
    process: str = ""
    """How the process came to be: forked, spawned, and why."""
    cache: StartCache | None = None
    """What the compile-cache ring did for it: known some time after the start has ended."""
    planned_mode: Mode | None = None
    """What was planned; an agent that could not do it starts by another mode."""
    planned_reason: str = ""
    prices: tuple[Price, ...] = ()
    """What every mode would have cost, as predicted before the start."""
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    fingerprint_digest: str = ""
    """Names all fields of the fingerprint; empty when the engine never got so far as to tell it."""

    @property
    def slept(self) -> bool:
        """Whether it ended asleep, as a guardian's start does."""
        return any(phase.name == SLEEP for phase in self.phases)

    @property
    def error(self) -> float | None:
        """By which share of the measured time the prediction was wrong; None of a start that cannot tell."""
        if self.predicted_seconds is None or not self.ok or self.seconds <= 0:
            return None
        return abs(self.predicted_seconds - self.seconds) / self.seconds


def name_of(fingerprint: Fingerprint | None) -> str:
    """The digest of a whole fingerprint; empty for none."""
    if fingerprint is None:
        return ""
    parts = (("layout", fingerprint.layout), ("content", fingerprint.content), ("runtime", fingerprint.runtime))
    fields = {f"{part}.{name}": value for part, values in parts for name, value in values.items()}
    return digest(fields) if fields else ""


def coverage(phases: Iterable[Phase], start: float, end: float) -> float:
    """The share of [start, end] that lies in at least one phase, from 0 to 1; 1 for an empty interval."""
    if not end > start:
        return 1.0
    covered, reached = 0.0, start
    for phase in sorted(phases, key=lambda p: (p.start, p.end)):
        low, high = max(phase.start, reached), min(phase.end, end)
        if high > low:
            covered += high - low
            reached = high
    return covered / (end - start)


def assemble(
    record: StartRecord,
    operation: Operation | None,
    *,
    device_kind: str = "",
    expectation: Expectation | None = None,
    fingerprint: Fingerprint | None = None,
) -> Timeline:
    """The agent's record with the control plane's share before it: accept, decide and dispatch."""
    before = control_phases(record, operation)
    placed_at = next((p.start for p in before if p.name == "dispatch"), record.begun_at)
    phases = tuple(sorted((*before, *record.phases), key=lambda p: (p.start, p.end)))
    won = next((r.kind for r in reversed(record.rungs) if r.ok), None)
    tried = record.rungs[-1].kind if record.rungs else None
    # An expectation of another operation is of another start of this instance.
    if expectation is not None and record.operation not in ("", expectation.operation):
        expectation = None
    predicted = expectation.seconds if expectation else (operation.predicted_seconds if operation else None)
    return Timeline(
        id=f"{record.ended_at:017.6f}-{record.instance}-{record.incarnation}",
        instance=record.instance,
        incarnation=record.incarnation,
        model=record.model,
        mode=record.mode,
        way=way_of(record.mode, won or tried),
        device_kind=device_kind,
        operation=record.operation,
        begun_at=min((p.start for p in phases), default=record.begun_at),
        ended_at=record.ended_at,
        ok=record.ok,
        reason=record.reason,
        seconds=max(0.0, record.ended_at - placed_at),
        predicted_seconds=predicted,
        rungs=record.rungs,
        phases=phases,
        process=record.process,
        cache=record.cache,
        planned_mode=expectation.mode if expectation else None,
        planned_reason=expectation.reason if expectation else "",
        prices=expectation.prices if expectation else (),
        fingerprint=fingerprint or Fingerprint(),
        fingerprint_digest=name_of(fingerprint),
    )


def control_phases(record: StartRecord, operation: Operation | None) -> list[Phase]:
    """The operation's phases that led to this instance, and the dispatch up to the agent's first phase."""
    if operation is None:
        return []
    # A phase with a detail belongs to the instance named there: one operation may place several.
    own = [p for p in operation.phases if p.detail in ("", record.instance)]
    if not any(p.name == "decide" for p in own):
        return own
    placed_at = max(p.end for p in own)
    first = min((p.start for p in record.phases), default=record.begun_at)
    return [*own, Phase("dispatch", placed_at, max(placed_at, first))]


def with_span(timeline: Timeline, span: GatewaySpan) -> Timeline:
    """The timeline with a phase that the gateway saw; a repeat replaces the earlier one of that name."""
    if not (math.isfinite(span.start) and math.isfinite(span.end)):
        return timeline
    kept = [p for p in timeline.phases if p.name != span.name]
    # Routing begins where the agent's share ends: telling controller and gateway of it is part of it.
    start = min(span.start, timeline.ended_at) if span.name == "route" and timeline.ok else span.start
    phases = sorted((*kept, Phase(span.name, start, span.end, GATEWAY)), key=lambda p: (p.start, p.end))
    return replace(timeline, phases=tuple(phases))

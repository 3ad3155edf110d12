"""One start as a timeline that accounts for its wall time, made of what each component measured. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from relight.core.records import GatewaySpan, Mode, Operation, Phase, RungResult, StartCache, StartRecord


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
    """The rung that brought the weights, or `cold`."""
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
    cache: StartCache | None = None
    """What the compile-cache ring did for it: known some time after the start has ended."""


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
    predicted_seconds: float | None = None,
) -> Timeline:
    """The agent's record with the control plane's share before it: accept, decide and dispatch."""
    before = control_phases(record, operation)
    placed_at = next((p.start for p in before if p.name == "dispatch"), record.begun_at)
    phases = tuple(sorted((*before, *record.phases), key=lambda p: (p.start, p.end)))
    won = next((r.kind for r in reversed(record.rungs) if r.ok), None)
    tried = record.rungs[-1].kind if record.rungs else None
    way = "cold" if record.mode is Mode.COLD else str(won or tried or "unknown")
    if predicted_seconds is None and operation is not None:
        predicted_seconds = operation.predicted_seconds
    return Timeline(
        id=f"{record.ended_at:017.6f}-{record.instance}-{record.incarnation}",
        instance=record.instance,
        incarnation=record.incarnation,
        model=record.model,
        mode=record.mode,
        way=way,
        device_kind=device_kind,
        operation=record.operation,
        begun_at=min((p.start for p in phases), default=record.begun_at),
        ended_at=record.ended_at,
        ok=record.ok,
        reason=record.reason,
        seconds=max(0.0, record.ended_at - placed_at),
        predicted_seconds=predicted_seconds,
        rungs=record.rungs,
        phases=phases,
        cache=record.cache,
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
    phases = sorted((*kept, Phase(span.name, start, span.end, "gateway")), key=lambda p: (p.start, p.end))
    return replace(timeline, phases=tuple(phases))

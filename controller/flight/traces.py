"""A timeline in the formats of other tools: Chrome trace events and OTLP/JSON spans. No I/O.

Chrome's JSON opens in Perfetto (https://ui.perfetto.dev) and chrome://tracing. OTLP/JSON is the JSON encoding
of opentelemetry-proto: ids in hexadecimal, 64-bit integers as text, enumerations as numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from relight.controller.flight.timeline import Timeline
from relight.core.records import Phase, RungResult

SERVICE = "relight-controller"
SCOPE = "relight.flight"
_INTERNAL, _OK, _ERROR = 1, 1, 2
"""SPAN_KIND_INTERNAL, STATUS_CODE_OK, STATUS_CODE_ERROR."""


def span_of(timeline: Timeline) -> tuple[float, float]:
    """The wall times between which everything of a start lies."""
    ends = [p.end for p in timeline.phases]
    begins = [p.start for p in timeline.phases]
    return min([timeline.begun_at, *begins]), max([timeline.ended_at, *ends])


def trace_of(timeline: Timeline) -> str:
    """The id (32 hexadecimal digits) of the trace that a start is part of: that of its operation."""
    return _digits(32, "trace", timeline.operation or timeline.id)


def rung_ends(timeline: Timeline) -> list[tuple[RungResult, float]]:
    """Each tried rung and when it was over: at the end of the phase that names it, else by what took place after it."""
    begin, _ = span_of(timeline)
    found = []
    at = timeline.ended_at
    for rung in reversed(timeline.rungs):
        named = [p.end for p in timeline.phases if p.detail.startswith(f"{rung.kind} ")]
        found.append((rung, max(begin, min(named[-1] if named else at, timeline.ended_at))))
        at -= max(0.0, rung.seconds)
    return found[::-1]


def chrome(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """Chrome trace events: one process per start, its phases on as many threads as overlap."""
    events: list[dict[str, Any]] = []
    for number, timeline in enumerate(timelines, 1):
        begin, end = span_of(timeline)
        name = f"{timeline.model} {timeline.instance} by {timeline.mode}"
        events.append(_named(number, 0, "process_name", name))
        events.append(_named(number, 0, "thread_name", "start"))
        whole = {
            "way": timeline.way,
            "ok": timeline.ok,
            "reason": timeline.reason,
            "predicted_seconds": timeline.predicted_seconds,
            "process": timeline.process,
            "fingerprint": timeline.fingerprint_digest,
        }
        events.append(_complete(number, 0, "start", begin, end, "start", whole))
        lanes: list[float] = []
        for phase in sorted(timeline.phases, key=lambda p: (p.start, p.end)):
            lane = next((n for n, busy in enumerate(lanes) if busy <= phase.start), len(lanes))
            if lane == len(lanes):
                lanes.append(0.0)
                events.append(_named(number, lane + 1, "thread_name", f"phases {lane + 1}"))
            lanes[lane] = phase.end
            arguments = {"detail": phase.detail}
            events.append(_complete(number, lane + 1, phase.name, phase.start, phase.end, "phase", arguments))
        events += [
            {
                "name": f"rung {rung.kind} {'took' if rung.ok else 'failed'}",
                "ph": "i",
                "s": "p",
                "ts": _micros(at),
                "pid": number,
                "tid": 0,
                "cat": "rung",
                "args": _rung_facts(rung),
            }
            for rung, at in rung_ends(timeline)
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    pid: int, tid: int, name: str, start: float, end: float, category: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    begin = _micros(start)
    return {
        "name": name,
        "ph": "X",
        "ts": begin,
        "dur": max(0, _micros(end) - begin),
        "pid": pid,
        "tid": tid,
        "cat": category,
        "args": dict(arguments),
    }


def _rung_facts(rung: RungResult) -> dict[str, Any]:
    return {
        "kind": str(rung.kind),
        "ok": rung.ok,
        "reason": rung.reason,
        "seconds": rung.seconds,
        "source": rung.source,
        "bytes": rung.bytes,
        "instead_of": rung.instead_of,
        "brought": ", ".join(f"{count} by {name}" for name, count in rung.brought.items()),
        "deal": rung.deal,
    }


def otlp(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """OTLP/JSON: one trace per operation, a root span per start, its phases as children, rungs as events."""
    spans = [span for timeline in timelines for span in _spans(timeline)]
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes({"service.name": SERVICE})},
                "scopeSpans": [{"scope": {"name": SCOPE}, "spans": spans}],
            }
        ]
    }


def _spans(timeline: Timeline) -> list[dict[str, Any]]:
    trace = trace_of(timeline)
    root = _digits(16, "start", timeline.id)
    begin, end = span_of(timeline)
    facts = {
        "relight.model": timeline.model,
        "relight.instance": timeline.instance,
        "relight.incarnation": timeline.incarnation,
        "relight.mode": str(timeline.mode),
        "relight.way": timeline.way,
        "relight.device_kind": timeline.device_kind,
        "relight.operation": timeline.operation,
        "relight.process": timeline.process,
        "relight.cache": timeline.cache.verdict if timeline.cache else "",
        "relight.fingerprint": timeline.fingerprint_digest,
        "relight.seconds": timeline.seconds,
        "relight.predicted_seconds": timeline.predicted_seconds,
        "relight.why": timeline.planned_reason,
    }
    status = {"code": _OK} if timeline.ok else {"code": _ERROR, "message": timeline.reason}
    events = [
        {"timeUnixNano": _nanos(at), "name": f"rung {rung.kind}", "attributes": _attributes(_rung_facts(rung))}
        for rung, at in rung_ends(timeline)
    ]
    spans = [_span(trace, root, "", f"start by {timeline.mode}", begin, end, facts, status, events)]
    for number, phase in enumerate(timeline.phases):
        own = _digits(16, "phase", timeline.id, str(number))
        spans.append(_phase_span(trace, own, root, phase))
    return spans


def _phase_span(trace: str, own: str, root: str, phase: Phase) -> dict[str, Any]:
    facts = {"relight.detail": phase.detail}
    return _span(trace, own, root, phase.name, phase.start, max(phase.start, phase.end), facts, {}, [])


def _span(
    trace: str,
    own: str,
    parent: str,
    name: str,
    start: float,
    end: float,
    facts: Mapping[str, Any],
    status: Mapping[str, Any],
    events: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "traceId": trace,
        "spanId": own,
        "parentSpanId": parent,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": _nanos(start),
        "endTimeUnixNano": _nanos(end),
        "attributes": _attributes(facts),
        "events": events,
        "status": dict(status),
    }


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value not in ("", None)]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}


def _digits(count: int, *parts: str) -> str:
    """Hexadecimal digits that are the same again for the same parts: a repeated export is no second trace."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:count]


def _micros(at: float) -> int:
    return round(at * 1e6)


def _nanos(at: float) -> str:
    # A double holds today's times to a quarter of a microsecond: further digits would be made up.
    return str(_micros(at) * 1000)

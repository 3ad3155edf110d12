"""Predictions from recorded starts: the median of the last good ones by model, way and device. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from relight.controller.flight.timeline import Timeline
from relight.controller.plan.prices import Measured, Predictions

KEPT = 20
"""How many starts a median looks back: few enough to follow a change of hardware within a day."""


def learn(timelines: Iterable[Timeline]) -> Predictions:
    """What the recorded starts say; starts that failed are not counted."""
    groups: dict[tuple[str, str, str], list[Timeline]] = {}
    for timeline in sorted(timelines, key=lambda t: t.ended_at):
        if timeline.ok:
            groups.setdefault((timeline.model, timeline.way, timeline.device_kind), []).append(timeline)
    return Predictions({key: _measure(found[-KEPT:]) for key, found in groups.items()})


def _measure(timelines: list[Timeline]) -> Measured:
    names = {phase.name for timeline in timelines for phase in timeline.phases if phase.detail != "gateway"}
    parts = {
        name: median(sum(p.end - p.start for p in timeline.phases if p.name == name) for timeline in timelines)
        for name in sorted(names)
    }
    return Measured(median(t.seconds for t in timelines), parts, len(timelines))

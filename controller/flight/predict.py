"""Predictions from recorded starts: medians of the last good ones by model, way and device. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relight.controller.flight.timeline import GATEWAY, Timeline
from relight.controller.plan.prices import SLEEP, Measured, Predictions

KEPT = 20
"""How many starts a median looks back: few enough to follow a change of hardware within a day."""
HALF_LIFE = 3.0
"""After how many newer starts one counts half: the first start of a machine is unlike the third."""


def learn(timelines: Iterable[Timeline]) -> Predictions:
    """What the recorded starts say; starts that failed are not counted.

    A guardian's start is a start like others and a falling asleep: each teaches what it is.
    """
    groups: dict[tuple[str, str, str], list[Timeline]] = {}
    sleeps: dict[tuple[str, str, str], list[float]] = {}
    for timeline in sorted(timelines, key=lambda t: t.ended_at):
        if timeline.ok:
            groups.setdefault((timeline.model, timeline.way, timeline.device_kind), []).append(timeline)
            if timeline.slept:
                sleeps.setdefault((timeline.model, SLEEP, timeline.device_kind), []).append(_took(timeline, SLEEP))
    found = {key: _measure(group[-KEPT:]) for key, group in groups.items()}
    for key, seconds in sleeps.items():
        after = recent_median(seconds[-KEPT:])
        found[key] = Measured(after, {SLEEP: after}, len(seconds[-KEPT:]), after)
    return Predictions(found)


def recent_median(values: Sequence[float]) -> float:
    """The median of values in the order of their age, the newest last and counting most."""
    if not values:
        raise ValueError("no value has no median")
    weighted = sorted((value, 0.5 ** ((len(values) - 1 - n) / HALF_LIFE)) for n, value in enumerate(values))
    half = sum(weight for _, weight in weighted) / 2
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= half:
            return value
    return weighted[-1][0]


def _took(timeline: Timeline, name: str) -> float:
    return sum(phase.end - phase.start for phase in timeline.phases if phase.name == name)


def _measure(timelines: list[Timeline]) -> Measured:
    names = {phase.name for timeline in timelines for phase in timeline.phases if phase.detail != GATEWAY}
    parts = {name: recent_median([_took(t, name) for t in timelines]) for name in sorted(names - {SLEEP})}
    whole = [max(0.0, t.seconds - _took(t, SLEEP)) for t in timelines]
    carried = [sum(rung.seconds for rung in t.rungs) for t in timelines]
    rates = [r.bytes / r.seconds for t in timelines for r in t.rungs if r.ok and r.bytes > 0 and r.seconds > 0]
    return Measured(
        seconds=recent_median(whole),
        parts=parts,
        count=len(timelines),
        fixed=recent_median([max(0.0, a - b) for a, b in zip(whole, carried, strict=True)]),
        rate=recent_median(rates) if rates else 0.0,
        apart=any(t.rungs for t in timelines),
    )

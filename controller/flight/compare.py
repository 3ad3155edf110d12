"""One start against the last good one like it: which phases took longer, and by how much. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from relight.controller.flight.timeline import GATEWAY, Timeline

LEAST_SECONDS = 0.05
"""What a phase must take longer to count: less is the noise of one machine's scheduler."""
LEAST_SHARE = 0.25
"""And by which share of what it took before."""


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """One phase then and now; 0 where a start did not have it."""

    name: str
    before_seconds: float
    seconds: float
    change_seconds: float
    regressed: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """A start against an earlier one of the same fingerprint, mode and way; `why` says why there is none."""

    baseline: str
    """The id of the earlier start; empty for none."""
    why: str
    before_seconds: float
    seconds: float
    regressed: bool
    phases: tuple[PhaseChange, ...] = ()


def regressed(before: float, after: float) -> bool:
    """Whether a time grew by more than noise, both absolutely and by its share."""
    return after - before > max(LEAST_SECONDS, LEAST_SHARE * before)


def compare(timeline: Timeline, others: Iterable[Timeline]) -> Comparison:
    """`timeline` against the newest of `others` that is comparable, good and earlier."""
    if not timeline.fingerprint_digest:
        return _nothing(timeline, "its engine told no fingerprint")
    like = [
        other
        for other in others
        if other.ok
        and other.id != timeline.id
        and other.ended_at <= timeline.ended_at
        and (other.model, other.fingerprint_digest, other.mode, other.way, other.device_kind, other.slept)
        == (
            timeline.model,
            timeline.fingerprint_digest,
            timeline.mode,
            timeline.way,
            timeline.device_kind,
            timeline.slept,
        )
    ]
    if not like:
        return _nothing(timeline, f"no earlier good start of this fingerprint by {timeline.mode} ({timeline.way})")
    baseline = max(like, key=lambda t: t.ended_at)
    now, then = _by_phase(timeline), _by_phase(baseline)
    phases = tuple(
        PhaseChange(
            name,
            then.get(name, 0.0),
            now.get(name, 0.0),
            now.get(name, 0.0) - then.get(name, 0.0),
            regressed(then.get(name, 0.0), now.get(name, 0.0)),
        )
        for name in dict.fromkeys([*now, *then])
    )
    slower = regressed(baseline.seconds, timeline.seconds)
    return Comparison(baseline.id, "", baseline.seconds, timeline.seconds, slower, phases)


def _nothing(timeline: Timeline, why: str) -> Comparison:
    return Comparison("", why, 0.0, timeline.seconds, False)


def _by_phase(timeline: Timeline) -> dict[str, float]:
    """Seconds of each phase, in the order of their beginnings; what a gateway saw is no part of a start."""
    found: dict[str, float] = {}
    for phase in timeline.phases:
        if phase.detail != GATEWAY:
            found[phase.name] = found.get(phase.name, 0.0) + max(0.0, phase.end - phase.start)
    return found

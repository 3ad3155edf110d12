"""Why an instance came up the way it did, and what the other modes would have cost. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from relight.controller.doctor.judge import RankedPhase, rank
from relight.controller.flight.compare import Comparison, compare
from relight.controller.flight.predict import KEPT, recent_median
from relight.controller.flight.timeline import Timeline
from relight.controller.plan.modes import ORDER
from relight.core.records import Mode, RungResult, StartCache


@dataclass(frozen=True, slots=True)
class ModeCost:
    """One mode at that placement: what was predicted before the start, and what starts by it took."""

    mode: Mode
    chosen: bool
    fits: bool | None
    """None where nobody priced it."""
    predicted_seconds: float | None
    from_measurement: bool
    """Whether the prediction rested on starts of this model, and not on a prior or on other models."""
    measured_seconds: float | None
    """Median of the good starts by it, of this model on this kind of device; the newest count most."""
    starts: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """One start in answers: which mode and why, how the process and the weights came, what else was possible."""

    start: str
    """The id of its timeline."""
    instance: str
    model: str
    operation: str
    mode: Mode
    planned_mode: Mode | None
    way: str
    ok: bool
    why: str
    """Why it was planned so; empty where the control plane did not plan it, as after an adoption."""
    outcome: str
    process: str
    cache: StartCache | None
    seconds: float
    predicted_seconds: float | None
    prediction_error: float | None
    """The share of the measured time by which the prediction was wrong."""
    rungs: tuple[RungResult, ...]
    phases: tuple[RankedPhase, ...]
    """Where its time went, the longest first, and what makes each part shorter."""
    modes: tuple[ModeCost, ...]
    comparison: Comparison


def explain(timeline: Timeline, starts: Iterable[Timeline]) -> Explanation:
    """`starts` are all that are recorded, `timeline` among them."""
    known = sorted(starts, key=lambda t: t.ended_at)
    return Explanation(
        start=timeline.id,
        instance=timeline.instance,
        model=timeline.model,
        operation=timeline.operation,
        mode=timeline.mode,
        planned_mode=timeline.planned_mode,
        way=timeline.way,
        ok=timeline.ok,
        why=timeline.planned_reason,
        outcome=timeline.reason,
        process=timeline.process,
        cache=timeline.cache,
        seconds=timeline.seconds,
        predicted_seconds=timeline.predicted_seconds,
        prediction_error=timeline.error,
        rungs=timeline.rungs,
        phases=rank(timeline),
        modes=tuple(_cost(mode, timeline, known) for mode in ORDER),
        comparison=compare(timeline, known),
    )


def newest_of_each(starts: Iterable[Timeline]) -> list[Timeline]:
    """The newest start of each instance, newest first."""
    last: dict[str, Timeline] = {}
    for timeline in sorted(starts, key=lambda t: t.ended_at):
        last[timeline.instance] = timeline
    return sorted(last.values(), key=lambda t: t.ended_at, reverse=True)


def _cost(mode: Mode, timeline: Timeline, known: list[Timeline]) -> ModeCost:
    price = next((p for p in timeline.prices if p.mode is mode), None)
    took = [
        t.seconds
        for t in known
        if t.ok
        and (t.model, t.mode, t.device_kind, t.slept) == (timeline.model, mode, timeline.device_kind, timeline.slept)
    ][-KEPT:]
    return ModeCost(
        mode=mode,
        chosen=mode is timeline.mode,
        fits=price.fits if price else None,
        predicted_seconds=price.seconds if price and price.fits else None,
        from_measurement=price.measured if price else False,
        measured_seconds=recent_median(took) if took else None,
        starts=len(took),
        reason=price.reason if price else "not priced at this placement",
    )

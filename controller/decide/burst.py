"""Guardians woken above the number while demand asks for it. Zero I/O: a total function.

It bridges the time until whoever writes the number has looked: a number that reaches a burst makes it ordinary, and
what no number reaches sleeps again. Only guardians burst: what starts otherwise comes too late to be one.
"""

from __future__ import annotations

from dataclasses import replace

from relight.controller.decide.held import highest, hold, next_end
from relight.controller.decide.load import load, replicas_for
from relight.core.records import HeldLevel, ModelView


def burst(view: ModelView, base: int, standing: int, now: float) -> tuple[HeldLevel, ...]:
    """What is held above `base`. `standing` counts replicas that are awake or on their way, and guardians asleep."""
    spec = view.spec
    most = min(spec.burst.max_replicas, spec.max_replicas)
    known = tuple(replace(level, replicas=min(level.replicas, most)) for level in view.burst)
    known = tuple(level for level in known if level.replicas > base)
    requests = load(view.demand)
    if requests is None or most <= base:
        return known
    wanted = min(replicas_for(requests, spec), most, max(standing, highest(known)))
    return hold(known, wanted if wanted > base else 0, now, spec.burst.hold_seconds)


def why(view: ModelView, levels: tuple[HeldLevel, ...]) -> str:
    """Why the number is exceeded, to be put behind the reason for the number."""
    top = highest(levels)
    requests = load(view.demand)
    if requests is None:
        return f"; the burst to {top} stays: the demand is missing, which neither raises nor lowers"
    told = f"{requests} requests for {view.spec.scaling.requests_per_replica} a replica"
    if any(level.left_at is None and level.replicas == top for level in levels):
        return f"; a burst to {top}: {told}"
    return f"; the burst to {top} is held for {view.spec.burst.hold_seconds:g} s after the demand: {told}"


def next_let_go_at(view: ModelView) -> float | None:
    """The wall time at which a burst ends by itself; None while it does not."""
    if load(view.demand) is None:
        return None
    return next_end(view.burst, view.spec.burst.hold_seconds)

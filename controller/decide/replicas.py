"""How many replicas and guardians each model shall have, and why. Zero I/O: core only, a total function.

Whatever stands in a snapshot (NaN, infinity, negative, absent, huge), the decision lies between 0 and
the model's `max_replicas`, and data that is missing never scales anything down.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from relight.controller.decide.burst import burst, next_let_go_at, why
from relight.controller.decide.held import highest
from relight.core.records import Decision, Demand, Desired, ModelView, Snapshot
from relight.core.states import State


def decide(snapshot: Snapshot) -> tuple[Decision, ...]:
    """One decision per model, in the order of the model keys."""
    wanted = _assigned(snapshot)
    asleep = Counter(
        i.model
        for i in snapshot.instances
        if i.desired is Desired.DORMANT and i.state is State.DORMANT and i.failure is None and not i.remembered
    )
    return tuple(
        _decide(
            view,
            snapshot,
            awake=wanted.get((view.spec.key, Desired.READY), 0),
            dormant=wanted.get((view.spec.key, Desired.DORMANT), 0),
            asleep=asleep[view.spec.key],
        )
        for view in sorted(snapshot.models, key=lambda m: m.spec.key)
    )


def next_change_at(snapshot: Snapshot) -> float | None:
    """The wall time at which time alone may change a decision; None when it cannot."""
    times = [next_idle_at(snapshot), *(next_let_go_at(view) for view in snapshot.models)]
    return min((t for t in times if t is not None and t > snapshot.now), default=None)


def next_idle_at(snapshot: Snapshot) -> float | None:
    """The wall time at which idleness alone may change a decision; None when it cannot."""
    times = []
    for view in snapshot.models:
        seconds = view.spec.scale_to_zero.idle_seconds
        if seconds is None or view.demand is None or view.idled_at is not None:
            continue
        if view.spec.replicas > 0 or view.activated_at is not None:
            at = _active_until(view, view.demand, seconds)
            if math.isfinite(at) and at > snapshot.now:
                times.append(at)
    return min(times, default=None)


def _assigned(snapshot: Snapshot) -> Mapping[tuple[str, Desired], int]:
    counts: dict[tuple[str, Desired], int] = {}
    for instance in snapshot.instances:
        if not instance.remembered:
            key = (instance.model, instance.desired)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _number(value: float | None) -> float:
    """A time as a finite number; what is absent or not a number lies at the beginning of time."""
    return value if value is not None and math.isfinite(value) else 0.0


def _active_until(view: ModelView, demand: Demand, idle_seconds: float) -> float:
    last = max(_number(demand.last_request_at), _number(view.changed_at), _number(view.activated_at))
    # An idle time that is no number never comes.
    return last + idle_seconds if idle_seconds >= 0 else math.inf


def _busy(demand: Demand) -> bool:
    return demand.held > 0 or demand.in_flight > 0


def idle(view: ModelView, demand: Demand, now: float) -> bool:
    """Whether nobody has asked for so long that the last replica may go."""
    seconds = view.spec.scale_to_zero.idle_seconds
    if view.spec.min_replicas > 0:
        return False
    return seconds is not None and not _busy(demand) and _active_until(view, demand, seconds) <= now


def _decide(view: ModelView, snapshot: Snapshot, awake: int, dormant: int, asleep: int) -> Decision:
    spec, demand = view.spec, view.demand
    most = max(0, spec.max_replicas)
    # The maximum wins over a minimum above it: it is what an owner pays for.
    written = min(max(0, spec.min_replicas, spec.replicas), most)
    replicas, reason = written, f"{written} is the written number"
    floor = 0
    if written != spec.replicas:
        reason = f"{spec.replicas} is the written number, bounded to {written}"
    if written == 0:
        floor, reason = _floor(view, snapshot.now, reason)
        replicas = min(floor, most)
    elif demand is None:
        if view.idled_at is not None:
            replicas, reason = 0, "idle at zero; the demand is missing, so it stays as it is"
        elif spec.scale_to_zero.idle_seconds is not None:
            reason += "; the demand is missing, which never scales down"
    elif idle(view, demand, snapshot.now):
        replicas = 0
        reason = f"no request for {spec.scale_to_zero.idle_seconds:g} s, the idle time to zero"
    guardians = max(0, spec.guardians.replicas)
    levels = burst(view, replicas, awake + asleep, snapshot.now)
    if levels:
        replicas, reason = highest(levels), reason + why(view, levels)
    if not snapshot.synced:
        if awake > replicas:
            replicas, reason = awake, f"held at {awake}: not every slot was heard of yet"
        guardians = max(guardians, dormant)
    return Decision(spec.key, replicas, guardians, reason, floor, levels)


def _floor(view: ModelView, now: float, reason: str) -> tuple[int, str]:
    """The activation floor of a model whose written number is 0."""
    demand = view.demand
    if demand is None:
        if view.activated_at is not None:
            return 1, "held at the activation floor: the demand is missing, which never scales down"
        return 0, reason
    if demand.held > 0:
        return 1, f"raised to 1 by {demand.held} held requests"
    if view.activated_at is not None and not idle(view, demand, now):
        return 1, "kept at 1 by the requests since it was activated"
    return 0, reason

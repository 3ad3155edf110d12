"""The built-in autoscaler's rules: from load and replicas to a number. Zero I/O: a total function.

Up at once: the number is what the load asks for, and replicas on their way count for it, so that one load is answered
once. One that is overdue does not count, and another is asked for in its stead: once, however late it is. Down slowly:
to the highest number that was asked for within the window. Data that are missing hold the number, and the window begins
anew after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from relight.controller.decide.held import highest, hold, next_end
from relight.controller.decide.load import load, replicas_for
from relight.core.records import Demand, HeldLevel, ModelSpec

OVERDUE_SECONDS = 10.0
"""How much later than expected a replica may be and still count: predictions are no promises."""


class Action(StrEnum):
    """What became of a look."""

    UP = "up"
    DOWN = "down"
    HOLD = "hold"
    """The number stays although the load asks for another, or nobody knows what it asks for."""
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Look:
    """All that the rules look at. `coming` holds the seconds until each is expected, negative when overdue."""

    now: float
    demand: Demand | None
    ready: int
    coming: tuple[float | None, ...] = ()
    idle: bool = False
    """No request for the model's idle time: it may go to zero."""
    synced: bool = True
    """Every slot was heard of: what is not seen is not there."""

    @property
    def overdue(self) -> int:
        """How many of those on their way do not count."""
        return sum(seconds is not None and not seconds >= -OVERDUE_SECONDS for seconds in self.coming)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a look leaves for the next. The first one remembers nothing."""

    levels: tuple[HeldLevel, ...] = ()
    number: int | None = None
    """The written number as it was left; another one was written by somebody else."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number to be written, and why. `target` is what the load asks for now; None while it is not known."""

    number: int
    target: int | None
    action: Action
    reason: str
    memory: Memory
    look_again_at: float | None = None
    """When time alone may change it (wall)."""


def judge(spec: ModelSpec, look: Look, memory: Memory) -> Verdict:
    """The number for the model of `spec`, whose written number is `spec.replicas`."""
    most = max(0, spec.max_replicas)
    written = spec.replicas
    least = min(max(0, spec.min_replicas), most)
    bounded = min(max(written, least), most)
    requests = load(look.demand)
    if requests is None or not look.synced or not math.isfinite(look.now):
        told = "the demand is missing" if requests is None else "not every slot was heard of yet"
        # A bound is no matter of demand.
        return Verdict(bounded, None, _action(written, bounded, held=True), f"held at {bounded}: {told}", Memory())
    floor = _floor(spec, look, least, most)
    needed = replicas_for(requests, spec)
    stead = min(look.overdue, max(0, needed - max(0, look.ready)))
    target = min(max(needed + stead, floor), most)
    levels = memory.levels
    if memory.number != written:
        # Somebody's number, or that of a controller before: it stands for a window, as if just asked for.
        levels = (HeldLevel(bounded, look.now),) if bounded > 0 else ()
    # Idleness has waited for its own time already.
    levels = () if look.idle and target == 0 else hold(levels, target, look.now, spec.autoscaler.window_seconds)
    number = min(max(highest(levels), target), most)
    told = f"{requests} requests, {spec.scaling.requests_per_replica} a replica, ask for {needed}"
    if stead:
        told += f", and {stead} in the stead of those overdue"
    if target != needed + stead:
        told += f", bounded to {target}"
    if number > target:
        told += f"; held at {number}, asked for within {spec.autoscaler.window_seconds:g} s"
    ends = [next_end(levels, spec.autoscaler.window_seconds), _next_late(look)]
    again = min((end for end in ends if end is not None), default=None)
    action = _action(written, number, held=number != target)
    return Verdict(number, target, action, told, Memory(levels, number), again)


def _floor(spec: ModelSpec, look: Look, least: int, most: int) -> int:
    """Below this no load lets the number go: the last replica goes by idleness alone."""
    if least > 0 or spec.replicas <= 0 or look.idle:
        return least
    return min(1, most)


def _next_late(look: Look) -> float | None:
    ends = [look.now + s + OVERDUE_SECONDS for s in look.coming if s is not None and s >= -OVERDUE_SECONDS]
    return min((end for end in ends if math.isfinite(end) and end > look.now), default=None)


def _action(written: int, number: int, *, held: bool) -> Action:
    if number > written:
        return Action.UP
    if number < written:
        return Action.DOWN
    return Action.HOLD if held else Action.STEADY

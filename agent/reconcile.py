"""What an agent must do next: (assignment, local states, busy devices) -> actions. Pure: zero I/O.

Level-triggered: it is asked again after every change, so it only ever returns the next step of each
instance. One transition at a time per device parent: what must wait is returned with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from relight.core.errors import Fenced
from relight.core.records import Assignment, Desired, InstanceAssignment
from relight.core.states import IN_TRANSITION, State


class Kind(StrEnum):
    """What to do with one instance."""

    DRAIN = "drain"
    UNDRAIN = "undrain"
    FORGET = "forget"
    STOP = "stop"
    SLEEP = "sleep"
    WAKE = "wake"
    START = "start"


INSTANT = frozenset({Kind.DRAIN, Kind.UNDRAIN, Kind.FORGET})
"""These only change what is said of an instance; they need no device."""


@dataclass(frozen=True, slots=True)
class Local:
    """One instance as it stands here. `running`: the transition of it that is under way in this process.

    (epoch, revision) is that of the newest assignment which named it. `retry_at` (seconds since the epoch)
    holds back a step that failed without changing the state.
    """

    instance: str
    state: State
    parents: tuple[str, ...]
    epoch: int
    revision: int
    running: Kind | None = None
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Action:
    """One step, and why."""

    kind: Kind
    instance: str
    cause: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that is wanted and cannot be taken now."""

    kind: Kind
    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class Steps:
    """All that may be done at once, what waits, and when to ask again (seconds since the epoch)."""

    actions: tuple[Action, ...]
    waiting: tuple[Waiting, ...] = ()
    again_at: float | None = None


def admit(incoming: Assignment, epoch: int, current: Assignment | None) -> bool:
    """Whether `incoming` replaces `current`. Raises Fenced for an epoch below the highest seen.

    At one epoch the revision decides: a store that was emptied or went back in time stops nothing.
    """
    if incoming.epoch < epoch:
        raise Fenced(f"assignment of epoch {incoming.epoch}, but epoch {epoch} was seen: its sender must stop")
    if current is None or incoming.epoch > current.epoch:
        return True
    return incoming.revision > current.revision


def reconcile(
    assignment: Assignment | None,
    local: Sequence[Local],
    busy: Collection[str],
    parents: Mapping[str, str],
    now: float,
) -> Steps:
    """The next steps. `busy` are device parents in transition; `parents` maps device ids to theirs."""
    if assignment is None:
        return Steps(())
    wanted = {a.instance: a for a in assignment.instances}
    here = {i.instance: i for i in local}
    proposals: list[_Proposal] = []
    again: list[float] = []
    for found in local:
        want = wanted.get(found.instance)
        if want is None and (found.epoch, found.revision) >= (assignment.epoch, assignment.revision):
            continue
        kind = _next(found, want)
        if kind is None:
            continue
        if found.retry_at > now:
            again.append(found.retry_at)
            continue
        cause = want.cause if want else f"not in assignment {assignment.epoch}.{assignment.revision}"
        # A stop that cuts a start short takes over the device that this start holds.
        proposals.append((Action(kind, found.instance, cause or kind), found.parents, found.running is not None))
    for want in assignment.instances:
        if want.instance not in here and want.desired in (Desired.READY, Desired.DORMANT):
            owners = tuple(sorted({parents.get(d, d) for d in want.devices}))
            proposals.append((Action(Kind.START, want.instance, want.cause or Kind.START), owners, False))
    return _one_per_device(proposals, set(busy), min(again, default=None))


def _next(found: Local, want: InstanceAssignment | None) -> Kind | None:
    desired = want.desired if want else Desired.GONE
    state = found.state
    if found.running is not None:
        # A start may take minutes: it is cut short when it is no longer wanted.
        if found.running is Kind.START and desired is Desired.GONE:
            return Kind.STOP
        # Draining only waits: nothing was taken from the engine yet.
        return Kind.UNDRAIN if state is State.DRAINING and desired is Desired.READY else None
    if state in IN_TRANSITION - {State.DRAINING}:
        return _RESUME[state] if desired is not Desired.GONE or state is not State.STARTING else Kind.STOP
    return _TABLE[desired].get(state) if want is not None or state is not State.GONE else Kind.FORGET


_RESUME = {
    State.STARTING: Kind.START,
    State.WAKING: Kind.WAKE,
    State.SLEEPING: Kind.SLEEP,
    State.STOPPING: Kind.STOP,
}
"""A transition whose agent died is taken up again."""

_TABLE: Mapping[Desired, Mapping[State, Kind]] = {
    Desired.READY: {State.NONE: Kind.START, State.DORMANT: Kind.WAKE, State.DRAINING: Kind.UNDRAIN},
    Desired.DRAINED: {State.READY: Kind.DRAIN},
    Desired.DORMANT: {State.NONE: Kind.START, State.READY: Kind.DRAIN, State.DRAINING: Kind.SLEEP},
    Desired.GONE: {
        State.NONE: Kind.STOP,
        State.READY: Kind.DRAIN,
        State.DRAINING: Kind.STOP,
        State.DORMANT: Kind.STOP,
        State.FAILED: Kind.STOP,
    },
}

_FREES_FIRST = (Kind.DRAIN, Kind.UNDRAIN, Kind.FORGET, Kind.STOP, Kind.SLEEP, Kind.WAKE, Kind.START)


_Proposal = tuple[Action, tuple[str, ...], bool]


def _one_per_device(proposals: Sequence[_Proposal], busy: set[str], again_at: float | None) -> Steps:
    actions, waiting = [], []
    taken: dict[str, str] = {}
    # What frees a device goes before what needs one.
    for action, owners, takes_over in sorted(proposals, key=lambda p: (_FREES_FIRST.index(p[0].kind), p[0].instance)):
        if action.kind not in INSTANT:
            blocked = [o for o in owners if o in busy and not takes_over]
            earlier = [o for o in owners if o in taken]
            if blocked or earlier:
                why = f"device {blocked[0]} is in transition" if blocked else f"{taken[earlier[0]]} goes first"
                waiting.append(Waiting(action.kind, action.instance, why))
                continue
            taken.update(dict.fromkeys(owners, action.instance))
        actions.append(action)
    return Steps(tuple(actions), tuple(waiting), again_at)

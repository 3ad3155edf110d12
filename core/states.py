"""The instance state table: states, the edges between them, and the group state of several members. No I/O.

Drawn and explained in docs/states/instance.md. An edge outside the table raises with the instance's story.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from relight.core.errors import InvariantViolated


class State(StrEnum):
    """Where one instance (or one member of it) stands."""

    NONE = "none"
    """Assigned, and nothing done yet."""
    STARTING = "starting"
    """An engine process exists and is not yet proven."""
    DORMANT = "dormant"
    """A guardian: device context kept, weights and KV cache released, memory measured."""
    WAKING = "waking"
    """Pages, weights and KV cache are coming back; nothing answers yet."""
    READY = "ready"
    """Awake with every tag, healthy, weights and canary proven in this incarnation. Only this is routable."""
    DRAINING = "draining"
    """Un-routed; requests that it already has are finishing."""
    SLEEPING = "sleeping"
    """Drained; memory is being released and measured."""
    STOPPING = "stopping"
    """Its process tree is being ended."""
    GONE = "gone"
    """No process, no memory: terminal."""
    FAILED = "failed"
    """The last allowed rung is spent; `Failure` says why and whether to retry."""


EDGES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.NONE, State.STARTING),
        (State.STARTING, State.DORMANT),
        (State.STARTING, State.READY),
        (State.DORMANT, State.WAKING),
        (State.WAKING, State.READY),
        # A wake that fails on its last rung may be put back to sleep: its memory is given back.
        (State.WAKING, State.SLEEPING),
        (State.READY, State.DRAINING),
        # A newer assignment may want a draining replica back before it slept.
        (State.DRAINING, State.READY),
        (State.DRAINING, State.SLEEPING),
        (State.DRAINING, State.STOPPING),
        (State.SLEEPING, State.DORMANT),
        (State.DORMANT, State.STOPPING),
        (State.STARTING, State.STOPPING),
        (State.FAILED, State.STOPPING),
        (State.STOPPING, State.GONE),
        (State.NONE, State.GONE),
        *((state, State.FAILED) for state in State if state not in (State.FAILED, State.GONE)),
    }
)

IN_TRANSITION = frozenset({State.STARTING, State.WAKING, State.DRAINING, State.SLEEPING, State.STOPPING})
COMING = frozenset({State.NONE, State.STARTING, State.WAKING})


@dataclass(frozen=True, slots=True)
class Step:
    """One edge taken: from, to, why, and when (seconds since the epoch)."""

    before: State
    after: State
    cause: str
    at: float


def check_edge(before: State, after: State, story: Sequence[Step] = ()) -> None:
    """Raises InvariantViolated, with the instance's story, when the table has no such edge."""
    if (before, after) not in EDGES:
        told = "; ".join(f"{s.before}->{s.after} ({s.cause})" for s in story[-8:]) or "no earlier step"
        raise InvariantViolated(f"no edge {before} -> {after} in the instance table; story: {told}")


# From least to most advanced towards serving: a group is only as far as its last member.
_RANK = (
    State.FAILED,
    State.GONE,
    State.STOPPING,
    State.SLEEPING,
    State.DRAINING,
    State.NONE,
    State.STARTING,
    State.DORMANT,
    State.WAKING,
    State.READY,
)


def group_state(members: Iterable[State], expected: int) -> State:
    """The state of an instance made of `expected` members: ready only when every member is.

    A missing member counts as NONE; any failed member fails the group; GONE only when all are.
    """
    states = list(members)
    states += [State.NONE] * (expected - len(states))
    if not states:
        return State.NONE
    if State.FAILED in states:
        return State.FAILED
    if State.GONE in states and any(s is not State.GONE for s in states):
        return State.STOPPING
    return min(states, key=_RANK.index)

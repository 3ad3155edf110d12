"""Named failpoints: places where a test makes a failure happen that cannot be had otherwise.

`RELIGHT_FAILPOINTS="name=action;name=action"` arms them at process start, or in a fork; nothing else can. Actions:

    error           raise FailpointHit
    exit            end the process at once, as kill -9 would (no clean-up runs)
    corrupt         flip one bit of the buffer that the place hands over
    stop            SIGSTOP the own process
    N*action        the action on the Nth pass only (1-based), e.g. `3*exit`
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from relight.core.errors import InvalidInput, RelightError

KNOWN = {
    "controller.accept.after-operation": "the operation is stored, the reconcile has not run",
    "controller.apply.before-assignment": "the plan is made, no assignment is stored",
    "controller.apply.after-assignment": "an assignment is stored, no agent has heard of it",
    "agent.apply.after-journal": "the intent is journalled, nothing was started",
    "agent.wake.before-pull": "the rung is chosen, no byte was read",
    "agent.wake.after-proof": "the wake is proven, nobody was told",
    "cache.store.before-rename": "a bundle has arrived and is proven, and is not in its place yet",
    "cache.install.before-rename": "a bundle is staged and proven, and is not in its place yet",
    "transfer.receive": "bytes have arrived and are not verified yet",
    "transfer.source.serve": "the source is about to serve one read",
}
ACTIONS = ("error", "exit", "corrupt", "stop")
VARIABLE = "RELIGHT_FAILPOINTS"


class FailpointHit(RelightError):
    """An armed failpoint with the action `error` was passed."""

    code = "failpoint"


@dataclass(slots=True)
class _Armed:
    action: str
    on_pass: int | None
    passes: Iterator[int] = field(default_factory=lambda: count(1))
    """Taken by several threads: each pass gets a number of its own."""


def parse(text: str) -> dict[str, _Armed]:
    """The armed failpoints of a setting. Raises InvalidInput on an unknown name or action."""
    armed: dict[str, _Armed] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, _, action = part.partition("=")
        nth: int | None = None
        if "*" in action:
            times, _, action = action.partition("*")
            if not times.isdigit() or int(times) < 1:
                raise InvalidInput(f"{VARIABLE}: in {part!r} expected a count of at least 1 before '*'")
            nth = int(times)
        if name not in KNOWN:
            raise InvalidInput(f"{VARIABLE}: unknown failpoint {name!r}; known: {', '.join(sorted(KNOWN))}")
        if action not in ACTIONS:
            raise InvalidInput(f"{VARIABLE}: unknown action {action!r}; known: {', '.join(ACTIONS)}")
        armed[name] = _Armed(action, nth)
    return armed


_armed = parse(os.environ.get(VARIABLE, ""))


def arm(text: str) -> None:
    """Arms `text` instead: for a process that was forked after its parent had read its own setting.

    Raises InvalidInput as `parse` does.
    """
    global _armed
    _armed = parse(text)


def hit(name: str, buffer: memoryview | None = None) -> bool:
    """Passes the failpoint `name`; does nothing unless it is armed. `buffer` is what `corrupt` alters.

    Returns whether it did something.
    """
    if not _armed:
        return False
    point = _armed.get(name)
    if point is None:
        return False
    if next(point.passes) != point.on_pass and point.on_pass is not None:
        return False
    if point.action == "exit":
        os._exit(137)
    if point.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif point.action == "corrupt" and buffer is not None and len(buffer):
        middle = len(buffer) // 2
        buffer[middle] ^= 0x10
    elif point.action == "error":
        raise FailpointHit(f"failpoint {name}")
    return True

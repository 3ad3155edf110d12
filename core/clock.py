"""Time, injected: wall time for records, monotonic time for durations. Lint bans both elsewhere."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings that must not be mixed: `now` may jump, `monotonic` never does."""

    def now(self) -> float:
        """Seconds since the Unix epoch: for records that people and other hosts read."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start: for durations and deadlines inside one process."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until a test advances it; both readings move together."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Moves both readings forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock only moves forward, got {seconds} s")
        self._now += seconds
        self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        """Moves the wall clock alone, as an administrator or NTP step does."""
        self._now += seconds

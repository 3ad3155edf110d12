"""How fast bytes may leave a source, so that receivers do not starve the replica that serves from the same memory."""

from __future__ import annotations

import threading

from relight.core.clock import Clock
from relight.core.errors import InvalidInput

BURST_SECONDS = 0.01
"""What may go at once after a pause, in seconds' worth: more would be a burst that a serving replica feels."""


class Pace:
    """A bound on bytes per second over all who share it. Thread-safe."""

    def __init__(self, bytes_per_second: float | None, clock: Clock) -> None:
        """None: no bound. Raises InvalidInput unless the bound is above 0."""
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise InvalidInput(f"expected a bound above 0 bytes per second, got {bytes_per_second}")
        self._rate, self._clock = bytes_per_second, clock
        self._lock = threading.Lock()
        self._free_at = clock.monotonic()
        self._never = threading.Event()

    def delay(self, count: int) -> float:
        """Books `count` bytes; returns the seconds to wait before they may go. In the order of the calls."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock.monotonic()
            begin = max(self._free_at, now - BURST_SECONDS)
            self._free_at = begin + count / self._rate
            return max(begin - now, 0.0)

    def step(self, length: int) -> int:
        """The most bytes to send at once: small enough that readers share the pace evenly."""
        if self._rate is None:
            return length
        return min(length, max(int(self._rate * BURST_SECONDS), 1 << 16))

    def wait(self, count: int) -> None:
        """Returns when `count` bytes may go."""
        seconds = self.delay(count)
        if seconds > 0:
            self._never.wait(seconds)

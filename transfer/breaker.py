"""Which sources have failed lately and are left alone for a while. Pure but for the injected clock."""

from __future__ import annotations

from dataclasses import dataclass

from relight.core.clock import Clock

FAILURES = 2
"""Failures in a row after which a source rests: one may be an accident on the way."""
REST_SECONDS = 30.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    until: float = 0.0


class Breaker:
    """Remembers sources over refills. After its rest a source gets one try; another failure, and it rests again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def rests(self, source: str) -> float:
        """Seconds for which `source` is still left alone; 0 when it may be asked."""
        record = self._records.get(source)
        return max(record.until - self._clock.monotonic(), 0.0) if record else 0.0

    def failed(self, source: str) -> None:
        record = self._records.setdefault(source, _Record())
        record.failures += 1
        if record.failures >= FAILURES:
            record.until = self._clock.monotonic() + REST_SECONDS

    def succeeded(self, source: str) -> None:
        self._records.pop(source, None)

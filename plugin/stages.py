"""Where an engine's own start time goes, on its own clock, for the start's record."""

from __future__ import annotations

from relight.core.clock import Clock
from relight.core.records import Phase


class Stages:
    """Stretches that follow each other from now on; one without a name is somebody else's to tell."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._edge = clock, clock.now()
        self.phases: list[Phase] = []

    def end(self, name: str, detail: str) -> None:
        """A stretch from the last edge to now."""
        now = self._clock.now()
        if name:
            self.phases.append(Phase(name, self._edge, now, detail))
        self._edge = now

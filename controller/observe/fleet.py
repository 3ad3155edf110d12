"""What agents report: the newest report of every slot, and which slots are alive. In memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from relight.core.clock import Clock
from relight.core.logs import get_logger
from relight.core.records import SlotReport

log = get_logger("controller.fleet")


@dataclass(frozen=True, slots=True)
class SlotSeen:
    """A slot's newest report and the session it came by; `left_at` (monotonic) once that session ended."""

    report: SlotReport
    session: int
    left_at: float | None = None


class Fleet:
    """The reports of all slots. A slot whose agent went away stays alive for the grace time."""

    def __init__(self, clock: Clock, grace_seconds: float, changed: Callable[[], None]) -> None:
        self._clock, self._grace, self._changed = clock, grace_seconds, changed
        self._seen: dict[str, SlotSeen] = {}
        self._awaited: dict[str, float] = {}
        self._sessions = 0

    @property
    def seen(self) -> Mapping[str, SlotSeen]:
        """By slot."""
        return self._seen

    def expect(self, slots: Iterable[str]) -> None:
        """Slots that the store knows: until each attached or missed its grace time, nothing is synced."""
        until = self._clock.monotonic() + self._grace
        self._awaited.update({slot: until for slot in slots if slot not in self._seen})

    @property
    def awaited(self) -> frozenset[str]:
        """The slots that are expected and were not heard of yet, nor missed their grace time."""
        return frozenset(slot for slot in self._awaited if self.awaits(slot))

    def awaits(self, slot: str) -> bool:
        """Whether the slot is expected and was not heard of yet: nothing may be concluded of what runs there."""
        return self._awaited.get(slot, 0.0) > self._clock.monotonic()

    def new_session(self) -> int:
        """A number for one attached stream; of two streams of a slot, the higher one counts."""
        self._sessions += 1
        return self._sessions

    def report(self, report: SlotReport, session: int) -> bool:
        """Takes a report in; False when a newer one, or a newer session, of the slot is known already."""
        known = self._seen.get(report.slot)
        if known is not None:
            if session < known.session:
                return False
            same_agent = known.report.agent == report.agent
            if session == known.session and same_agent and report.sequence <= known.report.sequence:
                return False
        self._awaited.pop(report.slot, None)
        self._seen[report.slot] = SlotSeen(report, session)
        self._changed()
        return True

    def detach(self, slot: str, session: int) -> None:
        """The stream ended: from now on the grace time runs."""
        known = self._seen.get(slot)
        if known is not None and known.session == session:
            self._seen[slot] = replace(known, left_at=self._clock.monotonic())
            log.warning("slot.detached", slot=slot, grace_seconds=self._grace)
            self._changed()

    def alive(self, slot: str) -> bool:
        """Attached, or within the grace time since it was, or since this controller started."""
        now = self._clock.monotonic()
        known = self._seen.get(slot)
        if known is None:
            return self._awaited.get(slot, now) > now
        return known.left_at is None or known.left_at + self._grace > now

    def synced(self) -> bool:
        """Whether every expected slot was heard of or missed its grace time."""
        return not self.awaited

    def next_grace_in(self) -> float | None:
        """Seconds until the next grace time ends; None when none runs."""
        now = self._clock.monotonic()
        ends = [s.left_at + self._grace for s in self._seen.values() if s.left_at is not None]
        ends += self._awaited.values()
        return min((end - now for end in ends if end > now), default=None)

"""What gateways report: demand per model, open requests per instance, and which route table they act on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from relight.core.clock import Clock
from relight.core.records import Demand, GatewayReport, GatewaySpan


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    """A gateway's newest report. `since` is the wall time it attached at: it knows nothing of before."""

    report: GatewayReport
    session: int
    since: float
    left_at: float | None = None
    """Monotonic; None while attached."""


class Gateways:
    """The reports of all gateways. One that vanished counts for `grace_seconds` more, then not at all."""

    def __init__(
        self,
        clock: Clock,
        grace_seconds: float,
        changed: Callable[[], None],
        spanned: Callable[[GatewaySpan], None],
    ) -> None:
        self._clock, self._grace, self._changed, self._spanned = clock, grace_seconds, changed, spanned
        self._seen: dict[str, GatewaySeen] = {}
        self._sessions = 0
        self._started = clock.monotonic()

    @property
    def seen(self) -> Mapping[str, GatewaySeen]:
        """By gateway."""
        return self._seen

    def new_session(self) -> int:
        """A number for one attached stream; of two streams of a gateway, the higher one counts."""
        self._sessions += 1
        return self._sessions

    def report(self, report: GatewayReport, session: int) -> None:
        """Takes a report in, unless a newer session of the same gateway spoke already."""
        known = self._seen.get(report.gateway)
        if known is not None and session < known.session:
            return
        since = known.since if known is not None and known.session == session else self._clock.now()
        self._seen[report.gateway] = GatewaySeen(report, session, since)
        for span in report.spans:
            self._spanned(span)
        self._changed()

    def detach(self, gateway: str, session: int) -> None:
        """The stream ended: from now on the grace time runs."""
        known = self._seen.get(gateway)
        if known is not None and known.session == session:
            self._seen[gateway] = replace(known, left_at=self._clock.monotonic())
            self._changed()

    def next_grace_in(self) -> float | None:
        """Seconds until the next grace time ends; None when none runs."""
        now = self._clock.monotonic()
        ends = [s.left_at + self._grace for s in self._seen.values() if s.left_at is not None]
        ends.append(self._started + self._grace)
        return min((end - now for end in ends if end > now), default=None)

    def _counting(self) -> list[GatewaySeen]:
        now = self._clock.monotonic()
        gone = [
            name for name, seen in self._seen.items() if seen.left_at is not None and seen.left_at + self._grace <= now
        ]
        for name in gone:
            del self._seen[name]
        return list(self._seen.values())

    def demand(self, model: str) -> Demand | None:
        """The demand of one model over all gateways; None when no gateway could know it."""
        gateways = self._counting()
        if not gateways:
            return None
        held, oldest, in_flight = 0, 0.0, 0
        last = max(seen.since for seen in gateways)
        for seen in gateways:
            for found in seen.report.models:
                if f"{found.namespace}/{found.name}" == model:
                    held += max(0, found.held)
                    oldest = max(oldest, found.oldest_held_seconds)
                    in_flight += max(0, found.in_flight)
                    if math.isfinite(found.last_request_at):
                        last = max(last, found.last_request_at)
        return Demand(held, oldest, in_flight, last)

    def in_flight(self, instance: str) -> int:
        """Open requests of one instance, whatever its incarnation, over all gateways."""
        return sum(
            max(0, found.in_flight)
            for seen in self._counting()
            for found in seen.report.instances
            if found.instance == instance
        )

    def released(self, instance: str, removed_at: int) -> bool:
        """Whether every gateway routes by a table of revision `removed_at` or later and has nothing open.

        Shortly after this controller's own start, gateways may still be on their way back: nobody is
        released before one has attached or the grace time has passed.
        """
        gateways = self._counting()
        if not gateways:
            return self._clock.monotonic() >= self._started + self._grace
        return self.in_flight(instance) == 0 and all(seen.report.route_revision >= removed_at for seen in gateways)

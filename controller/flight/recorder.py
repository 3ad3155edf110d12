"""Keeps the flight records: one timeline per start, and the expectations that they confirm or correct."""

from __future__ import annotations

from dataclasses import replace

from relight.controller.flight.predict import learn
from relight.controller.flight.timeline import Timeline, assemble, with_span
from relight.controller.plan.prices import Predictions
from relight.controller.state.base import Write
from relight.controller.state.catalog import Catalog, drop, put
from relight.core.clock import Clock
from relight.core.records import GatewaySpan, InstanceView, Snapshot

KEPT_TIMELINES = 500
_PENDING_SPANS = 256


class Recorder:
    """Turns what agents and gateways measured into stored timelines."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock
        self._spans: dict[tuple[str, int, str], GatewaySpan] = {}
        self._recorded: set[str] = set()
        self._learnt: Predictions | None = None
        catalog.listen(self._changed)

    def _changed(self, keys: frozenset[str]) -> None:
        if any(key.startswith("starts/") for key in keys):
            self._learnt = None

    @property
    def predictions(self) -> Predictions:
        """What the recorded starts teach; learnt anew only after another was recorded."""
        if self._learnt is None:
            self._learnt = learn(v.record for v in self._catalog.starts.values())
        return self._learnt

    def expected_in(self, instance: str) -> float | None:
        """Seconds until an instance is expected to be ready, 0 when overdue; None when nothing is known."""
        stored = self._catalog.expected.get(instance)
        if stored is None:
            return None
        return max(0.0, stored.record.placed_at + stored.record.seconds - self._clock.now())

    def span(self, span: GatewaySpan) -> None:
        """Takes in what a gateway saw; it is stored with the timeline that it belongs to."""
        while len(self._spans) >= _PENDING_SPANS:
            self._spans.pop(next(iter(self._spans)))
        self._spans[span.instance, span.incarnation, span.name] = span

    def writes(self, snapshot: Snapshot) -> tuple[list[Write], list[Timeline]]:
        """The writes that bring the stored timelines up to date, and the timelines seen for the first time."""
        touched: dict[str, Timeline] = {}
        fresh = []
        kinds = {(s.slot, d.id): d.kind for s in snapshot.slots for d in s.devices}
        # A start that is no longer reported cannot come again: only the present ones are kept in mind.
        reported = [t for i in snapshot.instances if (t := self._timeline(i, kinds)) is not None]
        for timeline in reported:
            stored = self._catalog.starts.get(timeline.id)
            if stored is None and timeline.id not in self._recorded:
                touched[timeline.id] = timeline
                fresh.append(timeline)
            elif stored is not None and timeline.cache not in (None, stored.record.cache):
                # Agents tell of a start once it has ended, and what became of its compile cache later.
                touched[timeline.id] = replace(stored.record, cache=timeline.cache)
        self._recorded = {timeline.id for timeline in reported}
        present = {i.instance for i in snapshot.instances}
        by_start = {(t.instance, t.incarnation): t for v in self._catalog.starts.values() if (t := v.record)}
        by_start.update({(t.instance, t.incarnation): t for t in touched.values()})
        for key, span in list(self._spans.items()):
            known = by_start.get(key[:2])
            if known is not None:
                del self._spans[key]
                updated = with_span(touched.get(known.id, known), span)
                if updated != known:
                    touched[known.id] = updated
        found = [put("starts", timeline.id, timeline) for timeline in touched.values()]
        surplus = len(self._catalog.starts) + len(fresh) - KEPT_TIMELINES
        if fresh and surplus > 0:
            found += [drop("starts", name) for name in sorted(self._catalog.starts)[:surplus]]
        found += [drop("expected", name) for name in self._catalog.expected if name not in present]
        return found, fresh

    def _timeline(self, instance: InstanceView, kinds: dict[tuple[str, str], str]) -> Timeline | None:
        if instance.remembered or not instance.members:
            return None
        member = instance.members[0]
        record = member.report.start if member.report else None
        if record is None:
            return None
        stored = self._catalog.operations.get(record.operation)
        expected = self._catalog.expected.get(instance.instance)
        return assemble(
            record,
            stored.record if stored else None,
            device_kind=kinds.get((member.slot, member.devices[0]), "") if member.devices else "",
            expectation=expected.record if expected else None,
            fingerprint=member.report.fingerprint if member.report else None,
        )

"""Which slot keeps a copy of which model's weights in host memory. Zero I/O: core only.

As many as the model asks for, where a budget has room and a source can be read; what is there stays where it is, as
long as it is of the current revision and fits the engines that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.controller.plan.fleet import closed_to, runtime_digest
from relight.controller.plan.sources import Sources
from relight.core.hosting import copy_name, room_for
from relight.core.records import (
    HostCopyReport,
    HostState,
    HostTier,
    HostWanted,
    ModelSpec,
    ModelView,
    Prefetch,
    SlotView,
    Snapshot,
)
from relight.core.tenants import strangers


@dataclass(frozen=True, slots=True)
class Hosted:
    """What each slot that has a budget shall keep, and why a model has fewer copies than it asks for."""

    tiers: Mapping[str, HostTier]
    missing: Mapping[str, str] = field(default_factory=dict)


def hosted(snapshot: Snapshot, before: Mapping[str, HostTier]) -> Hosted:
    """The decision for `snapshot`; `before` is the last one, so that nothing moves that was only not reported yet."""
    return _Decision(snapshot, before).made()


@dataclass(frozen=True, slots=True)
class _Present:
    """A copy on a slot: reported, or wanted a moment ago."""

    slot: str
    wanted: HostWanted
    report: HostCopyReport | None

    @property
    def ready(self) -> bool:
        return self.report is not None and self.report.state is HostState.READY and self.report.source is not None

    @property
    def failed(self) -> bool:
        return self.report is not None and self.report.state is HostState.FAILED

    @property
    def arriving(self) -> bool:
        """Whether bytes are on their way: it may come to an end although its source can be read by nobody new."""
        return self.report is not None and self.report.state is HostState.FILLING and self.report.bytes > 0

    @property
    def room(self) -> int:
        return self.report.bytes if self.report is not None and self.ready else room_for(self.wanted.bytes)


class _Decision:
    def __init__(self, snapshot: Snapshot, before: Mapping[str, HostTier]) -> None:
        self._snapshot, self._sources = snapshot, Sources(snapshot)
        self._slots = {s.slot: s for s in snapshot.slots if s.alive and s.host_tier is not None}
        self._left = {name: _budget(slot) for name, slot in self._slots.items()}
        self._wanted: dict[str, list[HostWanted]] = {name: [] for name in self._slots}
        self._present: list[_Present] = []
        for name, slot in self._slots.items():
            told = {w.copy: w for w in before[name].wanted} if name in before else {}
            reported = {c.copy: c for c in slot.host_tier.copies} if slot.host_tier else {}
            for copy in sorted({*told, *reported}):
                report = reported.get(copy)
                known = told.get(copy) or _as_wanted(report)
                if known is not None:
                    self._present.append(_Present(name, known, report))

    def made(self) -> Hosted:
        missing = {}
        kept = [(view, self._stay(view)) for view in sorted(self._snapshot.models, key=lambda v: v.spec.key)]
        # What is there comes before what is not: a new copy of one model must not push out another's.
        for view, there in kept:
            if why := self._complete(view.spec, there):
                missing[view.spec.key] = why
        ahead = self._ahead([view for view, there in kept if not there])
        tiers = {
            name: HostTier(tuple(sorted(w, key=lambda c: c.copy)), tuple(ahead[name]))
            for name, w in self._wanted.items()
        }
        return Hosted(tiers, missing)

    def _ahead(self, views: list[ModelView]) -> dict[str, list[Prefetch]]:
        """What each slot reads ahead: checkpoints of models that nobody holds, where their engine could be started."""
        found: dict[str, list[Prefetch]] = {name: [] for name in self._slots}
        running = {i.model for i in self._snapshot.instances if not i.remembered}
        wanted = {w.content.model for each in self._wanted.values() for w in each}
        for spec in (view.spec for view in views):
            if not spec.host_copies or spec.replicas or spec.key in running | wanted:
                continue
            able = [
                n
                for n, s in self._slots.items()
                if not closed_to(spec, s) and spec.engine in s.engines and s.devices and self._left[n] > 0
            ]
            for slot in sorted(able, key=lambda n: (len(found[n]), -self._left[n], n))[: spec.host_copies]:
                found[slot].append(
                    Prefetch(spec.key, spec.revision, spec.uri, "announced, and held by nobody", spec.storage)
                )
        return found

    def _stay(self, view: ModelView) -> list[_Present]:
        spec = view.spec
        layouts = self._sources.layouts(spec)
        own = [
            p
            for p in self._present
            if p.wanted.content.model == spec.key
            and not strangers(self._slots[p.slot].pool, spec.pool)
            and p.wanted.content.revision == spec.revision
            and p.wanted.content.runtime == runtime_digest(spec)
            and not _outdated(p, layouts)
            and (p.ready or p.arriving or self._sources.for_copy(spec, p.slot, p.wanted.copy)[0])
        ]
        # One that failed stays where it is: its agent waits longer and longer, and elsewhere it would begin anew.
        own.sort(key=lambda p: (not p.ready, p.failed, p.slot, p.wanted.copy))
        there: list[_Present] = []
        for present in own:
            elsewhere = present.slot not in {p.slot for p in there}
            if len(there) < spec.host_copies and elsewhere and self._fits(present.slot, present.room):
                there.append(present)
                self._left[present.slot] -= present.room
        return there

    def _complete(self, spec: ModelSpec, there: list[_Present]) -> str:
        """Wants what is there, and as many more as are missing; returns why some stay missing."""
        for present in there:
            self._want(spec, present.slot, present)
        used = {p.slot for p in there}
        engines = {m.slot for i in self._snapshot.instances if i.model == spec.key for m in i.members}
        for _ in range(spec.host_copies - len(there)):
            if spec.members * spec.devices_per_member > 1:
                return "a copy is of an engine with one member and one device"
            # Elsewhere than its engines are: one node that is lost does not take both.
            order = sorted(
                (n for n, s in self._slots.items() if n not in used and not strangers(s.pool, spec.pool)),
                key=lambda s: (len(self._wanted[s]), s in engines, -self._left[s], s),
            )
            why = "no slot with a budget is left" if self._slots else "no slot has a budget for copies"
            for slot in order:
                why = self._want(spec, slot, None)
                if not why:
                    used.add(slot)
                    break
            if why:
                return why
        return ""

    def _want(self, spec: ModelSpec, slot: str, present: _Present | None) -> str:
        """Has `slot` keep a copy; `present` has its room already. Returns why that cannot be."""
        if present is not None and present.ready:
            said = "it is there, the last source before the disk"
            size = present.report.source.weight_bytes if present.report and present.report.source else 0
            self._wanted[slot].append(HostWanted(present.wanted.copy, present.wanted.content, size, (), said))
            return ""
        name = present.wanted.copy if present else ""
        rungs, content, size = self._sources.for_copy(spec, slot, name)
        if present is not None:
            size = present.wanted.bytes or size
            self._wanted[slot].append(HostWanted(name, present.wanted.content, size, rungs, _said(size)))
            return ""
        if content is None or not rungs:
            return "no ready source that this slot can read" if content else "no ready source"
        if not self._fits(slot, room_for(size)):
            return f"{room_for(size)} bytes are needed, and at most {max(self._left.values())} are left on a slot"
        self._left[slot] -= room_for(size)
        self._wanted[slot].append(HostWanted(copy_name(slot, content), content, size, rungs, _said(size)))
        return ""

    def _fits(self, slot: str, size: int) -> bool:
        return size <= self._left[slot]


def _said(size: int) -> str:
    return f"a copy of {size} bytes for the next start without a peer"


def _budget(slot: SlotView) -> int:
    return slot.host_tier.budget_bytes if slot.host_tier else 0


def _as_wanted(report: HostCopyReport | None) -> HostWanted | None:
    if report is None:
        return None
    size = report.source.weight_bytes if report.source else 0
    return HostWanted(report.copy, report.content, size)


def _outdated(present: _Present, layouts: frozenset[str]) -> bool:
    """Whether engines run that could be read, and none of them has this copy's layout any more."""
    source = present.report.source if present.report else None
    return bool(layouts) and source is not None and source.layout_digest not in layouts

"""The ladder of one wake or start: which rungs are open, in which order, from which sources, and why. Zero I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from relight.controller.plan.capable import loads_itself
from relight.controller.plan.fleet import first_difference, runtime_digest
from relight.controller.plan.reach import BY_CARDS, CLEAR, OWN_HOST, closed, equipped, one_host, tried
from relight.core.fingerprint import digest
from relight.core.records import (
    Desired,
    DeviceReport,
    HostContent,
    HostCopyReport,
    HostState,
    InstanceView,
    MemberView,
    Mode,
    ModelSpec,
    Rung,
    RungKind,
    SlotView,
    Snapshot,
    SourceOffer,
    SourceRef,
)
from relight.core.states import State
from relight.core.tenants import strangers

SOURCES_PER_RUNG = 4
"""How many peers one rung reads from: the others are there when the first dies, and share its load between hosts."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The open rungs, best first, and what closed the others; `weight_bytes` 0 when no source told."""

    rungs: tuple[Rung, ...]
    refused: tuple[str, ...]
    weight_bytes: int


ACROSS_DEVICES = (RungKind.PEER_NVLINK, RungKind.PEER_NIXL)
"""What only engines with weights on devices serve: of others nobody expects it."""
COPIED_BY = (RungKind.PEER_SHM, RungKind.HOST_SHM, RungKind.PEER_TCP, RungKind.HOST_TCP)
"""By which a copy of the host tier is made, fastest first."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of the host tier that can be read."""

    slot: SlotView
    report: HostCopyReport
    offer: SourceOffer

    def reference(self, kind: RungKind) -> SourceRef:
        """Still without a grant."""
        return _reference(kind, self.offer, self.slot.slot, self.report.copy)

    def rung(self, kind: RungKind) -> Rung:
        """The rung that reads it."""
        where = "on the same host" if kind is RungKind.HOST_SHM else f"of slot {self.slot.slot}"
        return Rung(kind, f"{self.report.copy} is a copy in the memory {where}", self.reference(kind))


def copies_of(snapshot: Snapshot) -> list[HostCopy]:
    """The copies of living slots that can be read, in the order of their names."""
    found = [
        HostCopy(slot, copy, copy.source)
        for slot in snapshot.slots
        if slot.alive and slot.host_tier is not None
        for copy in slot.host_tier.copies
        if copy.state is HostState.READY and copy.source is not None
    ]
    return sorted(found, key=lambda c: c.report.copy)


class Sources:
    """The readable replicas of a snapshot; remembers how many readers this plan gave to each."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._slots: Mapping[str, SlotView] = {s.slot: s for s in snapshot.slots if s.alive}
        self._ready = [
            i
            for i in sorted(snapshot.instances, key=lambda i: i.instance)
            if i.state is State.READY
            and i.desired is Desired.READY
            and not i.remembered
            and i.failure is None
            and i.members
            and all(m.slot in self._slots and m.report and m.report.source for m in i.members)
        ]
        self._copies = copies_of(snapshot)
        self._before = Counter(i.reads for i in snapshot.instances if i.reads)
        self._readers = self._before.copy()

    def ladder(self, spec: ModelSpec, receiver: InstanceView, allowed: Sequence[RungKind]) -> Ladder:
        """The rungs of a wake of `receiver` for `spec`; `allowed` empty means that the spec's all are."""
        return self._ladder(spec, receiver, allowed, _no_copy(receiver), "")

    def fresh(
        self, spec: ModelSpec, chosen: Sequence[tuple[str, Sequence[DeviceReport]]], allowed: Sequence[RungKind]
    ) -> Ladder:
        """The rungs of an engine that shall be started on the chosen slots; none where none is chosen."""
        if not chosen:
            return Ladder((), (), 0)
        members = tuple(
            MemberView(slot, rank, tuple(d.id for d in devices), None) for rank, (slot, devices) in enumerate(chosen)
        )
        receiver = InstanceView(
            "", spec.key, spec, members, Desired.READY, State.NONE, spec.guardians.level, "", Mode.NORMAL
        )
        alone = loads_itself(spec, self._slots, [slot for slot, _ in chosen])
        return self._ladder(spec, receiver, allowed, "an engine that starts has none", alone)

    def _ladder(
        self, spec: ModelSpec, receiver: InstanceView, allowed: Sequence[RungKind], no_copy: str, alone: str
    ) -> Ladder:  # fmt: skip
        """`no_copy` says why it has no copy of its own, `alone` why it reads no other process; empty when it does."""
        rungs: list[Rung] = []
        refused: list[str] = []
        fitting = []
        for source in self._ready:
            if source.model != spec.key or source.instance == receiver.instance:
                continue
            why = _mismatch(spec, receiver, source) or self._unlike(receiver, source)
            if why:
                refused.append(f"{source.instance}: {why}")
            else:
                fitting.append(source)
        fitting.sort(key=lambda s: (self._readers[s.instance], s.in_flight, s.instance))
        # Stable: the order of the spec, but for the disk, which is last whatever was written.
        for kind in sorted(dict.fromkeys(spec.rungs), key=lambda k: k is RungKind.DISK):
            if allowed and kind not in allowed:
                refused.append(f"{kind}: the operation does not allow it")
            elif kind is RungKind.DISK:
                rungs.append(Rung(kind, "the checkpoint on disk, when nothing faster is left"))
            elif kind.transport and alone:
                refused.append(f"{kind}: {alone}")
            elif kind in ACROSS_DEVICES and not any(_knows(kind, s) for s in fitting):
                continue
            elif spec.encrypt and kind in BY_CARDS:
                refused.append(f"{kind}: {CLEAR}")
            elif kind is RungKind.STORAGE:
                if why := self._no_storage(spec, receiver):
                    refused.append(f"{kind}: {why}")
                else:
                    rungs.append(Rung(kind, "the checkpoint in remote storage, by way of the slot's memory"))
            elif kind is RungKind.HOST_COPY:
                if no_copy:
                    refused.append(f"{kind}: {no_copy}")
                else:
                    rungs.append(Rung(kind, "it sleeps at level 1: its weights are in host memory"))
            elif kind.from_host_tier:
                found, why = self._copied(kind, spec, receiver)
                if found:
                    rungs.append(_together(found[:SOURCES_PER_RUNG]))
                else:
                    refused.append(f"{kind}: {why}")
            else:
                reached = [(s, self._closed(kind, receiver, s, spec.encrypt)) for s in fitting]
                found = [self._peer(kind, receiver, s) for s, why in reached if not why]
                if found:
                    rungs.append(_together(found[:SOURCES_PER_RUNG]))
                else:
                    whys = dict.fromkeys(why for _, why in reached)
                    refused.append(f"{kind}: {'; '.join(whys) or 'no ready source'}")
        sizes = [_offer(s.members[0]).weight_bytes for s in fitting]
        sizes += [c.offer.weight_bytes for c in self._copies if not _other_copy(c, spec, receiver, self._slots)]
        size = max(sizes, default=0)
        return Ladder(tuple(rungs), tuple(refused), size)

    def for_copy(self, spec: ModelSpec, slot: str, copy: str) -> tuple[tuple[Rung, ...], HostContent | None, int]:
        """The rungs by which `slot` can make a copy for `spec`, what it will be of, and how large the weights are.

        All sources of it have one layout; nothing is read from an engine of several members or devices.
        """
        receiver = InstanceView(
            copy, spec.key, spec, (MemberView(slot, 0, (), None),), Desired.DORMANT, State.NONE, 2, "", Mode.NORMAL
        )
        ready = [
            s
            for s in self._ready
            if s.model == spec.key and not (_mismatch(spec, receiver, s) or first_difference(spec, s.spec))
        ]
        copies = [c for c in self._copies if c.report.copy != copy and not _other_content(c, spec)]
        layouts = [_offer(s.members[0]).layout_digest for s in ready] + [c.offer.layout_digest for c in copies]
        if not layouts:
            return (), None, 0
        ready = [s for s in ready if _offer(s.members[0]).layout_digest == layouts[0]]
        copies = [c for c in copies if c.offer.layout_digest == layouts[0]]
        rungs = []
        for kind in COPIED_BY:
            if kind.from_host_tier:
                found = [c.rung(kind) for c in copies if not self._unreachable(kind, receiver, c, spec.encrypt)]
            else:
                open_ = (s for s in ready if not self._closed(kind, receiver, s, spec.encrypt))
                found = [self._peer(kind, receiver, s) for s in open_]
            if found:
                rungs.append(replace(_together(found[:SOURCES_PER_RUNG]), instead_of=""))
        if ready:
            there = self._slots[ready[0].members[0].slot]
            device = next((d.kind for d in there.devices if d.id in ready[0].members[0].devices), "")
            content = HostContent(
                spec.key, spec.revision, runtime_digest(spec), there.engines.get(spec.engine, ""), device
            )
            return tuple(rungs), content, _offer(ready[0].members[0]).weight_bytes
        return tuple(rungs), copies[0].report.content, copies[0].offer.weight_bytes

    def layouts(self, spec: ModelSpec) -> frozenset[str]:
        """The layouts in which ready engines hold what `spec` asks for; empty while nobody says."""
        return frozenset(
            layout
            for s in self._ready
            if s.model == spec.key and s.spec.revision == spec.revision and not first_difference(spec, s.spec)
            if (layout := _offer(s.members[0]).layout_digest)
        )

    def _copied(self, kind: RungKind, spec: ModelSpec, receiver: InstanceView) -> tuple[list[Rung], str]:
        """Copies of the host tier that `receiver` can read by `kind`, or why there is none."""
        found, whys = [], dict[str, None]()
        for copy in sorted(self._copies, key=lambda c: (self._readers[c.report.copy], c.report.copy)):
            if copy.report.content.model != spec.key or strangers(copy.slot.pool, spec.pool):
                continue
            if why := _other_copy(copy, spec, receiver, self._slots):
                whys[f"{copy.report.copy}: {why}"] = None
            elif why := self._unreachable(kind, receiver, copy, spec.encrypt):
                whys[why] = None
            else:
                found.append(copy.rung(kind))
        return found, "; ".join(whys) or "no slot keeps a copy of it"

    def _no_storage(self, spec: ModelSpec, receiver: InstanceView) -> str:
        """Why `receiver` cannot read remote storage; empty when it can."""
        if spec.storage is None:
            return "the model names none"
        if spec.encrypt and not spec.storage.uri.startswith("https:"):
            return CLEAR
        for member in receiver.members:
            slot = self._slots.get(member.slot)
            if slot is None or slot.host_tier is None or not slot.host_tier.budget_bytes:
                return f"slot {member.slot} sets no memory aside for it"
        return ""

    def _unreachable(self, kind: RungKind, receiver: InstanceView, copy: HostCopy, encrypt: bool) -> str:
        here = self._slots.get(receiver.members[0].slot)
        return closed(kind, here, copy.slot, copy.offer, encrypt, copy.report.copy)

    def slot(self, name: str) -> SlotView | None:
        """The slot of that name, if it is alive."""
        return self._slots.get(name)

    def offer(self, kind: RungKind, name: str) -> SourceOffer | None:
        """What the replica or copy that a rung of `kind` names offers."""
        if kind.from_host_tier:
            return next((c.offer for c in self._copies if c.report.copy == name), None)
        return next((_offer(s.members[0]) for s in self._ready if s.instance == name), None)

    def busy(self, name: str) -> int:
        """How many were reading from it before this plan."""
        return self._before[name]

    def note_reader(self, rungs: Sequence[Rung]) -> None:
        """Counts one more reader for the source of the first rung."""
        if rungs and rungs[0].source is not None:
            self._readers[rungs[0].source.instance] += 1

    def _peer(self, kind: RungKind, receiver: InstanceView, source: InstanceView) -> Rung:
        reference = source_for(kind, source.members[0], source.instance)
        where = "on the same host" if kind in OWN_HOST else f"on slot {reference.slot}"
        here, there = self._pairs(receiver, source)[0]
        left = ""
        if kind is RungKind.PEER_TCP and (faster := self._expected(receiver, source)):
            why = self._closed(faster, receiver, source, False)
            left = f"{faster}: {why}"
        return Rung(
            kind, f"{source.instance} is ready {where} ({tried(kind, here, there)})", reference, instead_of=left
        )

    def _expected(self, receiver: InstanceView, source: InstanceView) -> RungKind | None:
        """The path that one expects between them in place of tcp."""
        if _knows(RungKind.PEER_NVLINK, source) and all(
            a is not None and b is not None and one_host(a, b) for a, b in self._pairs(receiver, source)
        ):
            return RungKind.PEER_NVLINK
        return RungKind.PEER_RDMA if self._equipped(receiver, source) else None

    def _pairs(self, receiver: InstanceView, source: InstanceView) -> list[tuple[SlotView | None, SlotView | None]]:
        """The slots of each rank here and there."""
        return [
            (self._slots.get(ours.slot), self._slots.get(theirs.slot))
            for ours, theirs in zip(receiver.members, source.members, strict=True)
        ]

    def _unlike(self, receiver: InstanceView, source: InstanceView) -> str:
        """What would make the layouts differ, as far as can be said before `receiver` has a fingerprint.

        Empty when nothing does, and for members that have one: that says it better.
        """
        if all(m.report is not None and m.report.fingerprint is not None for m in receiver.members):
            return ""
        if different := first_difference(receiver.spec, source.spec):
            return different
        engine = source.spec.engine
        for number, (here, there) in enumerate(self._pairs(receiver, source)):
            if here is None or there is None:
                continue
            ours, theirs = here.engines.get(engine, ""), there.engines.get(engine, "")
            if ours != theirs:
                return f"layout.engine: {engine} {ours!r} here, {theirs!r} there"
            kinds = [
                [device.kind for device in slot.devices if device.id in view.members[number].devices]
                for slot, view in ((here, receiver), (there, source))
            ]
            if kinds[0] != kinds[1]:
                return f"layout.device: {'+'.join(kinds[0])} here, {'+'.join(kinds[1])} there"
        return ""

    def _equipped(self, receiver: InstanceView, source: InstanceView) -> bool:
        """Whether RDMA is what one expects between them."""
        return all(equipped(a, b) for a, b in self._pairs(receiver, source))

    def _closed(self, kind: RungKind, receiver: InstanceView, source: InstanceView, encrypt: bool) -> str:
        """Why `receiver` cannot read `source` by `kind`; empty when it can."""
        offer = _offer(source.members[0])
        pairs = self._pairs(receiver, source)
        whys = (closed(kind, here, there, offer, encrypt, source.instance) for here, there in pairs)
        return next(filter(None, whys), "")


def _knows(kind: RungKind, source: InstanceView) -> bool:
    """Whether a source serves a transport, or says why it does not."""
    offer = _offer(source.members[0])
    return kind.transport in offer.addresses or kind.transport in offer.closed


def _no_copy(receiver: InstanceView) -> str:
    """Why `receiver` has no copy of its weights in host memory; empty when it has."""
    return "" if receiver.level == 1 else f"it sleeps at level {receiver.level}, which keeps no copy"


def _together(found: Sequence[Rung]) -> Rung:
    """One rung out of those of one kind: the first one's source leads, the others' help."""
    first, *others = found
    helpers = tuple(r.source for r in others if r.source is not None)
    said = f"; {', '.join(h.instance for h in helpers)} {'helps' if len(helpers) == 1 else 'help'}" if helpers else ""
    return replace(first, reason=first.reason + said, helpers=helpers)


def _offer(member: MemberView) -> SourceOffer:
    if member.report is None or member.report.source is None:
        raise ValueError(f"rank {member.rank} on {member.slot} offers nothing")
    return member.report.source


def source_for(kind: RungKind, member: MemberView, instance: str) -> SourceRef:
    """The reference, still without a grant, to one member of a source that offers its weights."""
    return _reference(kind, _offer(member), member.slot, instance)


def _reference(kind: RungKind, offer: SourceOffer, slot: str, instance: str) -> SourceRef:
    return SourceRef(
        instance=instance,
        slot=slot,
        generation=offer.generation,
        manifest_digest=offer.manifest_digest,
        content_digest=offer.content_digest,
        address=offer.addresses[kind.transport],
    )


def _other_content(copy: HostCopy, spec: ModelSpec) -> str:
    """Why a copy holds something else than `spec` asks for; empty when it does not."""
    content = copy.report.content
    if content.model != spec.key or strangers(copy.slot.pool, spec.pool):
        return f"it is of {content.model}, on a slot of pool {copy.slot.pool or 'none'}"
    if content.revision != spec.revision:
        return f"content.revision: {spec.revision!r} is asked for, {content.revision!r} there"
    if content.runtime != runtime_digest(spec):
        return "it was made of an engine with other arguments, environment or number of devices"
    return ""


def _other_copy(copy: HostCopy, spec: ModelSpec, receiver: InstanceView, slots: Mapping[str, SlotView]) -> str:
    """Why a copy does not fit `receiver`; empty when it does, as far as can be said."""
    content = copy.report.content
    if content.model != spec.key or strangers(copy.slot.pool, spec.pool) or content.revision != spec.revision:
        return _other_content(copy, spec)
    if len(receiver.members) != 1:
        return f"members: {len(receiver.members)} here, a copy is of one"
    member = receiver.members[0]
    known = member.report.fingerprint if member.report else None
    if known is not None and known.layout:
        ours = digest(known.layout)
        theirs = copy.offer.layout_digest
        return "" if ours == theirs else f"layout digest: {ours} here, {theirs} there"
    if why := _other_content(copy, spec):
        return why
    here = slots.get(member.slot)
    version = here.engines.get(spec.engine, "") if here else ""
    if version != content.engine_version:
        return f"layout.engine: {spec.engine} {version!r} here, {content.engine_version!r} there"
    kinds = [d.kind for d in here.devices if d.id in member.devices] if here else []
    if kinds != [content.device_kind]:
        return f"layout.device: {'+'.join(kinds)} here, {content.device_kind} there"
    return ""


def _mismatch(spec: ModelSpec, receiver: InstanceView, source: InstanceView) -> str:
    """The first field that forbids copying from `source`, or the empty string."""
    if source.spec.revision != spec.revision:
        return f"content.revision: {spec.revision!r} is asked for, {source.spec.revision!r} there"
    if len(source.members) != len(receiver.members):
        return f"members: {len(receiver.members)} here, {len(source.members)} there"
    for ours, theirs in zip(receiver.members, source.members, strict=True):
        here = ours.report.fingerprint if ours.report else None
        there = theirs.report.fingerprint if theirs.report else None
        if here is not None and there is not None:
            differences = here.differences(there)
            if differences:
                return str(differences[0])
        elif here is not None and here.layout and _offer(theirs).layout_digest:
            digest_here = digest(here.layout)
            if digest_here != _offer(theirs).layout_digest:
                return f"layout digest: {digest_here} here, {_offer(theirs).layout_digest} there"
    return ""

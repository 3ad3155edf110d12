"""Who passes on to whom when several instances of one content are filled at once: transfer/plan.py's answer, written
into their rungs. Zero I/O.

Which chunks there are is not known here, and need not be: a body is dealt in parts of equal length, and each receiver
finds the chunks of a part by itself (transfer/chunks.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from relight.controller.plan.prices import DEFAULT_WEIGHT_BYTES
from relight.controller.plan.reach import closed, host_of
from relight.controller.plan.sources import Sources
from relight.core.records import Deal, InstanceView, Placement, Rung, RungKind, SlotView, SourceOffer, SourceRef
from relight.core.tenants import strangers
from relight.transfer.chunks import chunk_bytes
from relight.transfer.plan import HolderEnd, Link, Question, ReceiverEnd, TransferPlan, plan

_BETWEEN = {kind.transport: kind for kind in RungKind if kind.transport and not kind.from_host_tier}
"""How engines read each other by the path of a rung."""
PARTS = 128
"""At most. Enough for the last hop to be a small share of the whole, few enough to be dealt out in milliseconds."""


def share_out(
    wakes: Sequence[tuple[Placement, InstanceView]], sources: Sources, rates: Mapping[str, float], *, encrypt: bool
) -> dict[str, Placement]:
    """The placements that change, by instance: each of `wakes` is one that fills an instance of the same model now.

    `rates` are bytes per second by kind of rung. What the answer rests on is told in every rung, also where nobody
    passes anything on. `encrypt`: no byte may cross a network in the clear.
    """
    ordered = sorted(wakes, key=lambda wake: wake[0].instance)
    ends = [end for wake in ordered if (end := _end(*wake, sources)) is not None]
    if len(ends) < 2:
        return {}
    return {placement.instance: placement for placement in _Group(ends, sources, rates, encrypt).dealt()}


@dataclass(frozen=True, slots=True)
class _End:
    """One receiver: its first rung, where it is, and what it offers to others while it is filled."""

    placement: Placement
    rung: Rung
    slot: SlotView
    relay: SourceOffer | None
    layout: str
    """Of its tensors; who has another one than the reader gives it nothing."""

    @property
    def name(self) -> str:
        return self.placement.instance

    @property
    def full(self) -> list[SourceRef]:
        """Those that it may read, which have everything."""
        return [r for r in (self.rung.source, *self.rung.helpers) if r is not None]


def _end(placement: Placement, view: InstanceView, sources: Sources) -> _End | None:
    rung = placement.rungs[0] if placement.rungs else None
    # Of several members each has a plan of its own, for which nobody asks: they are on different hosts.
    if rung is None or rung.source is None or not rung.kind.transport or len(view.members) != 1:
        return None
    slot, report = sources.slot(view.members[0].slot), view.members[0].report
    if slot is None:
        return None
    relay = report.relay if report is not None else None
    return _End(placement, rung, slot, relay, relay.layout_digest if relay else "")


@dataclass(slots=True)
class _Group:
    ends: Sequence[_End]
    sources: Sources
    rates: Mapping[str, float]
    encrypt: bool
    links: list[Link] = field(default_factory=list)
    capacities: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hosts: dict[str, str] = field(default_factory=dict)
    addresses: dict[tuple[str, str], SourceRef] = field(default_factory=dict)
    """By (receiver, giver that is filled too): how the one reads the other."""

    def dealt(self) -> list[Placement]:
        full = {ref.instance: (end.rung.kind, ref) for end in self.ends for ref in end.full}
        offers = {name: self.sources.offer(kind, name) for name, (kind, _) in full.items()}
        size = max((o.weight_bytes for o in offers.values() if o is not None), default=0) or DEFAULT_WEIGHT_BYTES
        for end in self.ends:
            for ref in end.full:
                self._reach(end, ref, offers[ref.instance])
            for other in self.ends:
                if other is not end:
                    self._pass_on(end, other)
        # What one rank holds is cut by itself; no part is smaller than a chunk.
        each = size // max(len(self.ends[0].placement.devices[0]), 1)
        parts = max(min(PARTS, each // chunk_bytes(each)), 1)
        question = Question(
            {0: [max(size // parts, 1)] * parts},
            [HolderEnd(name, 0) for name in sorted(full)],
            [ReceiverEnd(end.name, 0, self._host(end.slot)) for end in self.ends],
            self.links,
            self.capacities,
        )
        answer = plan(question)
        passes = any((a.receiver, a.holder) in self.addresses for a in answer.assignments)
        return [self._written(turn, answer, size, parts if passes else 0) for turn in range(len(self.ends))]

    def _host(self, slot: SlotView) -> str:
        """The host of a slot in words: by the first slot on it that was met."""
        return self.hosts.setdefault(host_of(slot), f"{slot.slot}'s host")

    # ------------------------------------------------------------------ what is asked

    def _reach(self, end: _End, ref: SourceRef, offer: SourceOffer | None) -> None:
        """`end` can read somebody who has everything."""
        there = self.sources.slot(ref.slot)
        if there is None:
            return
        limit = offer.rate_limit if offer is not None else None
        self._link(ref.instance, there, end, end.rung.kind, limit, 1 + self.sources.busy(ref.instance))

    def _pass_on(self, end: _End, giver: _End) -> None:
        """`end` can read `giver` as far as that has come: by memory where they share it, else by its rung's path."""
        relay = giver.relay
        if relay is None or giver.layout != end.layout or strangers(end.slot.pool, giver.slot.pool):
            return
        for kind in (RungKind.PEER_SHM, _BETWEEN[end.rung.kind.transport]):
            if not closed(kind, end.slot, giver.slot, relay, self.encrypt, giver.name):
                self._link(giver.name, giver.slot, end, kind, relay.rate_limit, 1)
                self.addresses[end.name, giver.name] = SourceRef(
                    giver.name, giver.slot.slot, relay.generation, "", "", relay.addresses[kind.transport], filling=True
                )
                return

    def _link(
        self, giver: str, there: SlotView, end: _End, kind: RungKind, limit: int | None, readers: int
    ) -> None:  # fmt: skip
        rate = self.rates[kind]
        here, afar = self._host(end.slot), self._host(there)
        if kind.transport == RungKind.PEER_SHM.transport:
            uses = [f"memory of {here}"]
        else:
            uses = [f"{afar} sending", f"{here} receiving"]
        for resource in uses:
            self.capacities[resource] = max(self.capacities[resource], rate)
        bound = rate if limit is None or limit <= 0 else min(rate, limit)
        if bound < rate or readers > 1:
            share = f"share of {giver}"
            self.capacities[share] = max(self.capacities[share], bound / readers)
            uses.append(share)
        self.links.append(Link(giver, end.name, kind.transport, rate, tuple(uses), f"by {kind.transport}"))

    # ------------------------------------------------------------------ what is answered

    def _written(self, turn: int, answer: TransferPlan, size: int, parts: int) -> Placement:
        end = self.ends[turn]
        deal = Deal(answer.shape, answer.reason, answer.seconds, len(self.ends), turn, parts)
        rung = replace(end.rung, deal=deal)
        if parts:
            queues = answer.queues(end.name)
            first, *others = (replace(ref, parts=queues.pop(ref.instance, ())) for ref in end.full)
            filling = (replace(self.addresses[end.name, name], parts=queue) for name, queue in queues.items())
            rung = replace(rung, source=first, helpers=(*others, *filling))
        placement = end.placement
        alone = size / self.rates[end.rung.kind]
        predicted = placement.predicted_seconds
        return replace(
            placement,
            rungs=(rung, *placement.rungs[1:]),
            reason=f"{placement.reason}; {deal.told}",
            predicted_seconds=None if predicted is None else predicted + max(answer.seconds - alone, 0.0),
        )

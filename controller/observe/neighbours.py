"""Whose doors each slot shall try, so that plans know which slots reach each other and by what. Pure but for
`Neighbourhoods`, which remembers.

A slot tries the doors of engines of the models that it has an engine of itself, on other slots of its own tenant: those
that it would read. Of each slot one engine is tried, by each transport once; and of all slots at most MOST, those that
come next after its own name, so that every pair of a small fleet is known and a large one is not drowned in tries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relight.controller.plan.reach import shared_kernel
from relight.core.logs import get_logger
from relight.core.records import (
    Door,
    InstanceView,
    Neighbours,
    RungKind,
    SlotView,
    Snapshot,
    SourceOffer,
    Verdict,
)
from relight.core.tenants import strangers
from relight.transfer.grants import Claims, mint

log = get_logger("controller.neighbours")
MOST = 8
"""Slots whose doors one slot tries."""
EVERY_SECONDS = 30.0
"""The least time between two tellings: doors open and close at every wake, and none is worth a message to all."""
GRANT_SECONDS = 3600.0
"""How long a grant to try is good; it opens nothing else."""
BETWEEN = (RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.PEER_RDMA)


@dataclass(frozen=True, slots=True)
class _Open:
    """A door as it is known here, before anybody has a grant for it."""

    door: Door
    generation: int
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Present:
    """The doors by the slot that shall try them, as of `revision`."""

    revision: int
    made_at: float
    doors: Mapping[str, tuple[_Open, ...]] = field(repr=False)


def doors_of(snapshot: Snapshot) -> dict[str, tuple[_Open, ...]]:
    """By slot the doors that it shall try."""
    slots = {slot.slot: slot for slot in snapshot.slots if slot.alive}
    there: dict[str, dict[str, tuple[InstanceView, SourceOffer]]] = {}
    models: dict[str, set[str]] = {}
    for view in sorted(snapshot.instances, key=lambda i: i.instance):
        for member in view.members:
            if member.slot not in slots or member.report is None:
                continue
            models.setdefault(member.slot, set()).add(view.model)
            offer = member.report.source or member.report.relay
            if offer is not None and offer.addresses:
                # A ready one is what is read in the end: it goes before a sleeper of the same slot.
                known = there.setdefault(view.model, {}).get(member.slot)
                if known is None or member.report.source is not None:
                    there[view.model][member.slot] = (view, offer)
    return {name: tuple(_tried(slots[name], own, there, slots)) for name, own in models.items()}


def _tried(
    here: SlotView, models: set[str], there: Mapping[str, Mapping[str, tuple[InstanceView, SourceOffer]]],
    slots: Mapping[str, SlotView],
) -> list[_Open]:  # fmt: skip
    offers = {slot: found for model in sorted(models) for slot, found in there.get(model, {}).items()}
    others = sorted(s for s in offers if s != here.slot and not strangers(here.pool, slots[s].pool))
    after = [s for s in others if s > here.slot] + [s for s in others if s < here.slot]
    found = []
    for name in after[:MOST]:
        view, offer = offers[name]
        for kind in BETWEEN:
            if kind.transport in offer.addresses and _worth_it(kind, here, slots[name]):
                address = offer.addresses[kind.transport].partition(",")[0]
                door = Door(name, kind.transport, view.instance, address)
                found.append(_Open(door, offer.generation, offer.grant_key))
    return found


def _worth_it(kind: RungKind, here: SlotView, there: SlotView) -> bool:
    """Whether one could believe that it reaches: a try costs little, and one for nothing costs it, too."""
    if kind is RungKind.PEER_SHM:
        return shared_kernel(here, there)
    if kind is RungKind.PEER_RDMA:
        return not here.transports.get(kind.transport, "none") and not there.transports.get(kind.transport, "none")
    return True


class Neighbourhoods:
    """What slots were told last. Revisions grow over restarts too, because the epoch stands in their upper half."""

    def __init__(self) -> None:
        self.present: Present | None = None
        self._listeners: list[Callable[[], None]] = []
        self._count = 0
        self._waits = False

    def listen(self, changed: Callable[[], None]) -> None:
        """`changed` is called whenever `present` was replaced."""
        self._listeners.append(changed)

    def update(self, epoch: int, snapshot: Snapshot) -> None:
        """Takes in a snapshot; what it changes is told at once or after a while (see `due_at`)."""
        if not snapshot.synced:
            return
        doors, before = doors_of(snapshot), self.present
        if before is None and not any(doors.values()):
            return
        same = before is not None and before.revision >> 32 == epoch and before.doors == doors
        stale = before is None or snapshot.now >= before.made_at + GRANT_SECONDS / 2
        self._waits = not same
        # Whoever failed once may have been at a door that is no more: it is told before it tries again.
        doubted = any(way.verdict is Verdict.UNKNOWN for slot in snapshot.slots for way in slot.reach)
        early = before is not None and snapshot.now < before.made_at + EVERY_SECONDS
        if (same and not stale) or (early and not (doubted and not same)):
            return
        self._count, self._waits = self._count + 1, False
        self.present = Present((epoch << 32) + self._count, snapshot.now, doors)
        for listener in self._listeners:
            listener()

    def due_at(self, now: float) -> float | None:
        """When a snapshot is to be taken in again (wall) although nothing happens; None while nothing was told."""
        if self.present is None:
            return None
        at = self.present.made_at + (EVERY_SECONDS if self._waits else GRANT_SECONDS / 2)
        return max(at, now + 1.0)

    def told(self, slot: str) -> Neighbours | None:
        """What `slot` is told: the same at each call for one revision."""
        if self.present is None:
            return None
        expires_at = self.present.made_at + GRANT_SECONDS
        return Neighbours(
            self.present.revision,
            tuple(
                granted for each in self.present.doors.get(slot, ()) if (granted := _granted(each, slot, expires_at))
            ),
        )


def _granted(known: _Open, receiver: str, expires_at: float) -> Door | None:
    door = known.door
    claims = Claims(door.instance, known.generation, "", receiver, expires_at, tries=True)
    try:
        grant = mint(known.key, claims)
    except ValueError:
        # Nobody can be let in by it: what is read there is told by whoever tries at a wake.
        log.warning("neighbours.unusable-key", instance=door.instance)
        return None
    return Door(door.slot, door.transport, door.instance, door.address, grant)

"""Whether what one slot offers can be read from another, and by what: what was tried between the two, transports of
both ends, encryption. Zero I/O."""

from __future__ import annotations

from relight.core.records import Reach, RungKind, SlotView, SourceOffer, Verdict

BY_CARDS = (RungKind.PEER_NIXL, RungKind.PEER_RDMA)
"""By which RDMA cards read, with nothing encrypted."""
OWN_HOST = (RungKind.PEER_SHM, RungKind.PEER_NVLINK, RungKind.HOST_SHM)
"""Reads that never leave a host."""
CLEAR = "bytes would travel in the clear, and the model asks for encryption"


def host_of(slot: SlotView) -> str:
    """Names the host that a slot shares memory on; a slot that shares none is a host of its own."""
    return slot.boot_id if slot.boot_id and not slot.force_tcp else slot.slot


def shared_kernel(a: SlotView, b: SlotView) -> bool:
    """Whether memory of one might be mapped by the other, by what they say of themselves."""
    return bool(a.boot_id) and a.boot_id == b.boot_id and not a.force_tcp and not b.force_tcp


def reach(here: SlotView, there: SlotView, transport: str) -> Reach | None:
    """What came of it when `here` tried to read `there`; None while it did not."""
    return next((r for r in here.reach if (r.slot, r.transport) == (there.slot, transport)), None)


def one_host(here: SlotView, there: SlotView) -> bool:
    """Whether `here` can map memory of `there`: what was tried counts, and before that what they say of themselves."""
    tried = reach(here, there, RungKind.PEER_SHM.transport)
    return shared_kernel(here, there) and (tried is None or tried.verdict is not Verdict.NO)


def tried(kind: RungKind, here: SlotView | None, there: SlotView | None) -> str:
    """What is known of the way, in a word or two."""
    known = reach(here, there, kind.transport) if here is not None and there is not None else None
    return "not probed" if known is None else f"probed: {known.reason}"


def equipped(here: SlotView | None, there: SlotView | None) -> bool:
    """Whether RDMA is what one expects between two slots: both have cards, and they are not one host."""
    name = RungKind.PEER_RDMA.transport
    if here is None or there is None:
        return False
    return name in here.transports and name in there.transports and not one_host(here, there)


def closed(
    kind: RungKind, here: SlotView | None, there: SlotView | None, offer: SourceOffer, encrypt: bool, name: str
) -> str:  # fmt: skip
    """Why what `name` offers on slot `there` cannot be read from `here` by `kind`; empty when it can."""
    if here is None or there is None:
        return f"{name}: a slot is not known any more"
    if kind in OWN_HOST and not shared_kernel(here, there):
        return f"{name} is on another host"
    if (known := reach(here, there, kind.transport)) is not None and known.verdict is Verdict.NO:
        return f"{name}: {here.slot} does not reach {there.slot} by {kind.transport}: {known.reason}"
    if kind in BY_CARDS:
        for slot in (here, there):
            if why := slot.transports.get(RungKind.PEER_RDMA.transport, "no RDMA card"):
                return f"{slot.slot}: {why}"
    if kind.transport not in offer.addresses:
        return f"{name}: {offer.closed.get(kind.transport, f'does not serve {kind.transport}')}"
    return f"{name}: {why}" if encrypt and (why := in_the_clear(kind, offer)) else ""


def in_the_clear(kind: RungKind, offer: SourceOffer) -> str:
    """Why bytes of this offer would cross a network unencrypted; empty when they would not."""
    return "" if kind in OWN_HOST or offer.addresses[kind.transport].startswith("tls:") else CLEAR

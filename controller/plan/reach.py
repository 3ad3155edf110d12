"""Whether what one slot offers can be read from another, and by what: transports of both ends, hosts, encryption. Zero
I/O."""

from __future__ import annotations

from relight.core.records import RungKind, SlotView, SourceOffer

CLEAR = "bytes would travel in the clear, and the model asks for encryption"


def host_of(slot: SlotView) -> str:
    """Names the host that a slot shares memory on; a slot that shares none is a host of its own."""
    return slot.boot_id if slot.boot_id and not slot.force_tcp else slot.slot


def one_host(a: SlotView, b: SlotView) -> bool:
    """Whether memory of one can be mapped by the other."""
    return bool(a.boot_id) and a.boot_id == b.boot_id and not a.force_tcp and not b.force_tcp


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
    if kind in (RungKind.PEER_SHM, RungKind.HOST_SHM) and not one_host(here, there):
        return f"{name} is on another host"
    if kind is RungKind.PEER_RDMA:
        for slot in (here, there):
            if why := slot.transports.get(kind.transport, "no RDMA card"):
                return f"{slot.slot}: {why}"
    if kind.transport not in offer.addresses:
        return f"{name}: {offer.closed.get(kind.transport, f'does not serve {kind.transport}')}"
    return f"{name}: {why}" if encrypt and (why := in_the_clear(kind, offer)) else ""


def in_the_clear(kind: RungKind, offer: SourceOffer) -> str:
    """Why bytes of this offer would cross a network unencrypted; empty when they would not."""
    own_host = kind in (RungKind.PEER_SHM, RungKind.HOST_SHM)
    return "" if own_host or offer.addresses[kind.transport].startswith("tls:") else CLEAR

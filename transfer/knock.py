"""Whether another slot's engine can be read from here: in by its door with a grant that opens nothing, and out again.

What a wake would meet is met: addresses, certificates, grants, a passed descriptor. By RDMA it is the cards' own
network: each pair of cards is tried from one card's address to the other's, and no queue pair is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.core.records import Door
from relight.core.tls import TlsFiles
from relight.transfer.transports import wire
from relight.transfer.transports.rdma import RdmaListener
from relight.transfer.transports.shm import ShmKnock, ShmListener
from relight.transfer.transports.tcp import TcpReader

KNOCK_SECONDS = 2.0
"""How long a door may take to answer."""


def knock(door: Door, cards: Sequence[str], tls: TlsFiles | None) -> str:
    """How `door` was reached, in words. `cards` are this slot's, each as `name@address`. Blocking.

    Raises Refused when somebody is there and will not let anybody in, RemoteFault or LocalFault when it is not reached.
    """
    if door.transport == ShmListener.kind:
        _out(ShmKnock(door.address, door.grant, door.instance, KNOCK_SECONDS))
        return "a descriptor was passed"
    if door.transport == RdmaListener.kind:
        return _by_cards(door, cards)
    _out(TcpReader(door.address, door.grant, door.instance, KNOCK_SECONDS, tls))
    return f"it answered at {door.address}"


def _out(reader: wire.ControlReader) -> None:
    try:
        reader.finish()
    finally:
        reader.close()


def _by_cards(door: Door, cards: Sequence[str]) -> str:
    """As they are dealt for a read (plugin/doors.py); one pair that reaches is enough, those that do not are told."""
    theirs = door.address.split("+")
    if not cards:
        raise LocalFault("no RDMA card can be used here")
    lost: list[str] = []
    refused: wire.Refused | None = None
    pairs = max(len(cards), len(theirs))
    for n in range(pairs):
        name, _, own = cards[n % len(cards)].partition("@")
        try:
            host, port = wire.parse_endpoint(theirs[n % len(theirs)], RdmaListener.kind)
            sock = wire.reaching(host, port, KNOCK_SECONDS, door.instance, own)
            reader = wire.ControlReader(sock, door.instance)
            try:
                reader.hello(door.grant)
                reader.finish()
            finally:
                reader.close()
        except wire.Refused as error:
            refused = error
        except (RemoteFault, LocalFault, InvalidInput) as error:
            lost.append(f"{name}: {error}")
    if len(lost) == pairs:
        raise RemoteFault("; ".join(lost))
    if refused is not None:
        raise refused
    return "; ".join([f"{pairs - len(lost)} of {pairs} pairs of cards reach each other", *lost])

"""How one member's weights are read by others, and how it reads theirs: listeners and readers by transport.

Weights in pages of this host are served by shm and tcp, and by each RDMA card. Those in a device's memory are served by
nvlink where its allocator passes memory on, by nixl and rdma where a card was seen to reach it, and by tcp in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from relight.core.errors import LocalFault
from relight.core.logs import get_logger
from relight.core.records import RungKind, SourceRef
from relight.plugin.settings import Settings
from relight.transfer.device_segment import AnySegment, DeviceSegment
from relight.transfer.doors import READ_DEADLINE, connector, serve
from relight.transfer.request import Holder
from relight.transfer.source import Source
from relight.transfer.transports import nixl, nixl_agent
from relight.transfer.transports.base import Listener, Reader
from relight.transfer.transports.nvlink import NvlinkListener, NvlinkReader, Pair
from relight.transfer.transports.rdma import Landing, RdmaListener, RdmaReader
from relight.transfer.transports.shm import ShmListener
from relight.transfer.transports.tcp import TcpListener

CARDS_SEPARATOR = "+"
"""Between the addresses of one member's cards."""
TRANSPORTS = (ShmListener.kind, NvlinkListener.kind, nixl.NixlListener.kind, RdmaListener.kind, TcpListener.kind)
NO_WHEEL = "no wheel of NIXL is installed beside the engine (nixl-cu12 or nixl-cu13)"
NO_MEMORY = "its memory comes when it wakes"
_log = get_logger("plugin.doors")


class Doors:
    """The listeners of one member while it is a source, or fills and passes on, and what it takes to read others."""

    def __init__(self, settings: Settings, rank: int, segment: AnySegment) -> None:
        """`settings` say where to listen, and by which cards; `rank` tells the members' sockets apart."""
        self._settings, self._rank = settings, rank
        self._listeners: list[Listener] = []
        self._segment = segment
        self._relays: list[Listener] = []
        self._landings = {card.name: Landing(card.name, segment) for card in settings.cards}
        # Opened when first used, and kept over sleeps. A source's agent is not a receiver's.
        self._serving, self._reading = (
            {card.name: nixl_agent.Agent(f"{card.name}:1") for card in settings.cards} for _ in range(2)
        )

    # ------------------------------------------------------------------ being read

    def open(self, source: Source) -> tuple[dict[str, str], dict[str, str]]:
        """Where `source` is read, by transport, and why one is not served. Raises LocalFault without what every host
        has: tcp, and shm for pages of it."""
        # Registered with cards and devices at once: memory is there, and stays until `close`.
        closed = dict[str, str]()
        addresses = self._always(source, self._settings.source_socket(self._rank), closed, self._listeners)
        if isinstance(self._segment, DeviceSegment):
            self._try([("", NvlinkListener(self._settings.nvlink_socket(self._rank)))], source, addresses, closed)
            self._try_nixl(source, addresses, closed)
        by_card = ((f"{card.name}: ", RdmaListener(card.name, card.host)) for card in self._settings.cards)
        self._try(by_card, source, addresses, closed)
        return addresses, closed

    def open_relay(self, source: Source) -> tuple[dict[str, str], dict[str, str]]:
        """The same of a `source` that is filled later: no card knows its memory before, and of a device's, which is not
        there yet, nothing is passed on but by way of the host. Raises LocalFault."""
        closed = dict[str, str]()
        addresses = self._always(source, self._settings.relay_socket(self._rank), closed, self._relays)
        if isinstance(self._segment, DeviceSegment):
            return addresses, closed | dict.fromkeys((RdmaListener.kind, NvlinkListener.kind), NO_MEMORY)
        by_card = (
            (f"{card.name}: ", RdmaListener(card.name, card.host, landing=self._landings[card.name]))
            for card in self._settings.cards
        )
        self._try(by_card, source, addresses, closed, self._relays)
        return addresses, closed

    def _always(
        self, source: Source, socket: Path, closed: dict[str, str], into: list[Listener]
    ) -> dict[str, str]:  # fmt: skip
        """Serves by what every host has."""
        own = self._settings
        if not isinstance(self._segment, DeviceSegment):
            listeners, addresses = serve(source, socket, own.bind_host, own.tls)
            into += listeners
            return addresses
        tcp = TcpListener(own.bind_host, tls=own.tls)
        into.append(tcp)
        closed[ShmListener.kind] = f"its weights lie in memory of device {self._segment.device}"
        return {tcp.kind: tcp.register(source)}

    def _try_nixl(self, source: Source, addresses: dict[str, str], closed: dict[str, str]) -> None:
        own = self._settings
        if own.cards and not nixl_agent.installed():
            closed[nixl.NixlListener.kind] = NO_WHEEL
            return
        by_card = ((f"{c.name}: ", nixl.NixlListener(self._serving[c.name], c.host)) for c in own.cards)
        self._try(by_card, source, addresses, closed)

    def _try(
        self, listeners: Iterable[tuple[str, Listener]], source: Source, addresses: dict[str, str],
        closed: dict[str, str], into: list[Listener] | None = None,
    ) -> None:  # fmt: skip
        """Serves by those that can be served by; what keeps one from it is told behind its name."""
        kept = self._listeners if into is None else into
        for name, listener in listeners:
            try:
                found = listener.register(source)
            except LocalFault as error:
                _log.warning("door.closed", transport=listener.kind, reason=f"{name}{error}")
                closed[listener.kind] = f"{name}{error}"
            else:
                kept.append(listener)
                before = addresses.get(listener.kind)
                addresses[listener.kind] = f"{before}{CARDS_SEPARATOR}{found}" if before else found

    def close(self) -> None:
        """The source is served to nobody any more, and no card knows its memory."""
        _release(self._listeners)

    def close_relay(self) -> None:
        """The same of the relay."""
        _release(self._relays)

    # ------------------------------------------------------------------ reading

    def holders(self, kind: RungKind, sources: Sequence[SourceRef], streams: int) -> list[Holder]:
        """The holders of one rung between peers, read by about `streams` connections. Raises LocalFault.

        Those that are being filled on this host are read by its memory, whatever the rung: it is never the slower path.
        """
        full = sum(not source.filling for source in sources)
        if not full:
            raise LocalFault(f"the rung {kind} came without a source")
        # Two sources on one host share its memory's bandwidth: the second is there for when the first dies.
        aside = kind.transport in (ShmListener.kind, NvlinkListener.kind)
        each = max(streams // (1 if aside else full), 1)
        found: list[Holder] = []
        for peer in sources:
            here = peer.filling and peer.address.startswith("unix:")
            if kind in (RungKind.PEER_RDMA, RungKind.PEER_NIXL) and not here:
                found += self._by_cards(kind, peer)
                continue
            reach = connector(ShmListener.kind, peer, None) if here else self._connector(kind, peer)
            found.append(
                Holder(
                    peer.instance, reach, partial=peer.filling, queue=peer.parts,
                    connections=1 if peer.filling else each,
                    reserve=aside and not peer.filling and any(not h.partial for h in found),
                    manifest_digest="" if peer.filling else peer.manifest_digest,
                )
            )  # fmt: skip
        return found

    def _connector(self, kind: RungKind, peer: SourceRef) -> Callable[[], Reader]:
        if kind is not RungKind.PEER_NVLINK:
            return connector(kind.transport, peer, self._settings.tls)
        if not isinstance(self._segment, DeviceSegment):
            raise LocalFault("this engine's weights lie in memory of the host, which nvlink does not reach")
        pair = Pair(self._segment.cuda)
        return lambda: NvlinkReader(peer.address, peer.grant, peer.instance, READ_DEADLINE, pair)

    def _by_cards(self, kind: RungKind, peer: SourceRef) -> list[Holder]:
        """A holder for each pair of cards: one that fails leaves its chunks to the others."""
        cards, theirs = self._settings.cards, peer.address.split(CARDS_SEPARATOR)
        if not cards:
            raise LocalFault("this engine was started without an RDMA card")
        reader = self._by_nixl() if kind is RungKind.PEER_NIXL else self._by_verbs()
        # As many as the side with more cards has: each card carries traffic, and none stands in for two but here.
        count = max(len(cards), len(theirs))

        def holder(n: int) -> Holder:
            card, address = cards[n % len(cards)], theirs[n % len(theirs)]
            # Of its own for each pair: a holder that is lost is lost by its name.
            name = f"{peer.instance} by {card.name} to {address.removeprefix(f'{kind.transport}:')}"
            connect = lambda: reader(card.name, address, peer.grant, name)  # noqa: E731
            return Holder(
                name, connect, partial=peer.filling, queue=peer.parts[n::count],
                manifest_digest="" if peer.filling else peer.manifest_digest, peer=peer.instance,
            )  # fmt: skip

        return [holder(n) for n in range(count)]

    def _by_verbs(self) -> Callable[[str, str, str, str], Reader]:
        return lambda card, address, grant, name: RdmaReader(
            address, grant, name, READ_DEADLINE, self._landings[card]
        )  # fmt: skip

    def _by_nixl(self) -> Callable[[str, str, str, str], Reader]:
        if not nixl_agent.installed():
            raise LocalFault(NO_WHEEL)
        landings = {name: nixl.Landing(agent, self._segment) for name, agent in self._reading.items()}
        return lambda card, address, grant, name: nixl.NixlReader(address, grant, name, READ_DEADLINE, landings[card])


def _release(listeners: list[Listener]) -> None:
    for listener in listeners:
        listener.release()
    listeners.clear()

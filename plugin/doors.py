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
from relight.plugin.settings import Card, Settings
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
_log = get_logger("plugin.doors")


class Doors:
    """The listeners of one member while it is a source, and what it takes to read others."""

    def __init__(self, settings: Settings, rank: int, segment: AnySegment) -> None:
        """`settings` say where to listen, and by which cards; `rank` tells the members' sockets apart."""
        self._settings, self._rank, self._segment = settings, rank, segment
        self._listeners: list[Listener] = []
        # Opened when first used, and kept over sleeps. A source's agent is not a receiver's.
        self._serving, self._reading = (
            {card.name: nixl_agent.Agent(f"{card.name}:1") for card in settings.cards} for _ in range(2)
        )

    # ------------------------------------------------------------------ being read

    def open(self, source: Source) -> tuple[dict[str, str], dict[str, str]]:
        """Where `source` is read, by transport, and why one is not served. Raises LocalFault without what every host
        has: tcp, and shm for pages of it."""
        own, closed = self._settings, dict[str, str]()
        if isinstance(self._segment, DeviceSegment):
            addresses = self._open_device(source, own.nvlink_socket(self._rank), closed)
        else:
            always, addresses = serve(source, own.source_socket(self._rank), own.bind_host, own.tls)
            self._listeners += always
        self._by_each_card(source, lambda card: RdmaListener(card.name, card.host), addresses, closed)
        return addresses, closed

    def _open_device(self, source: Source, socket: Path, closed: dict[str, str]) -> dict[str, str]:
        tcp = TcpListener(self._settings.bind_host, tls=self._settings.tls)
        self._listeners.append(tcp)
        addresses = {tcp.kind: tcp.register(source)}
        closed[ShmListener.kind] = f"its weights lie in memory of device {self._segment.device}"
        self._try([("", NvlinkListener(socket))], source, addresses, closed)
        if self._settings.cards and not nixl_agent.installed():
            closed[nixl.NixlListener.kind] = NO_WHEEL
        else:
            self._by_each_card(source, lambda c: nixl.NixlListener(self._serving[c.name], c.host), addresses, closed)
        return addresses

    def _by_each_card(
        self, source: Source, listener: Callable[[Card], Listener], addresses: dict[str, str], closed: dict[str, str]
    ) -> None:
        # Registered with the card here: pages have to be there, and stay until `close`.
        self._try(((f"{card.name}: ", listener(card)) for card in self._settings.cards), source, addresses, closed)

    def _try(
        self, listeners: Iterable[tuple[str, Listener]], source: Source, addresses: dict[str, str],
        closed: dict[str, str],
    ) -> None:  # fmt: skip
        """Serves by those that can be served by; what keeps one from it is told behind its name."""
        for name, listener in listeners:
            try:
                found = listener.register(source)
            except LocalFault as error:
                _log.warning("door.closed", transport=listener.kind, reason=f"{name}{error}")
                closed[listener.kind] = f"{name}{error}"
            else:
                self._listeners.append(listener)
                before = addresses.get(listener.kind)
                addresses[listener.kind] = f"{before}{CARDS_SEPARATOR}{found}" if before else found

    def close(self) -> None:
        """Nobody is served any more, and no card knows the memory."""
        for listener in self._listeners:
            listener.release()
        self._listeners = []

    # ------------------------------------------------------------------ reading

    def holders(self, kind: RungKind, sources: Sequence[SourceRef], streams: int) -> list[Holder]:
        """The holders of one rung between peers, read by about `streams` connections. Raises LocalFault."""
        if not sources:
            raise LocalFault(f"the rung {kind} came without a source")
        if kind in (RungKind.PEER_RDMA, RungKind.PEER_NIXL):
            return [holder for source in sources for holder in self._by_cards(kind, source)]
        # Two sources on one host share its memory's bandwidth: the second is there for when the first dies.
        aside = kind.transport in (ShmListener.kind, NvlinkListener.kind)
        each = max(streams // (1 if aside else len(sources)), 1)
        return [
            Holder(
                peer.instance, self._connector(kind, peer), connections=each, reserve=aside and n > 0,
                manifest_digest=peer.manifest_digest,
            )
            for n, peer in enumerate(sources)
        ]  # fmt: skip

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

        def holder(n: int) -> Holder:
            card, address = cards[n % len(cards)], theirs[n % len(theirs)]
            # Of its own for each pair: a holder that is lost is lost by its name.
            name = f"{peer.instance} by {card.name} to {address.removeprefix(f'{kind.transport}:')}"
            connect = lambda: reader(card.name, address, peer.grant, name)  # noqa: E731
            return Holder(name, connect, manifest_digest=peer.manifest_digest)

        # As many as the side with more cards has: each card carries traffic, and none stands in for two but here.
        return [holder(n) for n in range(max(len(cards), len(theirs)))]

    def _by_verbs(self) -> Callable[[str, str, str, str], Reader]:
        landings = {card.name: Landing(card.name, self._segment) for card in self._settings.cards}
        return lambda card, address, grant, name: RdmaReader(address, grant, name, READ_DEADLINE, landings[card])

    def _by_nixl(self) -> Callable[[str, str, str, str], Reader]:
        if not nixl_agent.installed():
            raise LocalFault(NO_WHEEL)
        landings = {name: nixl.Landing(agent, self._segment) for name, agent in self._reading.items()}
        return lambda card, address, grant, name: nixl.NixlReader(address, grant, name, READ_DEADLINE, landings[card])

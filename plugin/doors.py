"""How one member's weights are read by others, and how it reads theirs: listeners and readers by transport."""

from __future__ import annotations

from collections.abc import Sequence

from relight.core.errors import LocalFault
from relight.core.logs import get_logger
from relight.core.records import RungKind, SourceRef
from relight.plugin.settings import Settings
from relight.transfer.doors import READ_DEADLINE, connector, serve
from relight.transfer.request import Holder
from relight.transfer.segment import Segment
from relight.transfer.source import Source
from relight.transfer.transports.base import Listener
from relight.transfer.transports.rdma import Landing, RdmaListener, RdmaReader

CARDS_SEPARATOR = "+"
"""Between the addresses of one member's cards."""
_log = get_logger("plugin.doors")


class Doors:
    """The listeners of one member while it is a source, and what it takes to read others."""

    def __init__(self, settings: Settings, rank: int, segment: Segment) -> None:
        """`settings` say where to listen, and by which cards; `rank` tells the members' sockets apart."""
        self._settings, self._rank, self._segment = settings, rank, segment
        self._listeners: list[Listener] = []

    # ------------------------------------------------------------------ being read

    def open(self, source: Source) -> tuple[dict[str, str], dict[str, str]]:
        """Where `source` is read, by transport, and why one is not served. Raises LocalFault without shm or tcp."""
        own = self._settings
        closed = dict[str, str]()
        always, addresses = serve(source, own.source_socket(self._rank), own.bind_host, own.tls)
        self._listeners += always
        found = []
        for card in own.cards:
            listener = RdmaListener(card.name, card.host)
            try:
                # Registered with the card here: pages have to be there, and stay until `close`.
                found.append(listener.register(source))
            except LocalFault as error:
                _log.warning("rdma.closed", card=card.name, reason=str(error))
                closed[RdmaListener.kind] = f"{card.name}: {error}"
            else:
                self._listeners.append(listener)
        if found:
            addresses[RdmaListener.kind] = CARDS_SEPARATOR.join(found)
        return addresses, closed

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
        if kind is RungKind.PEER_RDMA:
            return [holder for source in sources for holder in self._by_cards(source)]
        # Two sources on one host share its memory's bandwidth: the second is there for when the first dies.
        aside = kind.transport == RungKind.PEER_SHM.transport
        each = max(streams // (1 if aside else len(sources)), 1)
        return [
            Holder(
                peer.instance, connector(kind.transport, peer, self._settings.tls), connections=each,
                reserve=aside and n > 0, manifest_digest=peer.manifest_digest,
            )
            for n, peer in enumerate(sources)
        ]  # fmt: skip

    def _by_cards(self, peer: SourceRef) -> list[Holder]:
        """A holder for each pair of cards: one that fails leaves its chunks to the others."""
        cards, theirs = self._settings.cards, peer.address.split(CARDS_SEPARATOR)
        if not cards:
            raise LocalFault("this engine was started without an RDMA card")
        landings = {card.name: Landing(card.name, self._segment) for card in cards}

        def holder(n: int) -> Holder:
            card, address = cards[n % len(cards)], theirs[n % len(theirs)]
            # Of its own for each pair: a holder that is lost is lost by its name.
            name = f"{peer.instance} by {card.name} to {address.removeprefix(f'{RdmaListener.kind}:')}"
            landing = landings[card.name]
            connect = lambda: RdmaReader(address, peer.grant, name, READ_DEADLINE, landing)  # noqa: E731
            return Holder(name, connect, manifest_digest=peer.manifest_digest)

        # As many as the side with more cards has: each card carries traffic, and none stands in for two but here.
        return [holder(n) for n in range(max(len(cards), len(theirs)))]

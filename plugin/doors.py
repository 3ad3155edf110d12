"""How one member's weights are read by others, and how it reads theirs: listeners and readers by transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from relight.core.errors import LocalFault
from relight.core.logs import get_logger
from relight.core.records import RungKind, SourceRef
from relight.plugin.settings import Card, Settings
from relight.transfer.doors import READ_DEADLINE, connector, serve
from relight.transfer.request import Holder
from relight.transfer.segment import Segment
from relight.transfer.source import Source
from relight.transfer.transports.base import Listener
from relight.transfer.transports.rdma import Landing, RdmaListener, RdmaReader
from relight.transfer.transports.shm import ShmListener

CARDS_SEPARATOR = "+"
"""Between the addresses of one member's cards."""
_log = get_logger("plugin.doors")


class Doors:
    """The listeners of one member while it is a source, or fills and passes on, and what it takes to read others."""

    def __init__(self, settings: Settings, rank: int, segment: Segment) -> None:
        """`settings` say where to listen, and by which cards; `rank` tells the members' sockets apart."""
        self._settings, self._rank = settings, rank
        self._listeners: list[Listener] = []
        self._relays: list[Listener] = []
        self._landings = {card.name: Landing(card.name, segment) for card in settings.cards}

    # ------------------------------------------------------------------ being read

    def open(self, source: Source) -> tuple[dict[str, str], dict[str, str]]:
        """Where `source` is read, by transport, and why one is not served. Raises LocalFault without shm or tcp."""
        # Registered with the card at once: pages are there, and stay until `close`.
        socket, by_card = self._settings.source_socket(self._rank), lambda card: RdmaListener(card.name, card.host)
        return self._open(source, socket, by_card, self._listeners)

    def open_relay(self, source: Source) -> tuple[dict[str, str], dict[str, str]]:
        """The same of a `source` that is filled later: no card knows its memory before. Raises LocalFault."""

        def by_card(card: Card) -> RdmaListener:
            return RdmaListener(card.name, card.host, landing=self._landings[card.name])

        return self._open(source, self._settings.relay_socket(self._rank), by_card, self._relays)

    def _open(
        self, source: Source, socket: Path, by_card: Callable[[Card], RdmaListener], into: list[Listener]
    ) -> tuple[dict[str, str], dict[str, str]]:
        own = self._settings
        closed = dict[str, str]()
        always, addresses = serve(source, socket, own.bind_host, own.tls)
        into += always
        found = []
        for card in own.cards:
            listener = by_card(card)
            try:
                found.append(listener.register(source))
            except LocalFault as error:
                _log.warning("rdma.closed", card=card.name, reason=str(error))
                closed[RdmaListener.kind] = f"{card.name}: {error}"
            else:
                into.append(listener)
        if found:
            addresses[RdmaListener.kind] = CARDS_SEPARATOR.join(found)
        return addresses, closed

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
        aside = kind.transport == RungKind.PEER_SHM.transport
        each = max(streams // (1 if aside else full), 1)
        found: list[Holder] = []
        for peer in sources:
            here = peer.filling and peer.address.startswith("unix:")
            if kind is RungKind.PEER_RDMA and not here:
                found += self._by_cards(peer)
                continue
            reach = connector(ShmListener.kind if here else kind.transport, peer, self._settings.tls)
            found.append(
                Holder(
                    peer.instance, reach, partial=peer.filling, queue=peer.parts,
                    connections=1 if peer.filling else each,
                    reserve=aside and not peer.filling and any(not h.partial for h in found),
                    manifest_digest="" if peer.filling else peer.manifest_digest,
                )
            )  # fmt: skip
        return found

    def _by_cards(self, peer: SourceRef) -> list[Holder]:
        """A holder for each pair of cards: one that fails leaves its chunks to the others."""
        cards, theirs = self._settings.cards, peer.address.split(CARDS_SEPARATOR)
        if not cards:
            raise LocalFault("this engine was started without an RDMA card")
        # As many as the side with more cards has: each card carries traffic, and none stands in for two but here.
        count = max(len(cards), len(theirs))

        def holder(n: int) -> Holder:
            card, address = cards[n % len(cards)], theirs[n % len(theirs)]
            # Of its own for each pair: a holder that is lost is lost by its name.
            name = f"{peer.instance} by {card.name} to {address.removeprefix(f'{RdmaListener.kind}:')}"
            landing = self._landings[card.name]
            connect = lambda: RdmaReader(address, peer.grant, name, READ_DEADLINE, landing)  # noqa: E731
            return Holder(
                name, connect, partial=peer.filling, queue=peer.parts[n::count],
                manifest_digest="" if peer.filling else peer.manifest_digest, peer=peer.instance,
            )  # fmt: skip

        return [holder(n) for n in range(count)]


def _release(listeners: list[Listener]) -> None:
    for listener in listeners:
        listener.release()
    listeners.clear()

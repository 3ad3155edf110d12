"""rdma: the receiver reads the source's registered memory by verbs; no core of the source touches a byte.

Grants, permissions and keys go over a socket of the same interface, as with all transports (transports/wire.py). Each
reader has a reliable connection of its own on the card that its address names; the key of the source's memory is told
after the grant was checked, and dies with the registration: a source deregisters before its pages go. What a segment
consists of is registered piece by piece (transfer/transports/registered.py), a device's memory too where a card can.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from relight.core.clock import Clock
from relight.core.errors import InvalidInput, LocalFault, RemoteFault, Unavailable
from relight.transfer.device_segment import AnySegment
from relight.transfer.extents import MOST_EXTENTS, MOST_TOLD, Extent, Extents
from relight.transfer.source import Source
from relight.transfer.transports import wire
from relight.transfer.transports.flight import FlightReader, Landed
from relight.transfer.transports.registered import Registered
from relight.transfer.transports.verbs import LOST_SECONDS, Connection, Device, Peer, Region

RELEASE_SECONDS = 5.0
"""How long a source that stops serving waits for its readers' threads."""


class RdmaListener:
    """Serves one source on one card: its control socket listens on that card's own address."""

    kind = "rdma"

    def __init__(
        self, device: str, host: str, port: int = 0, lost_seconds: float = LOST_SECONDS, landing: Landing | None = None
    ) -> None:
        """A relay is served out of the `landing` that it is filled in: its card gets to know the memory when it is
        filled, or its first reader comes, and never while it sleeps."""
        self._name, self._host, self._port, self._lost_seconds = device, host, port, lost_seconds
        self._landing = landing
        self._acceptor: wire.Acceptor | None = None
        self._opened: tuple[Device, Registered] | None = None
        self._released = False
        self._readers = 0
        self._gone = threading.Condition()
        self._lock = threading.Lock()

    def register(self, source: Source) -> str:
        """Registers the whole segment with the card: pages must be there, and stay until `release`; not of a relay."""
        listener = wire.listening_at(self._host, self._port)
        port = listener.getsockname()[1]
        try:
            if self._landing is None:
                device = Device(self._name, self._lost_seconds)
                self._opened = device, _registered(device, source)
        except LocalFault:
            listener.close()
            raise

        def handle(sock: socket.socket) -> None:
            with self._gone:
                self._readers += 1
            try:
                _serve(sock, source, lambda: self._reached(source))
            finally:
                with self._gone:
                    self._readers -= 1
                    self._gone.notify_all()

        self._acceptor = wire.Acceptor(listener, handle, "relight-rdma-source")
        return f"rdma:{self._host}:{port}"

    def _reached(self, source: Source) -> tuple[Device, Registered]:
        """What readers read through. Raises Unavailable while a relay is not filled yet, LocalFault."""
        if self._landing is not None:
            source.dumped()
        with self._lock:
            if self._opened is None:
                if self._landing is None or self._released:
                    raise Unavailable(f"{source.instance} is no source now")
                self._opened = self._landing.take()
            return self._opened

    def release(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        with self._gone:
            # Connections end before what they read through: their threads were woken, and are waited for.
            self._gone.wait_for(lambda: not self._readers, RELEASE_SECONDS)
        with self._lock:
            self._released = True
            opened, self._opened = self._opened, None
        if opened is not None and self._landing is not None:
            self._landing.give_back()
        elif opened is not None:
            device, memory = opened
            memory.close()
            device.close()


def _registered(device: Device, source: Source) -> Registered:
    try:
        return Registered(device, source.segment, writable=False)
    except LocalFault:
        device.close()
        raise


def _serve(sock: socket.socket, source: Source, reached: Callable[[], tuple[Device, Registered]]) -> None:
    with ExitStack() as stack:

        def welcome(sock: socket.socket) -> None:
            # Only now: who has no grant gets no queue pair either.
            device, memory = reached()
            connection = device.connection()
            stack.callback(connection.close)
            _introduce(sock, connection, memory)

        wire.serve(sock, source, welcome, wire.permitted)


def _introduce(sock: socket.socket, connection: Connection, memory: Registered) -> None:
    """The source's end: after the grant was found good, both ends tell each other how to be reached."""
    sock.sendall(wire.OK)
    told = {"peer": connection.peer.plain(), "regions": [region.plain() for region in memory.regions]}
    wire.send_frame(sock, json.dumps(told).encode())
    connection.connect(Peer.parse(json.loads(wire.receive_frame(sock, wire.MAX_HELLO))))
    sock.sendall(wire.OK)


class Landing:
    """A receiver's segment, registered with one card for as long as readers use it; shared by them.

    Registering brings its pages and pins them: close every reader before the segment is dropped.
    """

    def __init__(self, device: str, segment: AnySegment, lost_seconds: float = LOST_SECONDS) -> None:
        self.name, self.lost_seconds, self._segment = device, lost_seconds, segment
        self._lock = threading.Lock()
        self._users = 0
        self._open: tuple[Device, Registered] | None = None

    def take(self) -> tuple[Device, Registered]:
        """Opens and registers for the first user. Raises LocalFault."""
        with self._lock:
            if self._open is None:
                device = Device(self.name, self.lost_seconds)
                try:
                    self._open = device, Registered(device, self._segment, writable=True)
                except LocalFault:
                    device.close()
                    raise
            self._users += 1
            return self._open

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._open is not None:
                device, memory = self._open
                self._open = None
                memory.close()
                device.close()


def _regions(raw: object) -> list[Region]:
    """In the order of their places. Raises InvalidInput."""
    if not isinstance(raw, list) or len(raw) > MOST_EXTENTS:
        raise InvalidInput(f"expected at most {MOST_EXTENTS} RDMA regions")
    return sorted([Region.parse(one) for one in raw], key=lambda region: region.at)


class RdmaReader(FlightReader):
    """Reads a source's memory through one card. `deadline` bounds each wait, in seconds."""

    def __init__(
        self, address: str, grant: str, source: str, deadline: float, landing: Landing, clock: Clock | None = None
    ) -> None:
        sock = wire.reaching(*wire.parse_endpoint(address, "rdma"), deadline, source)
        super().__init__(sock, source, deadline, clock)
        # A question that nobody even acknowledges: its link is down, and a read would have failed as soon.
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(landing.lost_seconds * 1000))
        self._connection: Connection | None = None
        self._landing: Landing | None = None
        try:
            self.hello(grant)
            device, self._memory = landing.take()
            self._landing = landing
            self._connection = device.connection()
            self._regions, self._places = self._meet(self._connection)
        except (LocalFault, RemoteFault):
            self.close()
            raise

    def _meet(self, connection: Connection) -> tuple[list[Region], Extents]:
        try:
            told = json.loads(wire.receive_frame(self.sock, MOST_TOLD))
            peer, regions = Peer.parse(told["peer"]), _regions(told["regions"])
            places = Extents(Extent(region.at, region.address, region.bytes) for region in regions)
            connection.connect(peer)
            wire.send_frame(self.sock, json.dumps(connection.peer.plain()).encode())
        except (OSError, wire.Closed, ValueError, KeyError, TypeError, InvalidInput, LocalFault) as error:
            raise RemoteFault(f"{self.source}: no RDMA connection with it: {error or 'closed'}") from error
        self.status("did not connect")
        return regions, places

    @property
    def by(self) -> str:
        return self._landing.name if self._landing else "no card"

    @property
    def most(self) -> int:
        return self._places.bytes

    def post(self, into: int, offset: int, length: int) -> None:
        if self._connection is None:
            raise LocalFault("the connection is closed")
        region = self._regions[self._places.find(offset, offset + length)]
        self._connection.read(self._memory.of(into), into, region, offset - region.at, length)

    def landed(self) -> Landed:
        return Landed(*self._connection.completed()) if self._connection else Landed(0, 0, "the connection is closed")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._landing is not None:
            self._landing.give_back()
            self._landing = None
        super().close()

"""nixl: the receiver's agent reads the source's registered memory (NIXL over UCX), and no core of the source is needed.

Grants, permissions and an agent's metadata go over a socket of the same interface, as with all transports
(transports/wire.py): metadata is told after the grant was checked, and what is registered dies with the registration.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque

from relight.core.clock import Clock
from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.transfer.device_segment import AnySegment, DeviceSegment, on_host
from relight.transfer.extents import MOST_TOLD
from relight.transfer.source import Source
from relight.transfer.transports import wire
from relight.transfer.transports.flight import FIRST_PAUSE, LONGEST_PAUSE, FlightReader, Landed
from relight.transfer.transports.nixl_agent import DONE, METADATA_BYTES, UNDER_WAY, Agent, Region

SETTLE_SECONDS = 1.0
"""How long a reader that ends waits for reads that it has posted; then its agent is given up."""


class NixlListener:
    """Serves one source through one agent: its control socket listens on that card's own address."""

    kind = "nixl"

    def __init__(self, agent: Agent, host: str, port: int = 0) -> None:
        self._agent, self._host, self._port = agent, host, port
        self._acceptor: wire.Acceptor | None = None
        self._registered: int | None = None

    def register(self, source: Source) -> str:
        """Registers the whole segment with the agent: pages must be there, and stay until `release`."""
        held, agent = source.segment, self._agent
        segment = held if isinstance(held, DeviceSegment) else on_host(held)
        listener = wire.listening_at(self._host, self._port)
        port = listener.getsockname()[1]
        try:
            self._registered, region = agent.register(segment.extents, segment.device)
            metadata = agent.metadata()
        except LocalFault:
            listener.close()
            self.release()
            raise

        def welcome(sock: socket.socket) -> None:
            sock.sendall(wire.OK)
            wire.send_frame(sock, json.dumps(region.plain()).encode())
            wire.send_frame(sock, metadata)

        def handle(sock: socket.socket) -> None:
            wire.serve(sock, source, welcome, wire.permitted)

        self._acceptor = wire.Acceptor(listener, handle, "relight-nixl-source")
        return f"nixl:{self._host}:{port}"

    def release(self) -> None:
        """The agent stays open: registering again after a wake takes no new one."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        if self._registered is not None:
            self._agent.deregister(self._registered)
            self._registered = None


class Landing:
    """A receiver's segment, registered with an agent for as long as readers use it; shared by them.

    Registering brings its pages and pins them: close every reader before the segment is dropped.
    """

    def __init__(self, agent: Agent, segment: AnySegment) -> None:
        self.agent, self.segment = agent, segment
        self._lock = threading.Lock()
        self._users = 0
        self._registered: int | None = None

    def take(self) -> None:
        """Registers for the first user. Raises LocalFault."""
        with self._lock:
            if self._registered is None:
                self._registered, _ = self.agent.register(self.segment.extents, self.segment.device)
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._registered is not None:
                self.agent.deregister(self._registered)
                self._registered = None

    def give_up(self) -> None:
        """A read does not end: the agent is destroyed, and the other readers' reads fail."""
        with self._lock:
            self._registered = None
            self.agent.close()


class NixlReader(FlightReader):
    """Reads a source's memory through one agent. `deadline` bounds each wait, in seconds."""

    def __init__(
        self, address: str, grant: str, source: str, deadline: float, landing: Landing, clock: Clock | None = None
    ) -> None:
        sock = wire.reaching(*wire.parse_endpoint(address, "nixl"), deadline, source)
        super().__init__(sock, source, deadline, clock)
        self._posted: deque[tuple[int, int]] = deque()
        self._landing: Landing | None = None
        self._met = -1
        try:
            self.hello(grant)
            landing.take()
            self._landing = landing
            self._region = self._meet(landing.agent)
        except (LocalFault, RemoteFault):
            self.close()
            raise

    def _meet(self, agent: Agent) -> Region:
        try:
            region = Region.parse(json.loads(wire.receive_frame(self.sock, MOST_TOLD)))
            self._met = agent.meet(region.agent, wire.receive_frame(self.sock, METADATA_BYTES))
        except (OSError, wire.Closed, ValueError, InvalidInput) as error:
            raise RemoteFault(f"{self.source}: no NIXL connection with it: {error or 'closed'}") from error
        return region

    @property
    def by(self) -> str:
        return self._landing.agent.card if self._landing else "no card"

    @property
    def most(self) -> int:
        return self._region.pieces.bytes

    def post(self, into: int, offset: int, length: int) -> None:
        if self._landing is None:
            raise LocalFault("the connection is closed")
        place = into, self._landing.segment.device
        self._posted.append((self._landing.agent.read(self._met, place, self._region, offset, length), length))

    def landed(self) -> Landed:
        reads = done = 0
        while self._posted and self._landing is not None:
            number, length = self._posted[0]
            state = self._landing.agent.state(number)
            if state == UNDER_WAY:
                break
            self._posted.popleft()
            if state != DONE:
                return Landed(reads, done, state)
            reads, done = reads + 1, done + length
        return Landed(reads, done, "")

    def close(self) -> None:
        """Returns when nothing is written any more to what was asked for."""
        if self._landing is not None:
            if not self._settled():
                self._landing.give_up()
            self._landing.agent.part(self._met)
            self._landing.give_back()
            self._landing = None
        super().close()

    def _settled(self) -> bool:
        """Whether all that was posted came to an end, well or not."""
        pause, until = FIRST_PAUSE, self._clock.monotonic() + SETTLE_SECONDS
        while self._posted:
            self.landed()
            if self._posted:
                if self._clock.monotonic() > until:
                    return False
                self._never.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        return True

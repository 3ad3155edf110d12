"""rdma: the receiver reads the source's registered memory by verbs; no core of the source touches a byte.

Grants, permissions and keys go over a socket of the same interface, as with all transports (transports/wire.py). Each
reader has a reliable connection of its own on the card that its address names; the key of the source's memory is told
after the grant was checked, and dies with the registration: a source deregisters before its pages go.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

from relight.core.clock import Clock, SystemClock
from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.transfer.segment import Segment, address_of
from relight.transfer.source import Source
from relight.transfer.transports import wire
from relight.transfer.transports.base import Question
from relight.transfer.transports.verbs import DEPTH, LOST_SECONDS, Connection, Device, Memory, Peer, Region

READ_STEP = 4 << 20
"""Bytes of one posted read: each costs the interpreter about the same, whatever its size."""
FIRST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between two looks at the completion queue: short reads are met at once, long ones leave the core alone."""
RELEASE_SECONDS = 5.0
"""How long a source that stops serving waits for its readers' threads."""


class RdmaListener:
    """Serves one source on one card: its control socket listens on that card's own address."""

    kind = "rdma"

    def __init__(self, device: str, host: str, port: int = 0, lost_seconds: float = LOST_SECONDS) -> None:
        self._name, self._host, self._port, self._lost_seconds = device, host, port, lost_seconds
        self._acceptor: wire.Acceptor | None = None
        self._device: Device | None = None
        self._memory: Memory | None = None
        self._readers = 0
        self._gone = threading.Condition()

    def register(self, source: Source) -> str:
        """Registers the whole segment with the card: pages must be there, and stay until `release`."""
        listener = wire.listening_at(self._host, self._port)
        port = listener.getsockname()[1]
        try:
            self._device = device = Device(self._name, self._lost_seconds)
            self._memory = memory = device.register(source.segment.address, source.segment.bytes, readable=True)
        except LocalFault:
            listener.close()
            self.release()
            raise

        def handle(sock: socket.socket) -> None:
            with self._gone:
                self._readers += 1
            try:
                _serve(sock, source, device, memory)
            finally:
                with self._gone:
                    self._readers -= 1
                    self._gone.notify_all()

        self._acceptor = wire.Acceptor(listener, handle, "relight-rdma-source")
        return f"rdma:{self._host}:{port}"

    def release(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        with self._gone:
            # Connections end before what they read through: their threads were woken, and are waited for.
            self._gone.wait_for(lambda: not self._readers, RELEASE_SECONDS)
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._device is not None:
            self._device.close()
            self._device = None


def _serve(sock: socket.socket, source: Source, device: Device, memory: Memory) -> None:
    with ExitStack() as stack:

        def welcome(sock: socket.socket) -> None:
            # Only now: who has no grant gets no queue pair either.
            connection = device.connection()
            stack.callback(connection.close)
            _introduce(sock, connection, memory)

        wire.serve(sock, source, welcome, wire.permitted)


def _introduce(sock: socket.socket, connection: Connection, memory: Memory) -> None:
    """The source's end: after the grant was found good, both ends tell each other how to be reached."""
    sock.sendall(wire.OK)
    told = {"peer": connection.peer.plain(), "region": memory.region.plain()}
    wire.send_frame(sock, json.dumps(told).encode())
    connection.connect(Peer.parse(json.loads(wire.receive_frame(sock, wire.MAX_HELLO))))
    sock.sendall(wire.OK)


class Landing:
    """A receiver's segment, registered with one card for as long as readers use it; shared by them.

    Registering brings its pages and pins them: close every reader before the segment is dropped.
    """

    def __init__(self, device: str, segment: Segment, lost_seconds: float = LOST_SECONDS) -> None:
        self.name, self.lost_seconds, self._segment = device, lost_seconds, segment
        self._lock = threading.Lock()
        self._users = 0
        self._open: tuple[Device, Memory] | None = None

    def take(self) -> tuple[Device, Memory]:
        """Opens and registers for the first user. Raises LocalFault."""
        with self._lock:
            if self._open is None:
                device = Device(self.name, self.lost_seconds)
                try:
                    self._open = device, device.register(self._segment.address, self._segment.bytes, readable=False)
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


@dataclass(slots=True)
class _Run:
    """One permitted read: how much of it was posted, is in place, and was handed on."""

    offset: int
    into: memoryview
    allowed: bool = False
    posted: int = 0
    placed: int = 0
    handed: int = 0


class RdmaReader(wire.ControlReader):
    """Reads a source's memory through one card. `deadline` bounds each wait, in seconds."""

    def __init__(
        self, address: str, grant: str, source: str, deadline: float, landing: Landing, clock: Clock | None = None
    ) -> None:
        super().__init__(wire.reaching(*wire.parse_endpoint(address, "rdma"), deadline, source), source)
        # A question that nobody even acknowledges: its link is down, and a read would have failed as soon.
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(landing.lost_seconds * 1000))
        self._answers = select.poll()
        self._answers.register(self.sock, select.POLLIN)
        self.completed = 0
        """Bytes that the card said it has read."""
        self._clock, self._deadline, self._aborted = clock or SystemClock(), deadline, False
        self._runs: deque[_Run] = deque()
        self._flying = 0
        self._never = threading.Event()
        self._connection: Connection | None = None
        self._landing: Landing | None = None
        try:
            self.hello(grant)
            device, self._memory = landing.take()
            self._landing = landing
            self._connection = device.connection()
            self._region = self._meet(self._connection)
        except (LocalFault, RemoteFault):
            self.close()
            raise

    def _meet(self, connection: Connection) -> Region:
        try:
            told = json.loads(wire.receive_frame(self.sock, wire.MAX_HELLO))
            peer, region = Peer.parse(told["peer"]), Region.parse(told["region"])
            connection.connect(peer)
            wire.send_frame(self.sock, json.dumps(connection.peer.plain()).encode())
        except (OSError, wire.Closed, ValueError, KeyError, TypeError, InvalidInput, LocalFault) as error:
            raise RemoteFault(f"{self.source}: no RDMA connection with it: {error or 'closed'}") from error
        self.status("did not connect")
        return region

    def ask(self, question: Question, into: memoryview) -> None:
        if question.offset + question.length > self._region.bytes:
            raise RemoteFault(f"{self.source}: its memory ends before {question.offset + question.length}")
        self._send(wire.READ, question)
        self._runs.append(_Run(question.offset, into))

    def abort(self) -> None:
        self._aborted = True
        super().abort()

    def fill(self, count: int) -> None:
        run = self._runs[0]
        if not run.allowed:
            self._allow(run)
        pause, until = FIRST_PAUSE, self._clock.monotonic() + self._deadline
        while run.placed - run.handed < count:
            self._post()
            if self._reap():
                pause, until = FIRST_PAUSE, self._clock.monotonic() + self._deadline
                continue
            if self._aborted or self._clock.monotonic() > until:
                raise RemoteFault(f"{self.source}: stalled on {self._name}")
            # Verbs wake nobody here: a completion channel cannot be waited on with a deadline.
            self._never.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        run.handed += count
        if run.handed == len(run.into):
            self._runs.popleft()

    @property
    def _name(self) -> str:
        return self._landing.name if self._landing else "no card"

    def _allow(self, run: _Run) -> None:
        try:
            self.status("refused a read")
        except BaseException:
            self._runs.popleft()
            raise
        run.allowed = True

    def _post(self) -> None:
        """Keeps reads in flight: of the oldest run, and of later ones whose permission is there already."""
        if self._connection is None:
            return
        for run in self._runs:
            run.allowed = run.allowed or self._allowed_already()
            if not run.allowed:
                return
            while run.posted < len(run.into) and self._flying < DEPTH:
                length = min(READ_STEP, len(run.into) - run.posted)
                place = address_of(run.into[run.posted : run.posted + length])
                try:
                    self._connection.read(self._memory, place, self._region, run.offset + run.posted, length)
                except LocalFault as error:
                    # A card refuses reads when its connection has broken, or it is gone itself: others may go on.
                    raise RemoteFault(f"{self.source}: {error}") from error
                run.posted += length
                self._flying += 1

    def _allowed_already(self) -> bool:
        """Takes a permission that has come; anything else is left until it is that read's turn."""
        try:
            # Asked first: a socket with a timeout waits that long even when told not to.
            if not self._answers.poll(0) or self.sock.recv(1, socket.MSG_PEEK) != wire.OK:
                return False
            return self.sock.recv(1) == wire.OK
        except OSError:
            return False

    def _reap(self) -> bool:
        """Counts what is in place now; whether there was anything. Raises RemoteFault when a read failed."""
        if self._connection is None:
            return False
        reads, done, failed = self._connection.completed()
        self.completed += done
        self._flying -= reads
        for run in self._runs:
            part = min(done, run.posted - run.placed)
            run.placed += part
            done -= part
        if failed:
            raise RemoteFault(f"{self.source}: a read on {self._name} failed: {failed}")
        return reads > 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._landing is not None:
            self._landing.give_back()
            self._landing = None
        super().close()

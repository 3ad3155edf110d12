"""The byte protocol of the socket transports, on both ends; tcp and shm differ in how a permitted read arrives.

    client  HELLO = frame{version, grant}
    server  status 0                                       (shm: the byte carries the segment's descriptor)
    client  question = operation u8, chunk u32, chunks u32, offset u64, length u64
      MANIFEST   server  status 0, frame{manifest}
      HELD       server  status 0, frame{bitmap of chunks, empty for all}; waits for more than `chunk` of them
      READ       server  status 0, then (tcp only) `length` bytes; or status 2: a chunk of it has not arrived there
      FINISH     server  status 0 says that pin, grant and generation were good up to now
    server  status 1 and an error frame at any of these, then the end

Whoever shows a grant that only tries is welcomed (by shm with a descriptor that names the source), and may finish.

A frame is a u32 length (at most MAX_FRAME) and that many bytes. Numbers are big-endian. Nothing is ever
unpickled: manifests are bounded JSON, weights are raw bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from relight.core.errors import Denied, InvalidInput, LocalFault, RelightError, RemoteFault
from relight.transfer.board import Bitmap
from relight.transfer.manifest import WeightManifest, parse
from relight.transfer.source import NotYet, Pin, Source
from relight.transfer.transports.base import Missing, Proven, Question

VERSION = 3
MAX_FRAME = 256 << 20
MAX_HELLO = 16 << 10
_FRAME = struct.Struct(">I")
_QUESTION = struct.Struct(">BIIQQ")
MANIFEST, HELD, READ, FINISH = range(4)
OK, REFUSED, NOT_YET = b"\x00", b"\x01", b"\x02"


PART_SECONDS, PART_READS = 1.0, 64
"""How long, and for how many pieces of what it still sends, a refused reader is waited for to hang up."""


class Refused(RemoteFault):
    """The source was reached, and would not."""


class Closed(Exception):
    """The other end closed the connection between two messages."""


def receive_into(sock: socket.socket, into: memoryview) -> None:
    """Fills `into` from the socket. Raises Closed when the peer ended before the first byte, OSError within."""
    done, total = 0, len(into)
    while done < total:
        got = sock.recv_into(into[done:], total - done)
        if not got:
            if not done:
                raise Closed
            raise ConnectionResetError("the peer closed the connection in the middle of a message")
        done += got


def receive(sock: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes."""
    data = bytearray(length)
    receive_into(sock, memoryview(data))
    return bytes(data)


def send_frame(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_FRAME.pack(len(data)) + data)


def receive_frame(sock: socket.socket, most: int = MAX_FRAME) -> bytes:
    """One frame of at most `most` bytes. Raises InvalidInput for a larger one, before reading it."""
    (length,) = _FRAME.unpack(receive(sock, _FRAME.size))
    if length > most:
        raise InvalidInput(f"a frame of {length} bytes, at most {most} are taken")
    return receive(sock, length)


class Deliver(Protocol):
    """How the bytes of a permitted read reach the receiver; shm sends none."""

    def __call__(self, sock: socket.socket, source: Source, offset: int, length: int) -> None: ...


def _refuse(sock: socket.socket, error: Exception) -> None:
    reason = str(error) if isinstance(error, RelightError) else type(error).__name__
    sock.sendall(REFUSED)
    send_frame(sock, json.dumps({"error": reason[:2000]}).encode())


def welcome_plain(sock: socket.socket) -> None:
    """Answers a hello."""
    sock.sendall(OK)


def serve(
    sock: socket.socket, source: Source, welcome: Callable[[socket.socket], None], deliver: Deliver,
    met: Callable[[socket.socket], None] = welcome_plain,
) -> None:  # fmt: skip
    """Serves one reader until it finishes or goes; the pin lives exactly as long as the connection.

    Whoever only tries is `met`, and never welcomed.
    """
    pin: Pin | None = None
    try:
        pin = source.admit(_grant(receive_frame(sock, MAX_HELLO)))
        if pin.claims.tries:
            met(sock)
            operation, *_ = _QUESTION.unpack(receive(sock, _QUESTION.size))
            if operation != FINISH:
                raise Denied("this grant lets its bearer in and no further", authenticated=True)
            source.confirm(pin)
            sock.sendall(OK)
            return
        welcome(sock)
        while True:
            _answer(sock, source, pin, deliver, *_QUESTION.unpack(receive(sock, _QUESTION.size)))
    except (RelightError, ValueError) as error:
        with suppress(OSError):
            _refuse(sock, error)
    except (Closed, OSError):
        return
    finally:
        if pin is not None:
            source.release(pin)


def _grant(hello: bytes) -> str:
    said = json.loads(hello)
    if not isinstance(said, dict) or said.get("version") != VERSION or not isinstance(said.get("grant"), str):
        raise InvalidInput(f"expected a hello of version {VERSION} with a grant")
    return str(said["grant"])


def _answer(
    sock: socket.socket, source: Source, pin: Pin, deliver: Deliver, operation: int, chunk: int, chunks: int,
    offset: int, length: int,
) -> None:  # fmt: skip
    if operation == READ:
        try:
            source.permit(pin, offset, length, chunk, chunks)
        except NotYet:
            sock.sendall(NOT_YET)
            return
        sock.sendall(OK)
        deliver(sock, source, offset, length)
        return
    frame = b""
    if operation == MANIFEST:
        frame = source.dumped()
    elif operation == HELD:
        bitmap = source.held(pin, chunk)
        frame = b"" if bitmap is None else bitmap.dump()
    elif operation != FINISH:
        raise InvalidInput(f"operation {operation} does not exist")
    source.confirm(pin)
    sock.sendall(OK)
    if operation != FINISH:
        send_frame(sock, frame)


def permitted(sock: socket.socket, source: Source, offset: int, length: int) -> None:
    """For readers that fetch the bytes themselves: the next permission waits for the source's pace."""
    source.pace.wait(length)


def _part(sock: socket.socket) -> None:
    """Ends a connection so that the last answer arrives.

    Closing a socket with questions unread resets the connection, and the kernel then throws away what the other end has
    not read yet: the reason for which it was refused.
    """
    with suppress(OSError):
        sock.settimeout(PART_SECONDS)
        sock.shutdown(socket.SHUT_WR)
        for _ in range(PART_READS):
            if not sock.recv(1 << 16):
                return


class Acceptor:
    """Accepts connections on one listening socket, a thread for each, until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        handle: Callable[[socket.socket], None],
        name: str,
        prepare: Callable[[socket.socket], socket.socket] = lambda sock: sock,
    ) -> None:
        """`prepare` makes of an accepted connection the one that is served, in its own thread; it may raise OSError."""
        self._listener, self._handle, self._prepare = listener, handle, prepare
        self._open: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(sock,), name=self._thread.name, daemon=True).start()

    def _one(self, accepted: socket.socket) -> None:
        try:
            sock = self._prepare(accepted)
        except OSError:
            accepted.close()
            return
        with sock:
            with self._lock:
                if self._closed:
                    return
                self._open.add(sock)
            try:
                self._handle(sock)
                _part(sock)
            finally:
                with self._lock:
                    self._open.discard(sock)

    def close(self) -> None:
        """Stops accepting and cuts what is open."""
        with self._lock:
            # A reader may be coming or leaving at this very moment: the set is read while nobody changes it.
            self._closed = True
            served = list(self._open)
        # shutdown wakes the thread that blocks in accept; close alone does not.
        for sock in (self._listener, *served):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._listener.close()
        self._thread.join(timeout=5)


class ControlReader:
    """The receiver's half of the protocol over a connected socket; subclasses bring the bytes."""

    lends = direct = False
    proven: Proven | None = None

    def __init__(self, sock: socket.socket, source: str) -> None:
        """`sock` is connected; its timeout bounds every single wait."""
        self.source = source
        self.sock = sock

    def hello(self, grant: str) -> None:
        """Presents the grant. Raises RemoteFault."""
        try:
            send_frame(self.sock, json.dumps({"version": VERSION, "grant": grant}).encode())
        except OSError as error:
            raise RemoteFault(f"{self.source}: gone before it answered: {error}") from error
        self.status("refused this reader")

    def describe(self) -> WeightManifest:
        self._send(MANIFEST, Question(0, 0, 0, 0))
        self.status("gave no manifest")
        try:
            return parse(receive_frame(self.sock))
        except (OSError, Closed, InvalidInput) as error:
            # A hostile manifest is the source's fault.
            raise RemoteFault(f"{self.source}: {error or 'connection closed'}") from error

    def held(self, more_than: int, count: int) -> Bitmap:
        self._send(HELD, Question(more_than, 0, 0, 0))
        self.status("does not say what it holds")
        try:
            data = receive_frame(self.sock)
            return Bitmap(count, data or b"\xff" * -(-count // 8))
        except (OSError, Closed, InvalidInput) as error:
            raise RemoteFault(f"{self.source}: {error or 'connection closed'}") from error

    def _send(self, operation: int, question: Question) -> None:
        # Who refused has closed already, and its reason waits to be read: so a failure here is met as an answer.
        with suppress(BrokenPipeError, ConnectionResetError):
            try:
                self.sock.sendall(_QUESTION.pack(operation, *question))
            except TimeoutError as error:
                raise RemoteFault(f"{self.source}: took no question for {self.sock.gettimeout()} s") from error

    def status(self, what: str) -> None:
        """Waits for the answer to one question. Raises RemoteFault with the source's own reason."""
        try:
            status = self.answer()
            if status == OK:
                return
            if status == NOT_YET:
                raise Missing(f"{self.source} does not have it yet")
            reason = json.loads(receive_frame(self.sock, 1 << 16)).get("error", "no reason given")
        except TimeoutError as error:
            # With a number it is the kernel's: it gave up sending, for longer than the socket's own time-out allows.
            why = (
                "to what it does not even acknowledge (link down?)"
                if error.errno
                else f"within {self.sock.gettimeout()} s"
            )
            raise RemoteFault(f"{self.source}: no answer {why}") from error
        except (OSError, Closed, ValueError, AttributeError, InvalidInput) as error:
            raise RemoteFault(f"{self.source}: connection lost ({error or 'closed'})") from error
        raise Refused(f"{self.source} {what}: {reason}")

    def answer(self) -> bytes:
        """The one byte that begins each answer."""
        return receive(self.sock, 1)

    def finish(self) -> None:
        self._send(FINISH, Question(0, 0, 0, 0))
        self.status("withdrew its permission")

    def abort(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


class SocketReader(ControlReader, ABC):
    """A reader that brings the bytes piece by piece, in the order of its questions; subclasses say from where."""

    def __init__(self, sock: socket.socket, source: str) -> None:
        super().__init__(sock, source)
        self._asked: deque[tuple[int, memoryview]] = deque()
        self._at, self._into = 0, memoryview(b"")

    def ask(self, question: Question, into: memoryview) -> None:
        self._send(READ, question)
        self._asked.append((question.offset, into))

    def fill(self, count: int, instead: memoryview | None = None) -> memoryview | None:
        at, into = self.next(count)
        return self.take(at, into if instead is None else instead)

    def next(self, count: int) -> tuple[int, memoryview]:
        """Where the next `count` permitted bytes lie, and where they belong. Raises Missing or RemoteFault."""
        if not self._into:
            at, into = self._asked.popleft()
            self.status("refused a read")
            self._at, self._into = at, into
        at, into = self._at, self._into[:count]
        self._at += count
        self._into = self._into[count:]
        return at, into

    @abstractmethod
    def take(self, offset: int, into: memoryview) -> memoryview | None:
        """Brings the permitted bytes from `offset` on into place, or lends them."""


def connected(sock: socket.socket, address: object, deadline: float, source: str) -> socket.socket:
    """Connects `sock` within `deadline` seconds, which then bounds each single wait. Raises RemoteFault."""
    sock.settimeout(deadline)
    try:
        sock.connect(address)  # type: ignore[arg-type]
    except OSError as error:
        sock.close()
        raise RemoteFault(f"{source} at {address}: cannot connect: {error}") from error
    return sock


def listening(sock: socket.socket, address: object) -> socket.socket:
    """Binds and listens. Raises LocalFault naming the address."""
    try:
        sock.bind(address)  # type: ignore[arg-type]
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise LocalFault(f"cannot listen at {address}: {error}") from error
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening_at(host: str, port: int) -> socket.socket:
    """A TCP socket that listens at one address of one interface. Raises LocalFault naming the address."""
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listening(sock, (host, port))


def reaching(host: str, port: int, deadline: float, source: str, own: str = "") -> socket.socket:
    """A TCP connection to `source`, from the address `own` where one is given. Raises RemoteFault, LocalFault."""
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    if own:
        try:
            sock.bind((own, 0))
        except OSError as error:
            sock.close()
            raise LocalFault(f"cannot speak from {own}: {error}") from error
    connected(sock, (host, port), deadline, source)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def parse_endpoint(address: str, *schemes: str) -> tuple[str, int]:
    """(host, port) of `scheme:host:port` with one of `schemes`. Raises InvalidInput."""
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme not in schemes or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInput(f"expected an address {' or '.join(f'{s}:host:port' for s in schemes)}, got {address!r}")
    return host, int(port)

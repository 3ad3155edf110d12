"""The byte protocol of the socket transports, on both ends; tcp and shm differ in how a permitted read arrives.

    client  HELLO = frame{version, grant}
    server  frame{manifest bytes} or an error frame        (shm: the frame carries the segment's descriptor)
    client  READ  = offset u64, length u64
    server  status u8 = 0, then (tcp only) `length` bytes; or status 1 and an error frame, then the end
    client  READ with length 0 = finish: status 0 says that pin, grant and generation were good up to now

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
from typing import Protocol

from relight.core.errors import InvalidInput, LocalFault, RelightError, RemoteFault
from relight.transfer.manifest import WeightManifest, parse
from relight.transfer.source import Pin, Source

VERSION = 1
MAX_FRAME = 256 << 20
MAX_HELLO = 16 << 10
_FRAME = struct.Struct(">I")
_READ = struct.Struct(">QQ")
OK, REFUSED = b"\x00", b"\x01"


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


def serve(
    sock: socket.socket,
    source: Source,
    welcome: Callable[[socket.socket, bytes], None],
    deliver: Deliver,
) -> None:
    """Serves one reader until it finishes or goes; the pin lives exactly as long as the connection."""
    pin: Pin | None = None
    try:
        try:
            hello = json.loads(receive_frame(sock, MAX_HELLO))
            if (
                not isinstance(hello, dict)
                or hello.get("version") != VERSION
                or not isinstance(hello.get("grant"), str)
            ):
                raise InvalidInput(f"expected a hello of version {VERSION} with a grant")
            pin = source.admit(hello["grant"])
        except (RelightError, ValueError) as error:
            _refuse(sock, error)
            return
        welcome(sock, source.dumped())
        while True:
            offset, length = _READ.unpack(receive(sock, _READ.size))
            try:
                source.permit(pin, offset, length or 1)
            except RelightError as error:
                _refuse(sock, error)
                return
            sock.sendall(OK)
            if length:
                deliver(sock, source, offset, length)
    except (Closed, OSError):
        return
    finally:
        if pin is not None:
            source.release(pin)


def welcome_plain(sock: socket.socket, manifest: bytes) -> None:
    """Answers a hello with the manifest alone."""
    sock.sendall(OK)
    send_frame(sock, manifest)


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


class SocketReader(ABC):
    """The receiver's half of the protocol over a connected socket; subclasses say where the bytes are."""

    def __init__(self, sock: socket.socket, source: str) -> None:
        self.source = source
        self.sock = sock
        self._asked: deque[tuple[int, int]] = deque()
        self._at = self._left = 0

    def hello(self, grant: str) -> bytes:
        """Presents the grant; returns the manifest's bytes. Raises RemoteFault."""
        try:
            send_frame(self.sock, json.dumps({"version": VERSION, "grant": grant}).encode())
            self.status("refused this reader")
            return receive_frame(self.sock)
        except (OSError, Closed, InvalidInput) as error:
            raise RemoteFault(f"{self.source}: no manifest: {error or 'connection closed'}") from error

    def parsed(self, data: bytes) -> WeightManifest:
        """A hostile manifest is the source's fault."""
        try:
            return parse(data)
        except InvalidInput as error:
            raise RemoteFault(f"{self.source}: {error}") from error

    def ask(self, offset: int, length: int) -> None:
        self._send(offset, length)
        self._asked.append((offset, length))

    def fill(self, into: memoryview) -> None:
        if not self._left:
            self._at, self._left = self._asked.popleft()
            self.status("refused a read")
        self.take(self._at, into)
        self._at += len(into)
        self._left -= len(into)

    @abstractmethod
    def describe(self) -> WeightManifest:
        """The source's manifest, parsed and bounded."""

    @abstractmethod
    def take(self, offset: int, into: memoryview) -> None:
        """Brings the permitted bytes from `offset` on into place."""

    def _send(self, offset: int, length: int) -> None:
        try:
            self.sock.sendall(_READ.pack(offset, length))
        except OSError as error:
            raise RemoteFault(f"{self.source}: gone while asked: {error}") from error

    def status(self, what: str) -> None:
        """Waits for the answer to one question. Raises RemoteFault with the source's own reason."""
        try:
            if self.answer() == OK:
                return
            reason = json.loads(receive_frame(self.sock, 1 << 16)).get("error", "no reason given")
        except TimeoutError as error:
            raise RemoteFault(f"{self.source}: no answer within {self.sock.gettimeout()} s") from error
        except (OSError, Closed, ValueError, AttributeError, InvalidInput) as error:
            raise RemoteFault(f"{self.source}: connection lost ({error or 'closed'})") from error
        raise RemoteFault(f"{self.source} {what}: {reason}")

    def answer(self) -> bytes:
        """The one byte that begins each answer."""
        return receive(self.sock, 1)

    def finish(self) -> None:
        self._send(0, 0)
        self.status("withdrew its permission")

    def close(self) -> None:
        self.sock.close()


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
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise LocalFault(f"cannot listen at {address}: {error}") from error
    return sock

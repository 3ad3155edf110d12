"""tcp: blocking sockets, a thread per stream, received straight into place. For hosts without anything faster.

A device's memory is sent by way of pinned buffers, a set for each connection that reads.

With certificates, the same over TLS, under addresses of their own (`tls:`): a receiver that has certificates reads from
no source that lacks them, and the other way round.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TypeVar

from relight.core.errors import LocalFault, RemoteFault
from relight.core.tls import TlsFiles
from relight.transfer.bounce import Bounce
from relight.transfer.device_segment import DeviceSegment, on_host
from relight.transfer.onepass import WIDTH, received
from relight.transfer.segment import spans
from relight.transfer.source import Source
from relight.transfer.transports import secured, wire
from relight.transfer.verify import BLOCK_BYTES

T = TypeVar("T")


def _send(sock: socket.socket, source: Source, offset: int, length: int) -> None:
    """Sends from the segment's pages themselves: nothing is copied here, and the serving core stays free."""
    segment = on_host(source.segment)
    for start, stop in _paced(source, offset, length):
        while start < stop:
            # Pages under way are read until they are acknowledged. They cannot change: the reader's pin is held until
            # it has all of them, or is cut.
            sent = os.sendfile(sock.fileno(), segment.fd, start, stop - start)
            if not sent:
                raise ConnectionResetError("the segment ended before the read did")
            start += sent


def _send_copied(sock: socket.socket, source: Source, offset: int, length: int) -> None:
    """Sends a copy: through TLS, which has to touch every byte anyway, and to a reader on this host. Of pages that are
    lent both processors would keep count, one by one, which takes twice the time of a copy."""
    segment = on_host(source.segment)
    for start, stop in _paced(source, offset, length):
        sock.sendall(segment.view[start:stop])


def _within_host(sock: socket.socket) -> bool:
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:
        # Whoever came has gone again, which is found out by the first answer.
        return False


class _Staged:
    """Sends a device's memory to one reader; buffers are made for the first read that was permitted."""

    def __init__(self, segment: DeviceSegment, left: ExitStack) -> None:
        self._segment, self._left = segment, left
        self._bounce: Bounce | None = None

    def __call__(self, sock: socket.socket, source: Source, offset: int, length: int) -> None:
        bounce = self._bounce = self._bounce or self._left.enter_context(self._segment.bounce())
        at = self._segment.at(offset, offset + length) - offset
        for start, stop in _paced(source, offset, length):
            blocks = ((at + low, high - low) for low, high in spans(start, stop, BLOCK_BYTES))
            with closing(bounce.fetch(blocks)) as parts:
                for part in parts:
                    sock.sendall(part)


def _paced(source: Source, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """The parts of a read, each as soon as the source's pace lets it go."""
    end = offset + length
    while offset < end:
        step = source.pace.step(end - offset)
        source.pace.wait(step)
        yield offset, offset + step
        offset += step


RELEASE_SECONDS = 5.0
"""How long a source on a device that stops serving waits for copies that its readers' threads have begun."""


class TcpListener:
    """Serves one source on one address of one interface; never on all of them unless told so."""

    kind = "tcp"

    def __init__(self, host: str, port: int = 0, tls: TlsFiles | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._acceptor: wire.Acceptor | None = None
        self._staging = 0
        self._gone = threading.Condition()

    def register(self, source: Source) -> str:
        segment = source.segment if isinstance(source.segment, DeviceSegment) else on_host(source.segment)
        context = secured.serving(self._tls) if self._tls else None
        listener = wire.listening_at(self._host, self._port)
        port = listener.getsockname()[1]

        def prepare(sock: socket.socket) -> socket.socket:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return secured.accepted(sock, context) if context else sock

        def handle(sock: socket.socket) -> None:
            if isinstance(segment, DeviceSegment):
                self._stage(sock, source, segment)
            else:
                copied = context is not None or _within_host(sock)
                wire.serve(sock, source, wire.welcome_plain, _send_copied if copied else _send)

        self._acceptor = wire.Acceptor(listener, handle, "relight-tcp-source", prepare)
        return f"{'tls' if context else 'tcp'}:{self._host}:{port}"

    def _stage(self, sock: socket.socket, source: Source, segment: DeviceSegment) -> None:
        with self._gone:
            self._staging += 1
        try:
            with ExitStack() as left:
                wire.serve(sock, source, wire.welcome_plain, _Staged(segment, left))
        finally:
            with self._gone:
                self._staging -= 1
                self._gone.notify_all()

    def release(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        with self._gone:
            # A device's memory must not go while anything copies from it; their connections have ended already.
            self._gone.wait_for(lambda: not self._staging, RELEASE_SECONDS)


def _secured(sock: socket.socket, tls: TlsFiles, source: str) -> socket.socket:
    try:
        return secured.reading(tls).wrap_socket(sock)
    except LocalFault:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise RemoteFault(f"{source}: no TLS with it: {error}") from error


class TcpReader(wire.SocketReader):
    """One stream from a source over TCP. `deadline` bounds each wait, in seconds."""

    def __init__(self, address: str, grant: str, source: str, deadline: float, tls: TlsFiles | None = None) -> None:
        host, port = wire.parse_endpoint(address, "tcp", "tls")
        if address.startswith("tls:") and tls is None:
            raise LocalFault(f"{source} serves over TLS alone, and this member has no certificate: set data_tls")
        if address.startswith("tcp:") and tls is not None:
            raise RemoteFault(f"{source} serves in the clear, and this member reads over TLS alone: set data_tls there")
        sock = wire.reaching(host, port, deadline, source)
        if tls is not None:
            sock = _secured(sock, tls, source)
        super().__init__(sock, source)
        if tls is None and WIDTH:
            self.proven = self._proven
        try:
            self.hello(grant)
        except RemoteFault:
            self.close()
            raise

    def take(self, offset: int, into: memoryview) -> None:
        self._brought(offset, lambda: wire.receive_into(self.sock, into))

    def _proven(self, count: int, parts: Sequence[tuple[int, int]]) -> bytes:
        offset, into = self.next(count)
        return self._brought(offset, lambda: received(self.sock, into, parts))

    def _brought(self, offset: int, bring: Callable[[], T]) -> T:
        try:
            return bring()
        except TimeoutError as error:
            raise RemoteFault(f"{self.source}: stalled for {self.sock.gettimeout()} s at offset {offset}") from error
        except (OSError, EOFError, wire.Closed) as error:
            raise RemoteFault(f"{self.source}: connection lost at offset {offset} ({error or 'closed'})") from error

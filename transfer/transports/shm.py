"""shm: the source's pages on the same host, reached by a passed descriptor; no byte goes through a socket.

The unix socket carries grants, permissions and the descriptor. It lies in a directory that only the owner
may enter, and both ends check each other's uid: a stranger that squats the path gets nothing.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.transfer.device_segment import on_host
from relight.transfer.manifest import WeightManifest
from relight.transfer.segment import MappedPeer
from relight.transfer.source import Source
from relight.transfer.transports import wire

_UCRED = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int:
    """The user id at the other end of a unix socket, as the kernel knows it."""
    return int(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


def listening_here(path: Path) -> socket.socket:
    """A unix socket at `path`, for its owner alone; what lay there before is gone. Raises LocalFault."""
    path.unlink(missing_ok=True)
    listener = wire.listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path))
    path.chmod(0o600)
    return listener


class ShmListener:
    """Serves one source on a unix socket."""

    kind = "shm"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._acceptor: wire.Acceptor | None = None

    def register(self, source: Source) -> str:
        segment = on_host(source.segment)

        def welcome(sock: socket.socket) -> None:
            descriptor = segment.readonly_fd()
            try:
                socket.send_fds(sock, [wire.OK], [descriptor])
            finally:
                os.close(descriptor)

        def handle(sock: socket.socket) -> None:
            if peer_uid(sock) == os.geteuid():
                wire.serve(sock, source, welcome, wire.permitted, lambda sock: _met(sock, source.instance))

        self._acceptor = wire.Acceptor(listening_here(self._path), handle, "relight-shm-source")
        return f"unix:{self._path}"

    def release(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
            self._path.unlink(missing_ok=True)


def _met(sock: socket.socket, instance: str) -> None:
    """Passes a descriptor of memory that names the source: only who shares this kernel can read it."""
    descriptor = os.memfd_create(f"relight-{instance}")
    try:
        os.write(descriptor, instance.encode())
        socket.send_fds(sock, [wire.OK], [descriptor])
    finally:
        os.close(descriptor)


def parse_address(address: str, wanted: str = "unix") -> str:
    """The path of `unix:/path`, or of another `wanted` scheme. Raises InvalidInput."""
    scheme, _, path = address.partition(":")
    if scheme != wanted or not path.startswith("/"):
        raise InvalidInput(f"expected an address {wanted}:/path, got {address!r}")
    return path


class Pages:
    """A source's pages as one receiver's connections share them: mapped by the first, unmapped after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peer: MappedPeer | None = None
        self._users = 0

    def take(self, descriptor: int) -> MappedPeer:
        """The mapping of what `descriptor` names, which this takes ownership of. Raises LocalFault."""
        with self._lock:
            if self._peer is None:
                self._peer = MappedPeer(descriptor)
            else:
                os.close(descriptor)
            self._users += 1
            return self._peer

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._peer is not None:
                self._peer.close()
                self._peer = None


class ShmKnock(wire.ControlReader):
    """Goes in with a grant that only tries; the descriptor that comes proves who answered, and that memory passes."""

    def __init__(self, address: str, grant: str, source: str, deadline: float) -> None:
        """Raises RemoteFault."""
        path = parse_address(address)
        sock = wire.connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path, deadline, source)
        super().__init__(sock, source)
        self._named = ""
        try:
            if peer_uid(sock) != os.geteuid():
                raise RemoteFault(f"{source}: another user's process answers at {path}")
            self.hello(grant)
            if self._named != source:
                raise RemoteFault(f"{source}: {self._named or 'nobody who passes a descriptor'} answers at {path}")
        except RemoteFault:
            self.close()
            raise

    def answer(self) -> bytes:
        if self._named:
            return super().answer()
        data, descriptors, _, _ = socket.recv_fds(self.sock, 1, 1)
        for descriptor in descriptors:
            self._named = os.pread(descriptor, 256, 0).decode(errors="replace")
            os.close(descriptor)
        return data


class ShmReader(wire.SocketReader):
    """Lends a source's pages through a mapping. `deadline` bounds each wait, in seconds."""

    lends = True

    def __init__(self, address: str, grant: str, source: str, deadline: float, pages: Pages | None = None) -> None:
        """Readers of one source may share its `pages`."""
        path = parse_address(address)
        sock = wire.connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path, deadline, source)
        super().__init__(sock, source)
        self._pages = pages or Pages()
        self._passed: list[int] = []
        self._peer: MappedPeer | None = None
        self.descriptor = -1
        """Names the source's pages, to read; closed with this reader."""
        try:
            if peer_uid(sock) != os.geteuid():
                raise RemoteFault(f"{source}: another user's process answers at {path}")
            self.hello(grant)
            if not self._passed:
                raise RemoteFault(f"{source}: passed no descriptor")
            self.descriptor = os.dup(self._passed[-1])
            self._peer = self._pages.take(self._passed.pop())
        except LocalFault as error:
            self.close()
            raise RemoteFault(f"{source}: {error}") from error
        except RemoteFault:
            self.close()
            raise

    def answer(self) -> bytes:
        # The descriptor travels with the first answer; the kernel drops it when plain recv takes that byte.
        if self._peer is not None:
            return super().answer()
        data, descriptors, _, _ = socket.recv_fds(self.sock, 1, 1)
        self._passed.extend(descriptors)
        return data

    def describe(self) -> WeightManifest:
        manifest = super().describe()
        if self._peer is None or manifest.segment_bytes > self._peer.bytes:
            raise RemoteFault(f"{self.source}: its segment is shorter than its manifest says")
        return manifest

    def take(self, offset: int, into: memoryview) -> memoryview:
        if self._peer is None or offset + len(into) > self._peer.bytes:
            raise RemoteFault(f"{self.source}: its segment ends before {offset + len(into)}")
        return self._peer.view[offset : offset + len(into)]

    def close(self) -> None:
        super().close()
        for descriptor in self._passed:
            os.close(descriptor)
        self._passed.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._peer is not None:
            self._peer = None
            self._pages.give_back()

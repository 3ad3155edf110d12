"""nvlink: the receiver's device copies out of the source's, both in one node; no byte passes through the host.

A unix socket carries grants, permissions and, after the grant was checked, the source's allocations: as descriptors
where the allocator made its memory with cuMemCreate for them, by legacy CUDA IPC for cudaMalloc's. Whoever maps them
keeps the memory alive: a reader unmaps before its connection ends, and a source that sleeps waits for that.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from relight.core.clock import Clock
from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.transfer.device_segment import DeviceSegment
from relight.transfer.manifest import WeightManifest
from relight.transfer.source import Source
from relight.transfer.transports import wire
from relight.transfer.transports.cuda import FD, Cuda, CudaFault, Event, Mapped, Piece, Stream, pieces
from relight.transfer.transports.flight import FlightReader, Landed
from relight.transfer.transports.shm import listening_here, parse_address, peer_uid

MOST_HANDLES = 1 << 20
"""Bytes of the frame with all pieces."""
AT_ONCE = 64
"""Descriptors in one message: the kernel takes 253, and each end keeps so many open."""


class NvlinkListener:
    """Serves one source in a device's memory on a unix socket."""

    kind = "nvlink"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._acceptor: wire.Acceptor | None = None

    def register(self, source: Source) -> str:
        """Memory must be there, and stay until `release`. Raises LocalFault when it cannot be passed on."""
        segment = source.segment
        if not isinstance(segment, DeviceSegment):
            raise LocalFault("nvlink serves memory of a device, and this source lies in memory of the host")
        # Tried once before anybody asks: not every allocator's memory can be passed on.
        for _, descriptor in segment.exported():
            _close(descriptor)

        def handle(sock: socket.socket) -> None:
            if peer_uid(sock) == os.geteuid():
                wire.serve(sock, source, lambda sock: _pass_on(sock, segment), wire.permitted)

        self._acceptor = wire.Acceptor(listening_here(self._path), handle, "relight-nvlink-source")
        return f"nvlink:{self._path}"

    def release(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
            self._path.unlink(missing_ok=True)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _pass_on(sock: socket.socket, segment: DeviceSegment) -> None:
    exported = list(segment.exported())
    descriptors = [descriptor for _, descriptor in exported if descriptor >= 0]
    try:
        sock.sendall(wire.OK)
        wire.send_frame(sock, json.dumps([asdict(piece) for piece, _ in exported]).encode())
        for at in range(0, len(descriptors), AT_ONCE):
            socket.send_fds(sock, [wire.OK], descriptors[at : at + AT_ONCE])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def place(mapped: Sequence[Mapped], offset: int, length: int) -> int:
    """Where [offset, offset + length) of a source lies here. Raises LocalFault unless it is in one piece."""
    for piece in mapped:
        if piece.at <= offset and offset + length <= piece.at + piece.bytes:
            return piece.address + offset - piece.at
    raise LocalFault(f"[{offset}, {offset + length}) does not lie in one piece of its memory")


class Pair:
    """One source's memory as a receiver's device reaches it, and the stream between the two; shared by its readers."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._lock = threading.Lock()
        self._users = 0
        self._stream: Stream | None = None
        self._mapped: list[Mapped] = []

    def take(self, passed: Sequence[tuple[Piece, int]]) -> tuple[Stream, Sequence[Mapped]]:
        """Maps what the source has passed, for the first user; owns the descriptors. Raises LocalFault."""
        left = list(passed)
        try:
            with self._lock:
                stream = self._stream = self._stream or self.cuda.stream()
                if not self._users:
                    try:
                        while left:
                            self._mapped.append(self.cuda.map(*left.pop(0)))
                    except LocalFault:
                        self._unmap()
                        raise
                self._users += 1
                return stream, self._mapped
        finally:
            for _, descriptor in left:
                _close(descriptor)

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._unmap()

    def _unmap(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        for mapped in self._mapped:
            self.cuda.unmap(mapped)
        self._mapped = []


class NvlinkReader(FlightReader):
    """Copies out of a source's device memory. `deadline` bounds each wait, in seconds."""

    def __init__(
        self, address: str, grant: str, source: str, deadline: float, pair: Pair, clock: Clock | None = None
    ) -> None:
        path = parse_address(address, "nvlink")
        sock = wire.connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path, deadline, source)
        super().__init__(sock, source, deadline, clock)
        self._posted: deque[tuple[Event, int]] = deque()
        self._pair: Pair | None = None
        try:
            if peer_uid(sock) != os.geteuid():
                raise RemoteFault(f"{source}: another user's process answers at {path}")
            self.hello(grant)
            self._stream, self._mapped = self._meet(pair)
            self._pair = pair
        except (LocalFault, RemoteFault):
            self.close()
            raise

    def _meet(self, pair: Pair) -> tuple[Stream, Sequence[Mapped]]:
        descriptors: list[int] = []
        try:
            told = pieces(json.loads(wire.receive_frame(self.sock, MOST_HANDLES)))
            wanted = sum(piece.kind == FD for piece in told)
            while len(descriptors) < wanted:
                data, passed, _, _ = socket.recv_fds(self.sock, 1, AT_ONCE)
                descriptors.extend(passed)
                if data != wire.OK or not passed or len(descriptors) > wanted:
                    raise InvalidInput(f"expected {wanted} descriptors, got {len(descriptors)}")
            left = iter(descriptors)
            together = [(piece, next(left) if piece.kind == FD else -1) for piece in told]
            descriptors = []
            return pair.take(together)
        except (OSError, wire.Closed, ValueError, InvalidInput) as error:
            raise RemoteFault(f"{self.source}: no memory of it: {error or 'closed'}") from error
        except CudaFault as error:
            if error.theirs:
                raise RemoteFault(f"{self.source}: what it passed is no memory: {error}") from error
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def describe(self) -> WeightManifest:
        manifest = super().describe()
        if manifest.segment_bytes > self.most:
            raise RemoteFault(f"{self.source}: its memory is shorter than its manifest says")
        return manifest

    @property
    def by(self) -> str:
        return f"device {self._pair.cuda.device}" if self._pair else "no device"

    @property
    def most(self) -> int:
        return max(piece.at + piece.bytes for piece in self._mapped)

    def post(self, into: int, offset: int, length: int) -> None:
        event = self._stream.copy(into, place(self._mapped, offset, length), length)
        self._posted.append((event, length))

    def landed(self) -> Landed:
        reads = done = 0
        try:
            while self._posted and self._stream.done(self._posted[0][0]):
                _, length = self._posted.popleft()
                reads, done = reads + 1, done + length
        except LocalFault as error:
            self._posted.popleft()
            return Landed(reads, done, str(error))
        return Landed(reads, done, "")

    def close(self) -> None:
        """Returns when nothing is copied any more to what was asked for."""
        if self._pair is not None:
            if self._posted:
                self._stream.settle()
                while self._posted:
                    self.landed()
            self._pair.give_back()
            self._pair = None
        super().close()

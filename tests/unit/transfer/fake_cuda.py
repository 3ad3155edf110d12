"""A device of one process whose memory is files in the host's: what is passed on are real descriptors.

Copies are in place when they are looked at, so that they are under way until then. What it cannot show is in tests/gpu.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import dataclass, field

from relight.core.errors import LocalFault
from relight.transfer.segment import MappedPeer, Segment
from relight.transfer.transports.cuda import FD, CudaFault, Mapped, Piece

_numbers = itertools.count(1)


@dataclass
class FakeMemory:
    """A device's memory: allocations at consecutive addresses, each passed on by a descriptor if it can be."""

    host: Segment
    sizes: tuple[int, ...]
    exportable: bool = True

    def find(self, address: int) -> tuple[int, int]:
        """(offset, bytes) of the allocation that begins at `address`."""
        at = 0
        for size in self.sizes:
            if self.host.address + at == address:
                return at, size
            at += size
        raise AssertionError("no allocation begins there")


@dataclass
class FakeStream:
    broken: bool = False
    _posted: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def copy(self, into: int, address: int, length: int) -> int:
        number = next(_numbers)
        self._posted[number] = into, address, length
        return number

    def done(self, event: int) -> bool:
        into, address, length = self._posted.pop(event)
        if self.broken:
            raise LocalFault("copying between devices: CUDA_ERROR_ECC_UNCORRECTABLE (214)")
        ctypes.memmove(into, address, length)
        return True

    def settle(self) -> None:
        return

    def close(self) -> None:
        assert not self._posted, "a stream is closed after its copies"


class FakeCuda:
    def __init__(self, device: int, memory: FakeMemory | None = None) -> None:
        self.device, self._memory = device, memory
        self.mapped: dict[int, MappedPeer] = {}
        self.broken = False

    def export(self, address: int, length: int) -> tuple[Piece, int]:
        assert self._memory is not None
        at, size = self._memory.find(address)
        assert size == length
        if not self._memory.exportable:
            raise LocalFault(
                f"passing on {length} bytes of device {self.device}: its allocator made it without handles"
            )
        # The file is one; each allocation of it is told by how much is to be skipped.
        return Piece(FD, at, length), os.dup(self._memory.host.fd)

    def map(self, piece: Piece, descriptor: int) -> Mapped:
        try:
            peer = MappedPeer(descriptor)
        except LocalFault as error:
            raise CudaFault(f"mapping a peer's memory: {error}", theirs=True) from error
        if piece.skip + piece.bytes > peer.bytes:
            peer.close()
            raise CudaFault("mapping a peer's memory: CUDA_ERROR_INVALID_VALUE (1)", theirs=True)
        self.mapped[peer.address] = peer
        return Mapped(peer.address + piece.skip, piece.bytes, peer.address, peer.bytes, FD)

    def unmap(self, mapped: Mapped) -> None:
        self.mapped.pop(mapped.base).close()

    def stream(self) -> FakeStream:
        return FakeStream(self.broken)

    def to_host(self, into: int, address: int, length: int) -> None:
        ctypes.memmove(into, address, length)

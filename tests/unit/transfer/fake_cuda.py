"""A device of one process whose memory is files in the host's: what is passed on are real descriptors.

Copies are in place when they are looked at, so that they are under way until then. What it cannot show is in tests/gpu.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import dataclass, field

from relight.core.errors import LocalFault
from relight.transfer.extents import Extent
from relight.transfer.segment import MappedPeer, Segment
from relight.transfer.transports.cuda import FD, CudaFault, Mapped, Piece

_numbers = itertools.count(1)


@dataclass
class FakeMemory:
    """A device's memory: a file of the host's, passed on by descriptors if it can be."""

    host: Segment
    exportable: bool = True


Copy = tuple[int, int, int]


@dataclass
class FakeStream:
    broken: bool = False
    _posted: dict[int, Copy] = field(default_factory=dict)

    def copy(self, into: int, address: int, length: int) -> int:
        number = next(_numbers)
        self._posted[number] = into, address, length
        return number

    up = down = copy

    def done(self, event: int) -> bool:
        self.wait(event)
        return True

    def wait(self, event: int) -> None:
        into, address, length = self._posted.pop(event)
        if self.broken:
            raise LocalFault("copying between devices: CUDA_ERROR_ECC_UNCORRECTABLE (214)")
        ctypes.memmove(into, address, length)

    def settle(self) -> None:
        return

    def close(self) -> None:
        assert not self._posted, "a stream is closed after its copies"


class FakeCuda:
    def __init__(self, device: int, memory: FakeMemory | None = None) -> None:
        self.device, self._memory = device, memory
        self.mapped: dict[int, MappedPeer] = {}
        self.pins: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.broken = self.dma_bufs = False

    def export(self, extent: Extent) -> tuple[Piece, int]:
        assert self._memory is not None
        if not self._memory.exportable:
            raise LocalFault(
                f"passing on {extent.bytes} bytes of device {self.device}: its allocator made it without handles"
            )
        # The file is one; each allocation of it is told by how much is to be skipped.
        at = extent.address - self._memory.host.address
        return Piece(FD, at, extent.bytes), os.dup(self._memory.host.fd)

    def pinned(self, length: int) -> int:
        made = ctypes.create_string_buffer(length)
        self.pins[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def unpin(self, address: int) -> None:
        del self.pins[address]

    def dma_buf(self, address: int, length: int) -> int:
        if not self.dma_bufs:
            raise LocalFault(f"a DMA buffer of device {self.device}: CUDA_ERROR_NOT_SUPPORTED (801)")
        return os.open("/dev/null", os.O_RDONLY)

    def map(self, piece: Piece, descriptor: int) -> Mapped:
        try:
            peer = MappedPeer(descriptor)
        except LocalFault as error:
            raise CudaFault(f"mapping a peer's memory: {error}", theirs=True) from error
        if piece.skip + piece.bytes > peer.bytes:
            peer.close()
            raise CudaFault("mapping a peer's memory: CUDA_ERROR_INVALID_VALUE (1)", theirs=True)
        self.mapped[peer.address] = peer
        return Mapped(peer.address + piece.skip, piece.bytes, peer.address, peer.bytes, FD, piece.at)

    def unmap(self, mapped: Mapped) -> None:
        self.mapped.pop(mapped.base).close()

    def stream(self) -> FakeStream:
        return FakeStream(self.broken)

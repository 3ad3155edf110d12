"""A segment in the memory of an accelerator: whole allocations, at consecutive addresses, that an engine made.

Nothing here allocates or frees: the engine's own allocator does, which is what sleeps and wakes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from relight.core.errors import InvalidInput, LocalFault
from relight.transfer.segment import Segment, address_of, opaque
from relight.transfer.transports.cuda import Cuda, Piece
from relight.transfer.verify import BLOCK_BYTES, Digest


class DeviceSegment:
    """Allocations of `sizes` bytes (each whole, in the order of their addresses) from `address` on."""

    def __init__(self, cuda: Cuda, address: int, sizes: Sequence[int], digest: Digest = Digest.XXH3) -> None:
        """Raises InvalidInput when there is nothing in it."""
        if not sizes or min(sizes) <= 0:
            raise InvalidInput("expected the sizes of the allocations that the segment consists of, in bytes")
        self.cuda, self.address, self._sizes, self.digest = cuda, address, tuple(sizes), digest
        self.bytes, self.device = sum(sizes), cuda.device
        self.view = opaque(address, self.bytes)
        """For places alone: the host must neither read nor write it."""
        self._local = threading.local()

    def exported(self) -> Iterator[tuple[Piece, int]]:
        """Each allocation as it is passed to another process, with its descriptor, which the caller closes; -1 when
        it has none. Raises LocalFault."""
        at = self.address
        for size in self._sizes:
            yield self.cuda.export(at, size)
            at += size

    def populate(self, start: int, stop: int) -> None:
        """Memory is there when the engine's allocator has brought it back: before a refill begins."""

    def drop(self) -> None:
        """The engine's allocator gives memory back, when the engine sleeps."""

    def digests(self, start: int, stop: int) -> bytes:
        """The digests of the blocks of [start, stop), by way of the host. Raises LocalFault."""
        return b"".join([self._digest(at, min(at + BLOCK_BYTES, stop)) for at in range(start, stop, BLOCK_BYTES)])

    def _digest(self, start: int, stop: int) -> bytes:
        if not hasattr(self._local, "block"):
            self._local.block = memoryview(bytearray(BLOCK_BYTES))
        block: memoryview = self._local.block[: stop - start]
        self.cuda.to_host(address_of(block), self.address + start, len(block))
        return self.digest.of(block)


AnySegment = Segment | DeviceSegment
"""What a source serves and a refill fills."""


def on_host(memory: AnySegment) -> Segment:
    """For transports whose bytes pass through the host. Raises LocalFault for memory of a device."""
    if not isinstance(memory, Segment):
        raise LocalFault(f"it lies in memory of device {memory.device}, which only nvlink, nixl and rdma reach")
    return memory

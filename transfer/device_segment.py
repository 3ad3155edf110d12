"""A segment in the memory of an accelerator: allocations that an engine made, wherever each of them lies.

Nothing here allocates or frees: the engine's own allocator does, which is what sleeps and wakes. Addresses stay over a
sleep, the pages behind them do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace

from relight.core.errors import LocalFault
from relight.transfer.bounce import Bounce
from relight.transfer.extents import Extents
from relight.transfer.segment import Pieces, Segment, opaque
from relight.transfer.transports.cuda import Cuda, Piece
from relight.transfer.verify import BLOCK_BYTES, Digest


class DeviceSegment:
    """`extents` of one device, as `lay_out` places them."""

    def __init__(self, cuda: Cuda, extents: Extents, digest: Digest = Digest.XXH3) -> None:
        self.cuda, self.extents, self.device, self.bytes = cuda, extents, cuda.device, extents.bytes
        self.digest = digest

    def at(self, start: int, stop: int) -> int:
        """The address of the bytes [start, stop). Raises LocalFault unless they lie in one extent."""
        return self.extents.at(start, stop)

    def offset_of(self, address: int) -> int | None:
        """Where in the segment an address lies; None when it does not."""
        inside = (e for e in self.extents if 0 <= address - e.address < e.bytes)
        return next((e.offset + address - e.address for e in inside), None)

    def room(self, start: int, stop: int) -> memoryview:
        """Where the bytes [start, stop) lie: for places alone, the host must neither read nor write it."""
        return opaque(self.at(start, stop), stop - start)

    def exported(self) -> Iterator[tuple[Piece, int]]:
        """Each extent as it is passed to another process, with its descriptor, which the caller closes; -1 when
        it has none. Raises LocalFault."""
        for extent in self.extents:
            piece, descriptor = self.cuda.export(extent)
            yield replace(piece, at=extent.offset), descriptor

    def populate(self, start: int, stop: int) -> None:
        """Memory is there when the engine's allocator has brought it back: before a refill begins."""

    def drop(self) -> None:
        """The engine's allocator gives memory back, when the engine sleeps."""

    def bounce(self) -> AbstractContextManager[Bounce]:
        """A way between this memory and the host's, for one thread. Raises LocalFault."""
        return closing(Bounce(self.cuda))

    def digests(self, start: int, stop: int) -> bytes:
        """The digests of the blocks of [start, stop), by way of the host. Raises LocalFault."""
        with self.bounce() as bounce:
            return self.digests_by(bounce, start, stop)

    def digests_by(self, bounce: Bounce, start: int, stop: int) -> bytes:
        """The same, by a way that is there already."""
        return b"".join([self.digest.of(block) for block in bounce.fetch(self.blocks(start, stop))])

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of each block of [start, stop). Raises LocalFault."""
        at = self.at(start, stop)
        return ((at + low - start, min(BLOCK_BYTES, stop - low)) for low in range(start, stop, BLOCK_BYTES))


AnySegment = Segment | DeviceSegment
"""What a refill fills."""
Held = AnySegment | Pieces
"""What a source serves."""


def on_host(memory: Held) -> Segment:
    """For transports that pass on pages of this host. Raises LocalFault for what consists of no such pages."""
    if isinstance(memory, DeviceSegment):
        raise LocalFault(f"it lies in memory of device {memory.device}, and not in pages of this host")
    if not isinstance(memory, Segment):
        raise LocalFault("it lies in memory of this process alone")
    return memory

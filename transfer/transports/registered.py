"""A segment as one network card knows it: each of its pieces registered by itself, memory of a device too.

A card reaches a device's memory in one of two ways, and which one works where is known by trying: a DMA buffer of the
device's driver, or a module of it in the kernel that lets an ordinary registration find such memory.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from contextlib import suppress
from dataclasses import replace

from relight.core.errors import LocalFault
from relight.transfer.device_segment import AnySegment, DeviceSegment, Held, on_host
from relight.transfer.extents import Extent
from relight.transfer.transports.cuda import Cuda
from relight.transfer.transports.verbs import Device, Memory, Region

DMA_BUF, PEER_MEMORY, HOST_MEMORY = "dma-buf", "peer memory", "memory of the host"
"""Ways in which a card reaches memory."""


class Registered:
    """All pieces of a segment, registered with one card until `close`."""

    def __init__(self, device: Device, segment: Held, *, writable: bool) -> None:
        """To be read by whoever gets a key; `writable` by this card's own reads, too. Raises LocalFault, and nothing is
        registered then."""
        held: AnySegment = segment if isinstance(segment, DeviceSegment) else on_host(segment)
        self.way = ""
        self._extents = held.extents
        self._memories: list[Memory] = []
        try:
            for extent in self._extents:
                self._memories.append(self._one(device, held, extent, writable))
        except BaseException:
            self.close()
            raise
        order = sorted(self._memories, key=lambda memory: memory.address)
        self._by_address = [memory.address for memory in order], order

    def _one(self, device: Device, segment: AnySegment, extent: Extent, writable: bool) -> Memory:
        if not isinstance(segment, DeviceSegment):
            self.way = HOST_MEMORY
            return device.register(extent.address, extent.bytes, writable=writable)
        self.way = self.way or reaches(device, segment.cuda, extent)
        return by_way(self.way, device, segment.cuda, extent, writable=writable)

    @property
    def regions(self) -> list[Region]:
        """What a reader needs of each piece."""
        return [replace(m.region, at=e.offset) for e, m in zip(self._extents, self._memories, strict=True)]

    def of(self, address: int) -> Memory:
        """The piece that an address lies in; where it lies in none the card says so, of the nearest."""
        addresses, memories = self._by_address
        return memories[max(bisect_right(addresses, address) - 1, 0)]

    def close(self) -> None:
        """Nobody reads it from here on, and its pages are no longer pinned."""
        while self._memories:
            self._memories.pop().close()


def by_way(way: str, device: Device, cuda: Cuda, extent: Extent, *, writable: bool) -> Memory:
    """Registers memory of a device. Raises LocalFault."""
    if way != DMA_BUF or extent.address % mmap.PAGESIZE or extent.bytes % mmap.PAGESIZE:
        return device.register(extent.address, extent.bytes, writable=writable)
    descriptor = cuda.dma_buf(extent.address, extent.bytes)
    try:
        return device.register_dma_buf(extent.address, extent.bytes, descriptor, writable=writable)
    finally:
        # The registration keeps the buffer.
        os.close(descriptor)


def reaches(device: Device, cuda: Cuda, extent: Extent) -> str:
    """By which way a card reaches memory of a device like `extent`. Raises LocalFault with the reason of each."""
    whys = []
    for way in (DMA_BUF, PEER_MEMORY):
        try:
            memory = by_way(way, device, cuda, extent, writable=False)
        except LocalFault as fault:
            whys.append(f"{way}: {fault}")
            continue
        with suppress(LocalFault):
            memory.close()
        return way
    raise LocalFault(f"{device.name} does not reach memory of device {cuda.device}: {'; '.join(whys)}")

"""A card of one process, with verbs' rules: memory is read by its key alone, and reads complete in order.

What it cannot show is shown by `make test-rdma`, on soft-RoCE.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque

from relight.transfer.transports.verbs import LOST_SECONDS, Peer, Region

_keys = itertools.count(512)
_registered: dict[int, Region] = {}
"""By key: what may be read."""


class FakeMemory:
    def __init__(self, address: int, length: int) -> None:
        self.address, self.bytes = address, length
        self.region = Region(address, length, next(_keys))
        self.lkey = self.region.rkey
        _registered[self.lkey] = self.region

    def close(self) -> None:
        _registered.pop(self.lkey, None)


class FakeConnection:
    """Reads when it is looked at, so that a read is under way until then."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._posted: deque[tuple[int, int, Region, int, int]] = deque()
        self.peer = Peer(next(_keys), 0, "0000:0000:0000:0000:0000:ffff:7f00:0001", 0, 5)
        device.connections += 1

    def connect(self, other: Peer) -> None:
        assert other.mtu == self.peer.mtu

    def read(self, memory: FakeMemory, into: int, region: Region, offset: int, length: int) -> None:
        self._posted.append((into, memory.lkey, region, offset, length))

    def completed(self) -> tuple[int, int, str]:
        reads = done = 0
        while self._posted:
            into, lkey, region, offset, length = self._posted.popleft()
            there = _registered.get(region.rkey)
            # Where it lies is not looked at: tests share one landing among several targets.
            if lkey not in _registered:
                return reads, done, "the local memory is not registered for it (loc_prot_err)"
            if there is None or offset + length > there.bytes:
                return reads, done, "the key does not open that memory (rem_access_err)"
            ctypes.memmove(into, there.address + offset, length)
            reads, done = reads + 1, done + length
        return reads, done, ""

    def close(self) -> None:
        self._device.connections -= 1


class FakeDevice:
    def __init__(self, name: str, lost_seconds: float = LOST_SECONDS) -> None:
        self.name, self.connections = name, 0

    def register(self, address: int, length: int, *, writable: bool) -> FakeMemory:
        return FakeMemory(address, length)

    def register_dma_buf(self, address: int, length: int, descriptor: int, *, writable: bool) -> FakeMemory:
        assert os.fstat(descriptor)
        return FakeMemory(address, length)

    def connection(self) -> FakeConnection:
        return FakeConnection(self)

    def close(self) -> None:
        assert not self.connections, "a card is closed after its connections"

"""Where oneDNN keeps a handler's packed weight, and how shared pages come to lie under it.

vLLM packs large linear weights into oneDNN handlers whose memory nobody else can see, and empties the parameter. The
packed copy is what the kernel reads, so it *is* the weight: exported, given back at sleep and refilled in place, the
handler goes on without noticing, with the very kernel and numbers of plain vLLM.

The memory is found by experiment and proven by experiment. While handlers are made, each large allocation is made
to be a mapping of its own, and the mappings before and after one handler's making differ by its buffer. Then the
buffer is zeroed and the product must change, and restored and the product must be the old one. A handler whose
memory is not found this way is reported; the caller falls back to packing anew after each refill.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import vllm._custom_ops as ops

_M_MMAP_THRESHOLD = -3
_USUAL_THRESHOLD = 128 << 10
_THRESHOLD = 16 << 10
"""Bytes from which on an allocation is a mapping of its own while handlers are made."""
_SLACK = 16 << 10
"""How much larger than the weight a buffer may be: the allocator's header and alignment. Anything larger may hold
something else as well, and is not taken."""
_MAPS_BYTES = 16 << 20
_TRIES = 8

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Region:
    """Whole pages [address, address + bytes) that hold one packed weight and nothing else of anyone."""

    address: int
    bytes: int


@dataclass(slots=True)
class Packed:
    """One handler, and the memory of its packed weight when that was found."""

    handler: Any
    region: Region | None


class _Maps:
    """A reading of this process's mappings that allocates nothing while it reads: a new mapping of its own making
    could lie beside the one that is looked for."""

    def __init__(self) -> None:
        self._room = bytearray(_MAPS_BYTES)
        self._length = 0

    def read(self) -> None:
        """Reads now; `anonymous` tells later."""
        room, self._length = memoryview(self._room), 0
        descriptor = os.open("/proc/self/maps", os.O_RDONLY)
        try:
            while got := os.readv(descriptor, [room[self._length :]]):
                self._length += got
        finally:
            os.close(descriptor)

    def anonymous(self) -> list[tuple[int, int]]:
        """Private writable mappings without a file, ascending; neighbours are joined."""
        found: list[tuple[int, int]] = []
        for line in self._room[: self._length].decode(errors="replace").splitlines():
            place, rights, _, _, inode, *name = line.split(None, 5)
            if rights == "rw-p" and inode == "0" and not name:
                low, high = (int(part, 16) for part in place.split("-"))
                if found and found[-1][1] == low:
                    found[-1] = (found[-1][0], high)
                else:
                    found.append((low, high))
        return found


def _fresh(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is covered by `after` and not by `before`."""
    found = []
    for low, high in after:
        for taken_low, taken_high in before:
            if taken_high <= low or taken_low >= high:
                continue
            if taken_low > low:
                found.append((low, taken_low))
            low = taken_high
            if low >= high:
                break
        if low < high:
            found.append((low, high))
    return found


class Watch:
    """While entered, notes the memory of every handler that vLLM makes, in `made`.

    Without `prove` the experiment that shows the memory to be the weight is left out: for handlers of the same shapes
    as those that were proven before.
    """

    def __init__(self, *, prove: bool = True) -> None:
        self._prove = prove
        self.made: list[Packed] = []
        self._kept: list[torch.Tensor] = []
        self._before, self._after = _Maps(), _Maps()
        self._make: Callable[..., Any] = ops.create_onednn_mm

    def __enter__(self) -> Watch:
        _libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
        ops.create_onednn_mm = self._create
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ops.create_onednn_mm = self._make
        self._kept.clear()
        _libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_THRESHOLD)

    def _create(self, weight: torch.Tensor, *more: Any) -> Any:
        # The plain weight is kept until all handlers are made: a freed one would leave a hole that the next buffer
        # fills, and buffers that lie side by side can share huge pages.
        self._kept.append(weight)
        unlucky = []
        for _ in range(_TRIES):
            handler, region = self._try(weight, *more)
            if region is not None:
                break
            # Its buffer came out of memory that the allocator had left: kept, so that the next try cannot get it too.
            unlucky.append(handler)
        self.made.append(Packed(handler, region))
        return handler

    def _try(self, weight: torch.Tensor, *more: Any) -> tuple[Any, Region | None]:
        self._before.read()
        handler = self._make(weight, *more)
        self._after.read()
        columns, rows = weight.shape
        least = rows * columns * weight.element_size()
        new = _fresh(self._before.anonymous(), self._after.anonymous())
        fresh = [(a, b) for a, b in new if least <= b - a <= least + _SLACK]
        if len(fresh) != 1:
            return handler, None
        region = Region(fresh[0][0], fresh[0][1] - fresh[0][0])
        if self._prove and not _is_the_weight(handler, columns, weight.dtype, region):
            return handler, None
        return handler, region


def _is_the_weight(handler: Any, columns: int, dtype: torch.dtype, region: Region) -> bool:
    """Whether the product follows the region's bytes, and nothing else does."""
    x = torch.ones(1, columns, dtype=dtype)
    first = ops.onednn_mm(handler, x, None)
    saved = ctypes.string_at(region.address, region.bytes)
    # The first page begins with the allocator's header, which must stay; the weight's greater part lies behind it.
    page = 4096
    ctypes.memset(region.address + page, 0, region.bytes - page)
    without = ops.onednn_mm(handler, x, None)
    ctypes.memmove(region.address, saved, region.bytes)
    again = ops.onednn_mm(handler, x, None)
    lost = int((without != first).sum())
    return bool(torch.equal(again, first)) and 2 * lost >= int((first != 0).sum())

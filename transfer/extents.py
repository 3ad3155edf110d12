"""Where a segment's bytes lie when they do not lie together: pieces of memory, each at an offset of the segment.

Offsets of two pieces are APART: what lies together in a segment lies together in memory, so nothing is ever read across
an edge. One end tells the other its pieces as plain numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from relight.core.errors import InvalidInput, LocalFault

APART = 4096
MOST_EXTENTS = 4096
"""An engine's allocator makes some hundred allocations for a large model."""
MOST_TOLD = 1 << 20
"""Bytes of a message that tells all of them."""
_NUMBERS = 3


@dataclass(frozen=True, slots=True)
class Extent:
    """`bytes` of memory that lie together from `address` on, at `offset` of their segment.

    `whole`: one allocation from its begin to its end, and not a part of one.
    """

    offset: int
    address: int
    bytes: int
    whole: bool = True


class Extents:
    """All of one segment, in the order of their offsets; never none."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        """Raises InvalidInput for none, too many, and offsets that overlap."""
        self._all = tuple(sorted(extents, key=lambda e: e.offset))
        if not 0 < len(self._all) <= MOST_EXTENTS:
            raise InvalidInput(f"expected 1 to {MOST_EXTENTS} pieces of memory, got {len(self._all)}")
        end = 0
        for extent in self._all:
            if extent.offset < end or extent.bytes <= 0:
                raise InvalidInput("expected pieces of memory that are not empty and whose places do not overlap")
            end = extent.offset + extent.bytes
        self.bytes = end
        """Of the segment, from its begin to the end of the last piece."""
        self._offsets = [extent.offset for extent in self._all]

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Extent:
        return self._all[number]

    def find(self, start: int, stop: int) -> int:
        """The number of the piece in which [start, stop) lies. Raises LocalFault unless it lies in one."""
        number = bisect_right(self._offsets, start) - 1
        if number < 0 or start > stop or stop > self._all[number].offset + self._all[number].bytes:
            raise LocalFault(f"[{start}, {stop}) does not lie in one piece of the segment's memory")
        return number

    def at(self, start: int, stop: int) -> int:
        """The address of the bytes [start, stop). Raises LocalFault unless they lie in one piece."""
        extent = self._all[self.find(start, stop)]
        return extent.address + start - extent.offset

    def told(self) -> list[list[int]]:
        """As JSON has them."""
        return [[e.offset, e.address, e.bytes] for e in self._all]

    @classmethod
    def parse(cls, raw: object) -> Extents:
        """What another process told. Raises InvalidInput saying what was expected."""
        if not isinstance(raw, list) or not 0 < len(raw) <= MOST_EXTENTS:
            raise InvalidInput(f"expected 1 to {MOST_EXTENTS} pieces of memory")
        for one in raw:
            right = isinstance(one, list) and len(one) == _NUMBERS
            if not right or not all(type(n) is int and 0 <= n < 1 << 64 for n in one):
                raise InvalidInput("expected each piece of memory as [offset, address, bytes] below 2^64")
        if raw != sorted(raw):
            raise InvalidInput("expected pieces of memory in the order of their offsets")
        return cls(Extent(*one) for one in raw)


def lay_out(ranges: Iterable[tuple[int, int, bool]]) -> Extents:
    """Places for memory given as (address, bytes, whether it is a whole allocation), in the order of addresses.

    Raises InvalidInput for ranges that are empty or overlap.
    """
    found: list[Extent] = []
    offset = end = 0
    for address, length, whole in sorted(ranges):
        if length <= 0 or address < end:
            raise InvalidInput("expected pieces of memory that are not empty and do not overlap")
        found.append(Extent(offset, address, length, whole))
        offset, end = offset + length + APART, address + length
    return Extents(found)

"""Pinned buffers of the host, through which bytes pass to a device and from it where nothing reaches its memory itself.

Copies run on a stream of their own, beside what the engine computes, and while the next buffer is filled or looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress

from relight.core.errors import InvalidInput, LocalFault
from relight.transfer.segment import address_of, opaque, spans
from relight.transfer.transports.cuda import Cuda, Event
from relight.transfer.verify import BLOCK_BYTES

ROOM_BYTES = BLOCK_BYTES + (64 << 10)
"""A block, and what pads it."""
ROOMS = 4


def read_all(cuda: Cuda, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """What a device has at each (address, bytes). Raises LocalFault."""
    found = [bytearray() for _ in ranges]
    parts = [(n, *part) for n, whole in enumerate(ranges) for part in _cut(*whole)]
    with closing(Bounce(cuda)) as bounce:
        rooms = bounce.fetch((address, length) for _, address, length in parts)
        for (n, _, _), room in zip(parts, rooms, strict=True):
            found[n] += room
    return [bytes(one) for one in found]


def write_all(cuda: Cuda, ranges: Iterable[tuple[int, bytes]]) -> None:
    """Puts bytes at addresses of a device, and returns when they are there. Raises LocalFault."""
    with closing(Bounce(cuda)) as bounce:
        for address, data in ranges:
            for at, length in _cut(address, len(data)):
                room = bounce.room(length)
                room[:] = data[at - address : at - address + length]
                bounce.put(at, room)
        bounce.settle()


def _cut(address: int, length: int) -> Iterator[tuple[int, int]]:
    return ((address + low, high - low) for low, high in spans(0, length, BLOCK_BYTES))


class Bounce:
    """One thread's buffers, used in turn, and their stream."""

    def __init__(self, cuda: Cuda) -> None:
        """Raises LocalFault: no pinned memory, no stream."""
        self._cuda = cuda
        self._stream = cuda.stream()
        try:
            self._address = cuda.pinned(ROOMS * ROOM_BYTES)
        except BaseException:
            self._stream.close()
            raise
        self._view = opaque(self._address, ROOMS * ROOM_BYTES)
        self._under_way: dict[int, Event] = {}
        """By buffer: the copy out of it that may still run."""
        self._turn = 0

    def room(self, length: int) -> memoryview:
        """The next buffer's first `length` bytes, which nothing reads any more. Raises LocalFault."""
        if not 0 < length <= ROOM_BYTES:
            raise InvalidInput(f"expected 1 to {ROOM_BYTES} bytes for one buffer, got {length}")
        turn, self._turn = self._turn, (self._turn + 1) % ROOMS
        self._wait(turn)
        return self._view[turn * ROOM_BYTES : turn * ROOM_BYTES + length]

    def _wait(self, turn: int) -> None:
        event = self._under_way.pop(turn, None)
        if event is not None:
            self._stream.wait(event)

    def put(self, address: int, room: memoryview) -> None:
        """Starts copying what `room` gave last to the device. Raises LocalFault."""
        here = address_of(room)
        self._under_way[(here - self._address) // ROOM_BYTES] = self._stream.up(address, here, len(room))

    def settle(self) -> None:
        """Returns when all that was put is in place. Raises LocalFault."""
        for turn in list(self._under_way):
            self._wait(turn)

    def fetch(self, parts: Iterable[tuple[int, int]]) -> Generator[memoryview, None, None]:
        """What the device holds at each (address, bytes), in turn; each is good until the next is asked for.

        The next ones are under way meanwhile. Raises LocalFault.
        """
        flying = deque[tuple[memoryview, Event]]()
        try:
            for address, length in parts:
                if len(flying) == ROOMS - 1:
                    yield self._landed(flying)
                room = self.room(length)
                flying.append((room, self._stream.down(address_of(room), address, length)))
            while flying:
                yield self._landed(flying)
        finally:
            # Who stopped in the middle: nothing may still write into buffers that are used again.
            while flying:
                with suppress(LocalFault):
                    self._stream.wait(flying.popleft()[1])

    def _landed(self, flying: deque[tuple[memoryview, Event]]) -> memoryview:
        room, event = flying.popleft()
        self._stream.wait(event)
        return room

    def close(self) -> None:
        """Nothing is copied any more afterwards, well or not, and the buffers are gone."""
        for turn in list(self._under_way):
            with suppress(LocalFault):
                self._wait(turn)
        self._stream.close()
        self._cuda.unpin(self._address)

"""Where the bytes of a refill land: pages of this host, or a device's memory; one for each connection's thread.

Either a reader brings bytes to where they belong, or they pass through this host and are digested there on their way.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

from relight.core.failpoints import hit
from relight.transfer.bounce import Bounce
from relight.transfer.chunks import Run, Step
from relight.transfer.device_segment import AnySegment, DeviceSegment
from relight.transfer.onepass import copied
from relight.transfer.segment import Segment
from relight.transfer.transports.base import Proven, Reader
from relight.transfer.verify import Digest, blocks_of

RECEIVED = "transfer.receive"
"""The failpoint that a step's bytes pass."""


class Ground(Protocol):
    """One thread's way into a segment."""

    def steps(self, run: Run, reader: Reader) -> Iterable[Step]:
        """The run in the pieces in which it is best brought."""
        ...

    def bring(self, step: Step, reader: Reader) -> bytes:
        """Brings a step; returns the digests of its blocks where they were taken on the way, else nothing.

        Raises as the reader does, and LocalFault.
        """
        ...

    def digests(self, step: Step) -> bytes:
        """The digests of a step's blocks as they lie in the segment."""
        ...

    def settle(self) -> None:
        """Returns when all that was brought is in place. Raises LocalFault."""
        ...

    def close(self) -> None:
        """Nothing is written any more afterwards, well or not."""
        ...


def ground_of(segment: AnySegment) -> Ground:
    """For one thread."""
    return DeviceGround(segment) if isinstance(segment, DeviceSegment) else HostGround(segment)


class HostGround:
    """Pages of this host. What can be reached is copied and digested in one pass over memory; what comes over a plain
    socket is digested as it comes."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def steps(self, run: Run, reader: Reader) -> Iterable[Step]:
        return (run.whole,) if reader.lends or self._proven(reader) else run.steps()

    def _proven(self, reader: Reader) -> Proven | None:
        return reader.proven if self._segment.digest is Digest.XXH3 else None

    def bring(self, step: Step, reader: Reader) -> bytes:
        here, found = self._segment.room(step.start, step.stop), b""
        if (proven := self._proven(reader)) is not None:
            found = proven(step.stop - step.start, step.parts)
        elif (lent := reader.fill(step.stop - step.start)) is not None:
            found = copied(here, lent, step.parts, digest=self._segment.digest)
        return b"" if hit(RECEIVED, here) else found

    def digests(self, step: Step) -> bytes:
        return b"".join([self._segment.digests(piece.start, piece.stop) for piece in step.pieces])

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


class DeviceGround:
    """A device's memory. What does not reach it by itself goes through pinned buffers, block by block."""

    def __init__(self, segment: DeviceSegment) -> None:
        self._segment = segment
        self._left = ExitStack()
        self._made: Bounce | None = None

    @property
    def _bounce(self) -> Bounce:
        if self._made is None:
            self._made = self._left.enter_context(self._segment.bounce())
        return self._made

    def steps(self, run: Run, reader: Reader) -> Iterable[Step]:
        # What arrives by itself is read back afterwards, several blocks ahead.
        return (run.whole,) if reader.direct else run.steps()

    def bring(self, step: Step, reader: Reader) -> bytes:
        length = step.stop - step.start
        if reader.direct:
            reader.fill(length)
            return b""
        room = self._bounce.room(length)
        lent = reader.fill(length, room)
        digest = self._segment.digest
        found = b"" if lent is None else copied(room, lent, step.parts, digest=digest)
        if hit(RECEIVED, room) or not found:
            found = b"".join([blocks_of(room[start:stop], digest) for start, stop in step.parts])
        self._bounce.put(self._segment.at(step.start, step.stop), room)
        return found

    def digests(self, step: Step) -> bytes:
        found = []
        for piece in step.pieces:
            for block in self._bounce.fetch(self._segment.blocks(piece.start, piece.stop)):
                hit(RECEIVED, block)
                found.append(self._segment.digest.of(block))
        return b"".join(found)

    def settle(self) -> None:
        if self._made is not None:
            self._made.settle()

    def close(self) -> None:
        self._made = None
        self._left.close()

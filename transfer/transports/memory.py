"""The reference transport: source and receiver in one process. It also reads an engine's own host copy."""

from __future__ import annotations

from collections import deque

from relight.core.errors import RelightError, RemoteFault
from relight.transfer.board import Bitmap
from relight.transfer.device_segment import DeviceSegment, on_host
from relight.transfer.manifest import WeightManifest, parse
from relight.transfer.source import NotYet, Pin, Source
from relight.transfer.transports.base import Missing, Proven, Question


class MemoryReader:
    """Reads a Source of the same process."""

    lends, direct = True, False
    proven: Proven | None = None

    def __init__(self, source: Source, grant: str) -> None:
        """Raises RemoteFault when the source does not admit the bearer of `grant`."""
        self.source = source.instance
        self._source = source
        self._asked: deque[tuple[Question, memoryview]] = deque()
        self._at, self._into = 0, memoryview(b"")
        try:
            self._pin: Pin = source.admit(grant)
        except RelightError as error:
            raise RemoteFault(f"{self.source} refused: {error}") from error

    def describe(self) -> WeightManifest:
        try:
            return parse(self._source.dumped())
        except RelightError as error:
            raise RemoteFault(f"{self.source}: {error}") from error

    def held(self, more_than: int, count: int) -> Bitmap:
        try:
            found = self._source.held(self._pin, more_than)
        except RelightError as error:
            raise RemoteFault(f"{self.source}: {error}") from error
        return found or Bitmap(count, b"\xff" * -(-count // 8))

    def ask(self, question: Question, into: memoryview) -> None:
        self._asked.append((question, into))

    def fill(self, count: int, instead: memoryview | None = None) -> memoryview:
        if not self._into:
            asked, into = self._asked.popleft()
            try:
                self._source.permit(self._pin, asked.offset, asked.length, asked.chunk, asked.chunks)
            except NotYet as error:
                raise Missing(str(error)) from error
            except RelightError as error:
                raise RemoteFault(f"{self.source} refused a read: {error}") from error
            self._at, self._into = asked.offset, into
        held = self._source.segment
        lent = (on_host(held) if isinstance(held, DeviceSegment) else held).room(self._at, self._at + count)
        self._at += count
        self._into = self._into[count:]
        return lent

    def finish(self) -> None:
        try:
            self._source.confirm(self._pin)
        except RelightError as error:
            raise RemoteFault(f"{self.source} withdrew its permission: {error}") from error

    def abort(self) -> None:
        self._source.release(self._pin)

    def close(self) -> None:
        self._source.release(self._pin)

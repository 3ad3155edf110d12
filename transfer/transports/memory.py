"""The reference transport: source and receiver in one process. It also reads an engine's own host copy."""

from __future__ import annotations

from collections import deque

from relight.core.errors import RelightError, RemoteFault
from relight.transfer.manifest import WeightManifest, parse
from relight.transfer.segment import copy
from relight.transfer.source import Pin, Source


class MemoryReader:
    """Reads a Source of the same process."""

    def __init__(self, source: Source, grant: str) -> None:
        """Raises RemoteFault when the source does not admit the bearer of `grant`."""
        self.source = source.instance
        self._source = source
        self._asked: deque[tuple[int, int]] = deque()
        self._at = self._left = 0
        try:
            self._pin: Pin = source.admit(grant)
        except RelightError as error:
            raise RemoteFault(f"{self.source} refused: {error}") from error

    def describe(self) -> WeightManifest:
        return parse(self._source.dumped())

    def ask(self, offset: int, length: int) -> None:
        self._asked.append((offset, length))

    def fill(self, into: memoryview) -> None:
        if not self._left:
            self._at, self._left = self._asked.popleft()
            self._permit(self._at, self._left)
        copy(into, self._source.segment.view[self._at : self._at + len(into)])
        self._at += len(into)
        self._left -= len(into)

    def finish(self) -> None:
        self._permit(0, 1)

    def _permit(self, offset: int, length: int) -> None:
        try:
            self._source.permit(self._pin, offset, length)
        except RelightError as error:
            raise RemoteFault(f"{self.source} refused a read: {error}") from error

    def close(self) -> None:
        self._source.release(self._pin)

"""The one small protocol that all transports share, on both ends.

Source side:    register(source) -> address        release()
Receiver side:  connect(address, grant) -> Reader; describe(), then ask() and fill() in turn, finish()

`memory` is the reference: every other transport takes the same descriptors, delivers the same bytes and
fails in the same ways.
"""

from __future__ import annotations

from typing import Protocol

from relight.transfer.manifest import WeightManifest
from relight.transfer.source import Source

READ_BYTES = 32 << 20
"""Largest single read: the unit in which grant, pin and generation are checked at the source. Each costs the source's
interpreter a few turns, which a serving engine may keep for milliseconds."""


class Listener(Protocol):
    """The source's end of one transport."""

    kind: str

    def register(self, source: Source) -> str:
        """Starts serving `source`; returns the address that receivers connect to. Raises LocalFault."""
        ...

    def release(self) -> None:
        """Stops serving: no thread, socket or file is left."""
        ...


class Reader(Protocol):
    """The receiver's end: one connection, used by one thread."""

    source: str
    """Who is read, for reasons and logs."""

    def describe(self) -> WeightManifest:
        """The source's manifest, parsed and bounded. Raises RemoteFault."""
        ...

    def ask(self, offset: int, length: int) -> None:
        """Asks for [offset, offset + length), at most READ_BYTES; answers come in the order of the questions.

        The source checks grant, pin and generation for each. Raises RemoteFault when it is gone.
        """
        ...

    def fill(self, into: memoryview) -> None:
        """Fills `into` with the next bytes of what was asked; a piece never crosses the edge of a question.

        Raises RemoteFault when the source refused, stalls past the deadline, or is gone.
        """
        ...

    def finish(self) -> None:
        """Confirms that pin, grant and generation were good up to now. Raises RemoteFault."""
        ...

    def close(self) -> None:
        """Ends the connection and with it the pin."""
        ...


class Connect(Protocol):
    """Opens one more connection to the same source. Raises RemoteFault."""

    def __call__(self) -> Reader: ...

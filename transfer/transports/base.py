"""The one small protocol that all transports share, on both ends.

Source side:    register(source) -> address        release()
Receiver side:  connect(address, grant) -> Reader; describe(), then ask() some and fill() in turn, finish()

`memory` is the reference: every other transport takes the same descriptors, delivers the same bytes and
fails in the same ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from relight.transfer.board import Bitmap
from relight.transfer.manifest import WeightManifest
from relight.transfer.source import Source

READ_BYTES = 32 << 20
"""Largest single read that is brought: the unit in which grant, pin and generation are checked at the source. Each
costs the source's interpreter a few turns, which a serving engine may keep for milliseconds."""


class Question(NamedTuple):
    """A read of [offset, offset + length) of the source's segment, which lies in chunks [chunk, chunk + chunks)."""

    chunk: int
    chunks: int
    offset: int
    length: int


class Missing(Exception):
    """The source has not received a chunk of the oldest question yet; nothing of it will come, later answers will."""


class Listener(Protocol):
    """The source's end of one transport."""

    kind: str

    def register(self, source: Source) -> str:
        """Starts serving `source`; returns the address that receivers connect to. Raises LocalFault."""
        ...

    def release(self) -> None:
        """Stops serving: no thread, socket or file is left."""
        ...


class Proven(Protocol):
    """As `Reader.fill`; returns the XXH3 of each block of `parts`, whose edges ascend and count from what is filled."""

    def __call__(self, count: int, parts: Sequence[tuple[int, int]]) -> bytes: ...


class Reader(Protocol):
    """The receiver's end: one connection, used by one thread."""

    source: str
    """Who is read, for reasons and logs."""
    lends: bool
    """Whether `fill` hands over the source's own bytes, which this process can reach, instead of bringing them."""
    proven: Proven | None
    """In place of `fill`, where this connection and processor can: what arrives is hashed on the way."""
    direct: bool
    """Whether what it brings lands in a device's memory as well as in the host's; others need a buffer on the way."""

    def describe(self) -> WeightManifest:
        """The source's manifest, parsed and bounded. A source that receives itself has none before it knows what it
        receives: this waits for it. Raises RemoteFault."""
        ...

    def held(self, more_than: int, count: int) -> Bitmap:
        """Which of `count` chunks the source has; waits a while for there to be more than `more_than`.

        Raises RemoteFault.
        """
        ...

    def ask(self, question: Question, into: memoryview) -> None:
        """Asks for bytes, to be put into `into`: at most READ_BYTES, unless it lends. Answers come in the questions'
        order.

        The source checks grant, pin and generation for each. Nothing else may touch `into` until `fill` said that it is
        there. Raises RemoteFault when the source is gone.
        """
        ...

    def fill(self, count: int, instead: memoryview | None = None) -> memoryview | None:
        """Returns None when the next `count` bytes of what was asked are in place; never across the edge of a question.

        Their place is where they were asked for, or `instead`, of `count` bytes, which only those take that are not
        `direct`.

        A reader that `lends` returns them where they lie, to be copied by the caller before the next call: who
        copies can digest in the same pass.

        Raises Missing for all of a question whose chunks have not arrived there, and RemoteFault when the source
        refused, stalls past the deadline, or is gone.
        """
        ...

    def finish(self) -> None:
        """Confirms that pin, grant and generation were good up to now. Raises RemoteFault."""
        ...

    def abort(self) -> None:
        """Lets whatever waits in this reader fail with RemoteFault; from any thread."""
        ...

    def close(self) -> None:
        """Ends the connection and with it the pin; not while another thread uses it."""
        ...


class Connect(Protocol):
    """Opens one more connection to the same source. Raises RemoteFault."""

    def __call__(self) -> Reader: ...

"""How a manifest's bytes are cut into chunks: what is read, proven, passed on and resumed as one. Pure: no I/O.

Chunks follow the order in which the manifest lists tensors, and are cut at the edges of blocks; where anything lies
does not enter. So all holders of one content agree on chunk numbers, whatever their own places for the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from relight.core.errors import InvalidInput
from relight.transfer.manifest import TensorEntry
from relight.transfer.verify import BLOCK_BYTES, DIGEST_BYTES

MOST_CHUNK_BYTES = 32 << 20
CHUNKS = 512
"""Chunks that a body is cut into, unless they would be larger than MOST_CHUNK_BYTES or smaller than a block: enough for
many receivers to pass them on, each large enough to be worth a question."""


def chunk_bytes(total: int) -> int:
    """The size that a body of `total` bytes is cut to: whole blocks."""
    even = -(-total // CHUNKS)
    return min(max(-(-even // BLOCK_BYTES) * BLOCK_BYTES, BLOCK_BYTES), MOST_CHUNK_BYTES)


MOST_PADDING = 512
"""Bytes between two tensors that are taken for padding: allocators of devices round to it. What lies between such as
are further apart may be somebody's."""


class Span(NamedTuple):
    """The bytes [start, stop) of one tensor; `tensor` counts in the manifest's order, `start` is the edge of a
    block."""

    tensor: int
    start: int
    stop: int


class Chunk(NamedTuple):
    """What is read and proven as one: spans of consecutive tensors."""

    number: int
    spans: tuple[Span, ...]
    bytes: int


def cut(tensors: Sequence[TensorEntry]) -> tuple[Chunk, ...]:
    """All bytes of `tensors`, once, in order. A chunk exceeds the common size by less than a block."""
    return _cut(tuple([t.bytes for t in tensors]))


@lru_cache(maxsize=2)
def _cut(sizes: tuple[int, ...]) -> tuple[Chunk, ...]:
    # Remembered: a guardian wakes to the same content again and again, and nothing is read before this is known.
    size = chunk_bytes(sum(sizes))
    made: list[Chunk] = []
    spans: list[Span] = []
    held = 0
    for index, length in enumerate(sizes):
        at = 0
        while at < length:
            blocks = max((size - held) // BLOCK_BYTES, 1)
            stop = min(at + blocks * BLOCK_BYTES, length)
            spans.append(Span(index, at, stop))
            held += stop - at
            at = stop
            if held >= size:
                made.append(Chunk(len(made), tuple(spans), held))
                spans, held = [], 0
    if spans:
        made.append(Chunk(len(made), tuple(spans), held))
    return tuple(made)


def of_parts(parts: Iterable[int], count: int, chunks: int) -> list[int]:
    """The numbers of those of `chunks` that lie in `parts`, where `count` parts of equal length make up the body.

    Who divides a body among receivers need not know how it is cut: all chunks are of about one size. Each lies in one
    part; a part is empty where there are fewer chunks than parts. Raises InvalidInput for a part that does not exist.
    """
    found: list[int] = []
    for part in parts:
        if not 0 <= part < count:
            raise InvalidInput(f"part {part} of {count} does not exist")
        found += range(-(-part * chunks // count), -(-(part + 1) * chunks // count))
    return found


class Piece(NamedTuple):
    """Bytes [start, stop) of the receiver's segment that belong to one tensor, from the edge of a block on; `digests`
    has DIGEST_BYTES for each block of them."""

    tensor: int
    start: int
    stop: int
    digests: bytes


class Step(NamedTuple):
    """What is filled at once, then proven: [start, stop) of the receiver's segment, and the pieces in it.

    What lies in it and in no piece is padding on both sides, and nobody's.
    """

    start: int
    stop: int
    pieces: Sequence[Piece]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The pieces' edges, counted from `start`."""
        return [(piece.start - self.start, piece.stop - self.start) for piece in self.pieces]

    @property
    def digests(self) -> bytes:
        """Of all blocks of all pieces, in order."""
        return b"".join([piece.digests for piece in self.pieces])

    def odd(self, found: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        """Of each block that has another digest in `found`: its tensor, the digest it should have, the one it has."""
        at = 0
        for piece in self.pieces:
            for place in range(0, len(piece.digests), DIGEST_BYTES):
                expected, got = piece.digests[place : place + DIGEST_BYTES], found[at : at + DIGEST_BYTES]
                if expected != got:
                    yield piece.tensor, expected, got
                at += DIGEST_BYTES


class Run(NamedTuple):
    """Bytes that lie together on both sides: from `there` on in the holder's segment, and `whole` of the receiver's."""

    there: int
    whole: Step

    @property
    def bytes(self) -> int:
        return self.whole.stop - self.whole.start

    def steps(self) -> Iterator[Step]:
        """The same in steps of at most a block, or one block and what pads it."""
        start, held = self.whole.start, list[Piece]()
        for piece in self.whole.pieces:
            for n, at in enumerate(range(piece.start, piece.stop, BLOCK_BYTES)):
                stop = min(at + BLOCK_BYTES, piece.stop)
                if held and stop - start > BLOCK_BYTES:
                    # A step ends where the next begins, so that padding between them is filled too.
                    yield Step(start, at, held)
                    start, held = at, []
                held.append(Piece(piece.tensor, at, stop, piece.digests[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES]))
        yield Step(start, self.whole.stop, held)


class Places:
    """Where a holder's tensors lie there, and where they belong here."""

    def __init__(self, theirs: Sequence[TensorEntry], ours: Mapping[str, TensorEntry]) -> None:
        """`ours` has every name of `theirs`, with equal sizes."""
        self._theirs = theirs
        self._here = [ours[t.name].offset for t in theirs]
        there_after, here_after = _followers([t.offset for t in theirs]), _followers(self._here)
        # Together: the next tensor on both sides, near and at the same distance. Only then is it padding between them.
        self._joined = [
            index > 0
            and there_after.get(index - 1) == here_after.get(index - 1) == index
            and t.offset - theirs[index - 1].offset == self._here[index] - self._here[index - 1]
            and t.offset - theirs[index - 1].offset - theirs[index - 1].bytes < MOST_PADDING
            for index, t in enumerate(theirs)
        ]

    def runs(self, chunks: Iterable[Chunk]) -> list[Run]:
        """The bytes of consecutive `chunks` in as few runs as both sides' places allow."""
        found: list[Run] = []
        held: list[Span] = []
        for span in (s for c in chunks for s in c.spans):
            if held and held[-1].tensor == span.tensor and held[-1].stop == span.start:
                held[-1] = Span(span.tensor, held[-1].start, span.stop)
                continue
            if held and not self._goes_on(held[-1], span):
                found.append(self._run(held))
                held = []
            held.append(span)
        if held:
            found.append(self._run(held))
        return found

    def _goes_on(self, last: Span, span: Span) -> bool:
        whole = last.stop == self._theirs[last.tensor].bytes and span.start == 0
        return whole and span.tensor == last.tensor + 1 and self._joined[span.tensor]

    def _run(self, spans: Sequence[Span]) -> Run:
        pieces = [self._piece(*span) for span in spans]
        there = self._theirs[spans[0].tensor].offset + spans[0].start
        return Run(there, Step(pieces[0].start, pieces[-1].stop, pieces))

    def _piece(self, tensor: int, start: int, stop: int) -> Piece:
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        digests = self._theirs[tensor].blocks[first * DIGEST_BYTES : last * DIGEST_BYTES]
        here = self._here[tensor]
        return Piece(tensor, here + start, here + stop, digests)


def _followers(offsets: Sequence[int]) -> dict[int, int]:
    """Which tensor lies next after which."""
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    return dict(pairwise(order))

"""How a manifest's bytes are cut into chunks: what is read, proven, passed on and resumed as one. Pure: no I/O.

Chunks follow the order in which the manifest lists tensors, and are cut at the edges of blocks; where anything lies
does not enter. So all holders of one content agree on chunk numbers, whatever their own places for the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes [start, stop) of one tensor; `tensor` counts in the manifest's order, `start` is the edge of a
    block."""

    tensor: int
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is read and proven as one: spans of consecutive tensors."""

    number: int
    spans: tuple[Span, ...]
    bytes: int


def cut(tensors: Sequence[TensorEntry]) -> tuple[Chunk, ...]:
    """All bytes of `tensors`, once, in order. A chunk exceeds the common size by less than a block."""
    size = chunk_bytes(sum(t.bytes for t in tensors))
    made: list[Chunk] = []
    spans: list[Span] = []
    held = 0
    for index, tensor in enumerate(tensors):
        at = 0
        while at < tensor.bytes:
            blocks = max((size - held) // BLOCK_BYTES, 1)
            stop = min(at + blocks * BLOCK_BYTES, tensor.bytes)
            spans.append(Span(index, at, stop))
            held += stop - at
            at = stop
            if held >= size:
                made.append(Chunk(len(made), tuple(spans), held))
                spans, held = [], 0
    if spans:
        made.append(Chunk(len(made), tuple(spans), held))
    return tuple(made)


class Block(NamedTuple):
    """One block in the receiver's segment: bytes [start, stop), whose digest has to be `digest`."""

    tensor: int
    start: int
    stop: int
    digest: bytes


class Step(NamedTuple):
    """What is filled at once, then proven: [start, stop) of the receiver's segment, and the blocks in it.

    What lies in it and in no block is padding on both sides, and nobody's.
    """

    start: int
    stop: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie together on both sides: `bytes` from `there` on in the holder's segment, filled by `steps`."""

    there: int
    bytes: int
    steps: tuple[Step, ...]

    @property
    def here(self) -> int:
        """Where it begins in the receiver's segment."""
        return self.steps[0].start


class Places:
    """Where a holder's tensors lie there, and where they belong here."""

    def __init__(self, theirs: Sequence[TensorEntry], ours: Mapping[str, TensorEntry]) -> None:
        """`ours` has every name of `theirs`, with equal sizes."""
        self._theirs = theirs
        self._here = [ours[t.name].offset for t in theirs]
        there_after, here_after = _followers([t.offset for t in theirs]), _followers(self._here)
        # Together: the next tensor on both sides, at the same distance. Only then is what lies between them padding.
        self._joined = [
            index > 0
            and there_after.get(index - 1) == here_after.get(index - 1) == index
            and t.offset - theirs[index - 1].offset == self._here[index] - self._here[index - 1]
            for index, t in enumerate(theirs)
        ]

    def runs(self, chunks: Iterable[Chunk]) -> list[Run]:
        """The bytes of consecutive `chunks` in as few runs as both sides' places allow."""
        found: list[Run] = []
        there, blocks = 0, list[Block]()
        last: Span | None = None
        for span in (s for c in chunks for s in c.spans):
            if blocks and not (last and self._goes_on(last, span)):
                found.append(_run(there, blocks))
                blocks = []
            if not blocks:
                there = self._theirs[span.tensor].offset + span.start
            blocks.extend(self._blocks(span))
            last = span
        if blocks:
            found.append(_run(there, blocks))
        return found

    def _goes_on(self, last: Span, span: Span) -> bool:
        if span.tensor == last.tensor:
            return span.start == last.stop
        whole = last.stop == self._theirs[last.tensor].bytes and span.start == 0
        return whole and span.tensor == last.tensor + 1 and self._joined[span.tensor]

    def _blocks(self, span: Span) -> Iterator[Block]:
        digests, here = self._theirs[span.tensor].blocks, self._here[span.tensor]
        for at in range(span.start, span.stop, BLOCK_BYTES):
            place = at // BLOCK_BYTES * DIGEST_BYTES
            yield Block(
                span.tensor, here + at, here + min(at + BLOCK_BYTES, span.stop), digests[place : place + DIGEST_BYTES]
            )


def _followers(offsets: Sequence[int]) -> dict[int, int]:
    """Which tensor lies next after which."""
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    return dict(pairwise(order))


def _run(there: int, blocks: Sequence[Block]) -> Run:
    steps: list[Step] = []
    batch: list[Block] = []
    start = blocks[0].start
    for block in blocks:
        if batch and block.stop - start > BLOCK_BYTES:
            # A step ends where the next begins, so that padding between them is filled too.
            steps.append(Step(start, block.start, tuple(batch)))
            start, batch = block.start, []
        batch.append(block)
    steps.append(Step(start, blocks[-1].stop, tuple(batch)))
    return Run(there, blocks[-1].stop - blocks[0].start, tuple(steps))

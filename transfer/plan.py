"""Which bytes are read by which stream, in which order, and which pages they need. Pure: no I/O.

A stripe is a run of whole tensors, so that one stream verifies each tensor as its bytes arrive and the
reason for a refusal names the tensor. Stripes are contiguous in the segment and near-equal in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relight.core.errors import InvalidInput
from relight.transfer.manifest import TensorEntry, WeightManifest


@dataclass(frozen=True, slots=True)
class Stripe:
    """What one stream reads: tensors in ascending offset, covering [start, stop) of the segment."""

    stream: int
    start: int
    stop: int
    tensors: tuple[TensorEntry, ...]

    @property
    def bytes(self) -> int:
        """Bytes of tensors, padding left out."""
        return sum(t.bytes for t in self.tensors)


HUGE = 2 << 20


def whole_pages(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The 2 MiB pages that hold the given (start, stop) ranges, as ascending ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((a // HUGE * HUGE, -(-b // HUGE) * HUGE) for a, b in ranges if b > a):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def shares(ranges: Sequence[tuple[int, int]], streams: int) -> list[list[tuple[int, int]]]:
    """`whole_pages` ranges dealt out to `streams` in runs of near-equal size, cut at whole pages."""
    total = sum(b - a for a, b in ranges) // HUGE
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(streams)]
    done = 0
    for start, stop in ranges:
        while start < stop:
            stream = min(done * streams // max(total, 1), streams - 1)
            # Pages that this stream still takes: those before the first page of the next one's share.
            until = -(-(stream + 1) * total // streams) - done if stream < streams - 1 else (stop - start) // HUGE
            end = min(stop, start + max(until, 1) * HUGE)
            dealt[stream].append((start, end))
            done += (end - start) // HUGE
            start = end
    return dealt


def stripes(manifest: WeightManifest, streams: int) -> tuple[Stripe, ...]:
    """Cuts the manifest into at most `streams` (>= 1) stripes; empty tensors are read by nobody.

    The cut after each stream is the tensor boundary nearest to its even share, so no stripe exceeds the
    even share by more than its largest tensor.
    """
    if streams < 1:
        raise InvalidInput(f"a transfer needs at least 1 stream, got {streams}")
    left = sorted((t for t in manifest.tensors if t.bytes), key=lambda t: t.offset)
    total = sum(t.bytes for t in left)
    made: list[Stripe] = []
    done = 0
    while left:
        streams_left = max(streams - len(made), 1)
        share = (total - done) / streams_left
        taken, size = 0, 0
        while taken < len(left):
            step = left[taken].bytes
            # Stop where the boundary is nearest to the share; the last stream takes all the rest.
            if taken and streams_left > 1 and size + step / 2 > share:
                break
            size += step
            taken += 1
        run = tuple(left[:taken])
        made.append(Stripe(len(made), run[0].offset, run[-1].offset + run[-1].bytes, run))
        left, done = left[taken:], done + size
    return tuple(made)

"""Which bytes are read by which stream, in which order, and which pages they need. Pure: no I/O.

A stripe is a run of whole tensors, so that one stream verifies each tensor as its bytes arrive and the
reason for a refusal names the tensor. Stripes are contiguous in the segment and near-equal in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
"""Bytes of a huge page."""


def shares(length: int, streams: int) -> list[tuple[int, int]]:
    """[0, length) in `streams` runs of near-equal size, cut at multiples of 2 MiB; a run may be empty."""
    pages = -(-length // HUGE)
    cuts = [min(pages * n // streams * HUGE, length) for n in range(streams)] + [length]
    return list(pairwise(cuts))


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

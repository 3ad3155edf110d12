"""Which chunks are still to come, from whom, and which are in place: what the connections of one refill share.

Each holder has a queue, as the plan dealt it out. Who has emptied its own takes from the longest other one, from
behind; what a holder failed to bring goes back to those that are left. A chunk is never under way twice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from relight.core.clock import Clock
from relight.core.errors import InvalidInput

SHARES = 4
"""What is left of a queue is taken in so many parts at least."""

PATIENCE = 2.0
"""Times the planned time after which a plan counts as failed."""


class Bitmap:
    """A set of chunk numbers below `count`. Not thread-safe."""

    def __init__(self, count: int, data: bytes = b"") -> None:
        """`data` is what `dump` gave. Raises InvalidInput when it is of another length."""
        size = -(-count // 8)
        if data and len(data) != size:
            raise InvalidInput(f"a bitmap of {count} chunks has {size} bytes, got {len(data)}")
        self.count = count
        self._bits = bytearray(data or size)

    def add(self, number: int) -> None:
        self._bits[number >> 3] |= 1 << (number & 7)

    def __contains__(self, number: int) -> bool:
        return bool(self._bits[number >> 3] >> (number & 7) & 1)

    def __len__(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()

    @property
    def complete(self) -> bool:
        return len(self) >= self.count

    def missing(self) -> list[int]:
        """The numbers that are not in it, ascending."""
        return [n for n in range(self.count) if n not in self]

    def dump(self) -> bytes:
        return bytes(self._bits)


class Board:
    """The chunks of one refill. Thread-safe."""

    def __init__(
        self, sizes: Sequence[int], placed: Bitmap, queues: Mapping[str, Iterable[int]], clock: Clock, *,
        planned_seconds: float = 0.0, turn: float = 0.0,
    ) -> None:  # fmt: skip
        """`sizes`: bytes by chunk number; `placed`: what is there already; `queues`: by holder, disjoint.

        What is missing and in no queue is left to whoever is free first. Nobody takes from another's queue before the
        plan's own time is well over: a source that is ahead would only take bandwidth from those that wait for its
        turn. What a lost holder leaves is begun at `turn` of it (0 to 1), where each of several receivers has another:
        so they fetch different chunks, and have the rest of each other.
        """
        self.placed = placed
        self._sizes, self._clock, self._turn = sizes, clock, turn
        self._queues = {name: deque(n for n in queue if n not in placed) for name, queue in queues.items()}
        dealt = {n for queue in self._queues.values() for n in queue}
        self._loose = deque(n for n in placed.missing() if n not in dealt)
        self._patience = planned_seconds * PATIENCE
        self._stopped = False
        self._changed = threading.Condition()
        self.begin()

    def begin(self) -> None:
        """The plan's time runs from now: nothing could be brought before."""
        self._free_at = self._clock.monotonic() + self._patience

    def take(
        self, holder: str, most_bytes: int, known: Bitmap | None = None, *, least_bytes: int = 0,
        wait_seconds: float = 0.0,
    ) -> list[int] | None:  # fmt: skip
        """Consecutive chunks for `holder` to bring, together at most `most_bytes` (or one chunk).

        It is a share of what is left, so that all connections end at about the same time; at least `least_bytes`.

        `known` is what a holder has that does not have all. None: nothing will come any more. []: nothing now, since
        all that is left is under way elsewhere, even after `wait_seconds`; or it is not among what is `known`.
        """
        until = self._clock.monotonic() + wait_seconds
        with self._changed:
            while not self._stopped and not self.placed.complete:
                if own := self._queues.get(holder):
                    return self._several(own, least_bytes, most_bytes, behind=False)
                others = [self._loose] if self._loose else []
                if self._clock.monotonic() >= self._free_at:
                    others += sorted(filter(None, self._queues.values()), key=len, reverse=True)
                if others and known is None:
                    if others[0] is self._loose:
                        return self._several(self._loose, least_bytes, most_bytes, behind=False)
                    return self._several(others[0], least_bytes, most_bytes, behind=True)
                if others and known is not None:
                    return self._known_one(others, known)
                if (left := until - self._clock.monotonic()) <= 0:
                    return []
                self._changed.wait(left)
            return None

    def _several(self, queue: deque[int], least_bytes: int, most_bytes: int, *, behind: bool) -> list[int]:
        pop, end, step = (queue.pop, -1, -1) if behind else (queue.popleft, 0, 1)
        share, taken = len(queue) // SHARES, [pop()]
        size = self._sizes[taken[0]]
        while queue and queue[end] == taken[-1] + step and (len(taken) < share or size < least_bytes):
            if (size := size + self._sizes[queue[end]]) > most_bytes:
                break
            taken.append(pop())
        return taken[::step]

    @staticmethod
    def _known_one(queues: Iterable[deque[int]], known: Bitmap) -> list[int]:
        for queue in queues:
            for number in queue:
                if number in known:
                    queue.remove(number)
                    return [number]
        return []

    def put(self, number: int) -> None:
        """The chunk is in place and proven."""
        with self._changed:
            self.placed.add(number)
            if self.placed.complete:
                self._changed.notify_all()

    def give_back(self, numbers: Iterable[int]) -> None:
        """Chunks that were taken and did not come: others may bring them."""
        with self._changed:
            self._loose.extend(n for n in numbers if n not in self.placed)
            self._changed.notify_all()

    def leave(self, holder: str) -> None:
        """The holder brings nothing any more; what was dealt to it is left to the others."""
        with self._changed:
            left = self._queues.pop(holder, deque())
            left.rotate(-int(len(left) * self._turn))
            self._loose.extend(left)
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody gets another chunk."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

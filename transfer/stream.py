"""One connection of a refill: it asks a holder ahead, brings what the board gives it, and proves each block.

What this process can reach at the holder's is copied and hashed in one pass over memory, what comes over a plain socket
is hashed on the way (transfer/onepass.py). Else a step of at most a block is filled, then hashed at once, while it is
in the processor's cache. Where the bytes land is transfer/ground.py's affair.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relight.core.errors import LocalFault, RemoteFault
from relight.transfer.board import Bitmap
from relight.transfer.chunks import Chunk, Places, Run, Step
from relight.transfer.ground import Ground, ground_of
from relight.transfer.request import Holder
from relight.transfer.source import RELAY_SECONDS
from relight.transfer.transports.base import READ_BYTES, Missing, Question, Reader

if TYPE_CHECKING:
    from relight.transfer.session import Agreed, Refill

ASKED_AHEAD = 2
"""Reads asked for before their turn, so that the source never waits for the next question."""
LENT_MOST = 2 * READ_BYTES
"""What is lent costs the source nothing to be asked for, and each turn costs the interpreter."""
TURN_SECONDS = 2e-3
"""How long a turn takes at least, by what the last ones took: each costs both ends about a tenth of it."""
SLACK = 8.0
"""A holder may take so many times as long for a chunk as the fastest one would, before another is asked for it."""
LEAST_PATIENCE = 0.5
"""Seconds that any chunk may take, however fast others are: a busy machine pauses that long."""
WATCH_SECONDS = 0.1
"""How often a connection without work looks whether another is late."""
NOTHING_NEW_SECONDS = 10.0
"""How long a holder that is itself receiving may have nothing that is needed."""
ORPHANED_SECONDS = 4.0
"""The same once nobody is left who has everything: what none of them has will never come."""


@dataclass(slots=True)
class _Batch:
    """Consecutive chunks that were asked for at once, and where their bytes lie."""

    chunks: Sequence[Chunk]
    runs: Sequence[Run]

    @property
    def bytes(self) -> int:
        return sum(c.bytes for c in self.chunks)


@dataclass(slots=True)
class Stream:
    """One thread's part of a refill. `first` tells the holder's other connections what `leader` found out."""

    refill: Refill
    holder: Holder
    leader: bool
    joined: threading.Event
    listens: bool = False
    """Whether it waits for a relay to have more: nothing is lost when that is cut short."""
    _reader: Reader | None = None
    _ground: Ground = field(init=False)
    _since: float | None = None
    """When the oldest batch's turn began."""
    _asked: deque[_Batch] = field(default_factory=deque)
    _spent: dict[str, float] = field(default_factory=lambda: {"pull": 0.0, "verify": 0.0})

    def __post_init__(self) -> None:
        self._ground = ground_of(self.refill.segment)

    def run(self) -> None:
        """Never raises: what failed is known to the refill."""
        try:
            if self.holder.reserve:
                self.refill.needed.wait()
                if self.refill.over:
                    return
            try:
                self._reader = self.holder.connect()
            except LocalFault as error:
                # This way to it is closed here (a card that is down, say); another may be open.
                self.refill.lose(self.holder.name, error)
                return
            self._serve(self._reader)
        except RemoteFault as error:
            # A stream that was cut because all is over says nothing about its holder.
            if self.refill.failure is None and not (self.listens and self.refill.over):
                self.refill.lose(self.holder.name, error)
        except Exception as error:  # noqa: BLE001 - a defect too must let go those that wait for this stream
            self.refill.fail(error)
        finally:
            self.joined.set()
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.close()
            self._ground.close()
            # Only then: a card may write into what it was asked for until its connection is closed.
            if self._asked and (agreed := self.refill.agreed) is not None:
                agreed.board.give_back(c.number for batch in self._asked for c in batch.chunks)

    def _serve(self, reader: Reader) -> None:
        refill = self.refill
        if self.leader:
            if self.holder.partial:
                # What it holds was proven against somebody's word: that word is heard first.
                refill.settled.wait()
                if refill.failure is not None:
                    return
            refill.join(self.holder, reader.describe())
            self.joined.set()
        else:
            self.joined.wait()
        refill.paged.wait()
        agreed = refill.agreed
        if agreed is None or refill.failure is not None:
            return
        begun = refill.clock.now()
        try:
            self._read(reader, agreed)
        finally:
            for name, spent in self._spent.items():
                refill.worked(name, begun, refill.clock.now(), spent)
        if not self.refill.gone(self.holder):
            reader.finish()
            refill.confirmed(self.holder.name)

    def _read(self, reader: Reader, agreed: Agreed) -> None:
        places = Places(agreed.described[self.holder.name].tensors, self.refill.wanted.tensors)
        known = Bitmap(len(agreed.chunks)) if self.holder.partial else None
        heard, news = self.refill.clock.monotonic(), False
        # What is lent is there as soon as it is permitted: nothing is gained by asking for more before.
        ahead, most = (1, LENT_MOST) if reader.lends else (ASKED_AHEAD, READ_BYTES)
        if self.refill.options.parts and not reader.lends:
            # Others wait for each chunk that comes: one at a time, so that none waits for its neighbours.
            most = 0
        while not self.refill.gone(self.holder):
            while len(self._asked) < ahead:
                patience = 0.0 if self._asked else WATCH_SECONDS
                least = int(TURN_SECONDS * self.refill.rate(self.holder.name, self.kind))
                numbers = agreed.board.take(self.holder.name, most, known, least_bytes=least, wait_seconds=patience)
                if not numbers:
                    break
                self._ask(reader, places, [agreed.chunks[n] for n in numbers])
            if self._asked:
                news = self._bring(reader)
            elif numbers is None:
                return
            elif known is not None:
                before = len(known)
                self.listens = True
                known = reader.held(before, len(agreed.chunks))
                self.listens = False
                news = len(known) > before
                self.refill.watch()
            else:
                # All that is left is under way elsewhere: who has nothing to do looks whether somebody is late.
                self.refill.watch()
                continue
            now = self.refill.clock.monotonic()
            allowed = ORPHANED_SECONDS if self.refill.orphaned else NOTHING_NEW_SECONDS
            if news:
                heard = now
            elif known is not None and now - heard > allowed:
                raise RemoteFault(f"{self.holder.name} received nothing new for {allowed:g} s")

    def _ask(self, reader: Reader, places: Places, chunks: Sequence[Chunk]) -> None:
        batch = _Batch(chunks, places.runs(chunks))
        self._asked.append(batch)
        for run in batch.runs:
            here = self.refill.segment.room(run.whole.start, run.whole.stop)
            reader.ask(Question(chunks[0].number, len(chunks), run.there, run.bytes), here)

    def _bring(self, reader: Reader) -> bool:
        """The oldest batch: all of its runs, each block proven. One that has not arrived there goes back: False."""
        batch, refill = self._asked[0], self.refill
        self._since = begun = refill.clock.monotonic()
        refill.written, whole = True, True
        for run in batch.runs:
            try:
                if not self._bring_run(reader, run):
                    return False
            except Missing:
                whole = False
        self._ground.settle()
        self._asked.popleft()
        self._since = None
        if whole:
            seconds = refill.clock.monotonic() - begun
            refill.measured(self.holder.name, self.kind, batch.bytes, seconds)
            refill.placed(self.holder.name, batch.chunks)
        else:
            refill.returned(batch.chunks)
        return whole

    def _bring_run(self, reader: Reader, run: Run) -> bool:
        """False when the refill failed meanwhile."""
        refill, ground, monotonic = self.refill, self._ground, self.refill.clock.monotonic
        pulled = verified = 0.0
        begun = monotonic()
        try:
            for step in ground.steps(run, reader):
                if refill.failure is not None:
                    return False
                found = ground.bring(step, reader)
                arrived = monotonic()
                pulled += arrived - begun
                found = found or ground.digests(step)
                if found != step.digests:
                    self._differs(step, found)
                begun = monotonic()
                verified += begun - arrived
        finally:
            self._spent["pull"] += pulled
            self._spent["verify"] += verified
        return True

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether its holder's bytes lie where this process reaches them, and whether it is being filled: a source that
        is read by all is slower than one of many relays, and nothing is wrong with it."""
        reader = self._reader
        return reader is not None and reader.lends, self.holder.partial

    def late(self, now: float, fastest: float) -> str:
        """Why this stream is to be cut: its chunks take far longer than the `fastest` (bytes per second) would."""
        # Read once: the stream's own thread ends a batch at any moment.
        since, asked = self._since, list(self._asked)
        if since is None or not asked or not fastest:
            return ""
        size = asked[0].bytes
        allowed = max(SLACK * size / fastest, LEAST_PATIENCE) + (RELAY_SECONDS if self.holder.partial else 0.0)
        if now - since <= allowed:
            return ""
        return f"{self.holder.name} is too slow: {size} bytes took more than {allowed:.1f} s"

    def cut(self) -> None:
        """Ends its waiting, from another thread."""
        if self._reader is not None:
            self._reader.abort()

    def _differs(self, step: Step, found: bytes) -> None:
        agreed = self.refill.agreed
        tensor, expected, got = next(step.odd(found))
        name = agreed.manifest.tensors[tensor].name if agreed else str(tensor)
        raise RemoteFault(
            f"tensor {name} from {self.holder.name}: digest {got.hex()}, the manifest says {expected.hex()}"
        )

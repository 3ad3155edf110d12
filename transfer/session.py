"""One refill: from the first hello to the last proven chunk, from any number of holders, over any transport.

Pages come back first, dealt out evenly, while the holders are asked what they have; then each connection
(transfer/stream.py) brings the chunks that the board (transfer/board.py) gives it, and proves each block while it is
still in the cache. A holder that fails leaves its chunks to the others; the refill fails when none is left. Who is at
fault, and whether the model is now dirty, is part of the error (core/errors.py).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from relight.core.clock import Clock
from relight.core.errors import LocalFault, ModelDirty, RemoteFault, TransferError
from relight.core.fingerprint import Fingerprint
from relight.core.records import Phase
from relight.transfer.board import Bitmap, Board
from relight.transfer.chunks import Chunk, Places, cut, of_parts
from relight.transfer.device_segment import AnySegment
from relight.transfer.manifest import WeightManifest
from relight.transfer.plan import shares
from relight.transfer.request import Holder, Options, Progress, Received, Wanted
from relight.transfer.segment import spans
from relight.transfer.stream import Stream

PAGES_BYTES = 16 << 20
"""Pages are brought back in steps of this, so that a refill that failed elsewhere stops soon."""


# Where a tensor lies is each side's own affair; what it is must be the same.
_ALIKE = ("dtype", "shape", "stride", "bytes", "aliases")
_described = attrgetter(*_ALIKE)


def check_source(theirs: WeightManifest, wanted: Wanted, segment: AnySegment, source: str) -> None:
    """Raises RemoteFault naming the field when the source's bytes would not fit, cannot be proven in `segment`, or are
    not the content asked for."""
    differing = Fingerprint(layout=wanted.layout).differences(theirs.fingerprint, ("layout",))
    if differing:
        raise RemoteFault(f"{source} has another layout: " + "; ".join(map(str, differing)))
    if theirs.digests is not segment.digest:
        raise RemoteFault(
            f"{source} proves bytes by {theirs.digests}, this member by {segment.digest}: set digests alike"
        )
    got = theirs.fingerprint.content.get("revision", "")
    if got != wanted.revision:
        raise RemoteFault(
            f"{source} holds other content: content.revision: {wanted.revision!r} asked for, {got!r} there"
        )
    if odd := sorted({t.name for t in theirs.tensors} ^ set(wanted.tensors)):
        raise RemoteFault(f"{source} has another layout: tensor {odd[0]} exists on one side only")
    for their in theirs.tensors:
        ours = wanted.tensors[their.name]
        if _described(ours) != _described(their):
            what, a, b = next(x for x in zip(_ALIKE, _described(ours), _described(their), strict=True) if x[1] != x[2])
            raise RemoteFault(f"{source} has another layout: {their.name}.{what}: {a!r} here, {b!r} there")


def refill(
    segment: AnySegment,
    wanted: Wanted,
    holders: Sequence[Holder],
    *,
    streams: int,
    clock: Clock,
    options: Options | None = None,
) -> Received:
    """Fills `segment` from `holders` and proves every block. Blocking; `streams` threads bring pages back.

    Raises RemoteFault or LocalFault while the model is untouched, ModelDirty once a byte was written.
    """
    return Refill(segment, wanted, holders, streams, clock, options or Options()).run()


@dataclass(slots=True)
class _Work:
    """What one kind of work took over all threads: first begin, last end, and time summed (seconds)."""

    start: float = float("inf")
    end: float = 0.0
    spent: float = 0.0

    def add(self, start: float, end: float, spent: float) -> None:
        self.start, self.end, self.spent = min(self.start, start), max(self.end, end), self.spent + spent


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the holders agree on: the content, and how it is cut."""

    manifest: WeightManifest
    described: dict[str, WeightManifest]
    """By holder: the same content at its own places."""
    chunks: tuple[Chunk, ...]
    board: Board
    total: int
    """Bytes that are not in place yet."""


class Refill:
    """The state that the threads of one refill share. Used once."""

    def __init__(
        self,
        segment: AnySegment,
        wanted: Wanted,
        holders: Sequence[Holder],
        streams: int,
        clock: Clock,
        options: Options,
    ) -> None:
        self.segment, self.wanted, self.clock, self.options = segment, wanted, clock, options
        self._streams = streams
        self._holders = self._rested(holders)
        self.paged = threading.Event()
        """Set when all pages are there, or `failure` says why nothing is read."""
        self.needed = threading.Event()
        """Set when those in reserve have to help, or nobody any more."""
        self.settled = threading.Event()
        """Set when a holder of everything said what is read, or nobody will."""
        self.failure: Exception | None = None
        self.lost: dict[str, TransferError] = {}
        # What an earlier refill left half-done is dirty, whether this one writes or not.
        self.written = len(options.kept.placed) > 0
        self.agreed: Agreed | None = None
        self._rates: dict[tuple[bool, bool], dict[str, float]] = defaultdict(dict)
        """By kind of holder (Stream.kind): none is a measure for those of another."""
        self._running: list[Stream] = []
        self._work = {n: _Work() for n in ("pages", "pull", "verify")}
        self._bytes = dict.fromkeys((h.name for h in self._holders), 0)
        self._confirmed = False
        self._lock = threading.RLock()
        self._pages_left = streams
        self._begun = 0.0
        self._begun_monotonic = 0.0

    def _rested(self, holders: Sequence[Holder]) -> Sequence[Holder]:
        """Without those that rest after failures, unless nobody with everything would be left."""
        breaker = self.options.breaker
        fit = [h for h in holders if breaker is None or not breaker.rests(h.name)]
        return fit if any(not h.partial for h in fit) else holders

    # ------------------------------------------------------------------ the refill

    def run(self) -> Received:
        self._begun, self._begun_monotonic = self.clock.now(), self.clock.monotonic()
        if not self._holders:
            raise RemoteFault("no holder of these weights is known")
        if all(h.partial for h in self._holders):
            raise RemoteFault("nobody who holds all of these weights is known")
        if all(h.reserve for h in self._holders):
            self.needed.set()
        self.options.cancel.on(lambda: self.fail(LocalFault("the refill was cancelled")))
        threads = []
        for holder in self._holders:
            joined = threading.Event()
            for n in range(holder.connections):
                stream = Stream(self, holder, n == 0, joined)
                self._running.append(stream)
                threads.append(threading.Thread(target=stream.run, name=f"relight-pull-{holder.name}-{n}"))
        # After those that connect: they wait for the holders' answers while pages come.
        threads += [
            threading.Thread(target=self._bring_pages, args=share, name=f"relight-pages-{n}")
            for n, share in enumerate(shares(self.segment.bytes, self._streams))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._judge()

    def _judge(self) -> Received:
        agreed = self.agreed
        if self.failure is None and not (agreed and agreed.board.placed.complete and self._confirmed):
            self.failure = self._combined()
        if self.failure is None and agreed is not None:
            return Received(
                agreed.manifest, sum(self._bytes.values()), self._phases(), dict(self._bytes),
                {name: str(error) for name, error in self.lost.items()},
            )  # fmt: skip
        fault = self.failure
        if not isinstance(fault, TransferError):
            fault = LocalFault(f"{type(fault).__name__}: {fault}")
        if self.written:
            raise ModelDirty(str(fault), cause=fault) from self.failure
        self.segment.drop()
        self.options.kept.clear()
        raise fault

    def _combined(self) -> TransferError:
        if len(self.lost) == 1:
            return next(iter(self.lost.values()))
        kind = LocalFault if all(isinstance(e, LocalFault) for e in self.lost.values()) else RemoteFault
        return kind("no holder is left: " + "; ".join(map(str, self.lost.values())))

    def _phases(self) -> tuple[Phase, ...]:
        placed = sum(self._bytes.values())
        said = {
            "pages": "all of the segment",
            "pull": f"{placed} bytes",
            "verify": f"{self.segment.digest} of every block",
        }
        # Holders were asked and compared before the first byte: that is part of the pull.
        self._work["pull"].start = self._begun
        return tuple(
            Phase(name, w.start, w.end, f"{said[name]}; {w.spent:.3f} s of work")
            for name, w in self._work.items()
            if w.end
        )

    def _bring_pages(self, start: int, stop: int) -> None:
        begun = self.clock.now()
        spent = self.clock.monotonic()
        try:
            if not self.options.kept.paged:
                for low, high in spans(start, stop, PAGES_BYTES):
                    if self.failure is not None:
                        return
                    self.segment.populate(low, high)
                self.worked("pages", begun, self.clock.now(), self.clock.monotonic() - spent)
        except Exception as error:  # noqa: BLE001 - a defect too must let go those that wait for pages
            self.fail(error)
        with self._lock:
            self._pages_left -= 1
            if not self._pages_left and self.failure is None:
                self.options.kept.paged = True
                if self.agreed is not None:
                    self.agreed.board.begin()
                self.paged.set()

    # ------------------------------------------------------------------ what streams say

    def join(self, holder: Holder, manifest: WeightManifest) -> None:
        """The holder takes part; the first one says what is read. Raises RemoteFault when its bytes are others."""
        check_source(manifest, self.wanted, self.segment, holder.name)
        named = holder.manifest_digest
        if named and manifest.digest() != named:
            raise RemoteFault(f"{holder.name} describes other weights than it offered: its manifest is not {named}")
        with self._lock:
            agreed = self.agreed
            if agreed is None:
                agreed = self.agreed = self._agree(manifest)
                self.settled.set()
        same = manifest is agreed.manifest
        for ours, theirs in zip(agreed.manifest.tensors, manifest.tensors, strict=True) if not same else ():
            if (ours.name, ours.blocks) != (theirs.name, theirs.blocks):
                raise RemoteFault(f"{holder.name} holds other content: {theirs.name} differs from what others hold")
        agreed.described[holder.name] = manifest

    def _agree(self, manifest: WeightManifest) -> Agreed:
        chunks = cut(manifest.tensors)
        kept, content = self.options.kept, tuple((t.name, t.blocks) for t in manifest.tensors)
        if content != kept.content:
            kept.content, kept.placed = content, self._found(manifest, chunks)
        options = self.options
        queues = {
            h.name: of_parts(h.queue, options.parts or len(chunks), len(chunks))
            for h in self._holders
            if h.name not in self.lost
        }
        board = Board(
            [c.bytes for c in chunks], kept.placed, queues, self.clock, planned_seconds=options.planned_seconds,
            turn=options.turn,
        )  # fmt: skip
        total = sum(chunks[n].bytes for n in kept.placed.missing())
        if not total:
            self.needed.set()
        if (relay := self.options.relay) is not None:
            here = tuple(replace(t, offset=self.wanted.tensors[t.name].offset) for t in manifest.tensors)
            relay.relay(replace(manifest, segment_bytes=self.segment.bytes, tensors=here), chunks, kept.placed)
        return Agreed(manifest, {}, chunks, board, total)

    def _found(self, manifest: WeightManifest, chunks: tuple[Chunk, ...]) -> Bitmap:
        """What the segment holds already of the content, if that was asked for."""
        found = Bitmap(len(chunks))
        if self.options.look_first:
            places = Places(manifest.tensors, self.wanted.tensors)
            for chunk in chunks:
                pieces = [piece for run in places.runs([chunk]) for piece in run.whole.pieces]
                if all(self.segment.digests(p.start, p.stop) == p.digests for p in pieces):
                    found.add(chunk.number)
        return found

    def worked(self, name: str, start: float, end: float, spent: float) -> None:
        """Adds to what a kind of work took: wall clock from `start` to `end`, `spent` seconds of it at work."""
        with self._lock:
            self._work[name].add(start, end, spent)

    def placed(self, holder: str, chunks: Sequence[Chunk]) -> None:
        """These chunks are proven and in place."""
        agreed = self.agreed
        if agreed is None:
            return
        for chunk in chunks:
            agreed.board.put(chunk.number)
        self.watch()
        if agreed.board.placed.complete:
            self.needed.set()
            for stream in self._running:
                if stream.listens:
                    stream.cut()
        if self.options.relay is not None:
            self.options.relay.arrived()
        with self._lock:
            self._bytes[holder] += sum(c.bytes for c in chunks)
            done = sum(self._bytes.values())
            seconds = self.clock.monotonic() - self._begun_monotonic
            self.options.on_progress(Progress(done, agreed.total, seconds, dict(self._bytes)))

    def returned(self, chunks: Sequence[Chunk]) -> None:
        """These chunks did not come; others may bring them."""
        if self.agreed is not None:
            self.agreed.board.give_back(c.number for c in chunks)

    def measured(self, holder: str, kind: tuple[bool, bool], count: int, seconds: float) -> None:
        """A connection to `holder` brought `count` bytes in `seconds`."""
        if seconds > 0:
            self._rates[kind][holder] = count / seconds

    def rate(self, holder: str, kind: tuple[bool, bool]) -> float:
        """Bytes per second of the last turn of one connection to `holder`; 0 before."""
        return self._rates[kind].get(holder, 0.0)

    def watch(self) -> None:
        """Cuts the streams whose chunks others would have brought long ago."""
        now = self.clock.monotonic()
        for stream in self._running:
            holder = stream.holder.name
            rates = self._rates[stream.kind]
            others = [r for name, r in tuple(rates.items()) if name != holder and name not in self.lost]
            if why := stream.late(now, max(others, default=0.0)):
                self.lose(holder, RemoteFault(why))
                stream.cut()

    def confirmed(self, holder: str) -> None:
        """The holder's permission was good to the end."""
        self._confirmed = True
        if self.options.breaker is not None:
            self.options.breaker.succeeded(holder)

    def lose(self, holder: str, error: TransferError) -> None:
        """The holder brings nothing more; the others go on, if there are any."""
        with self._lock:
            if holder in self.lost:
                return
            self.lost[holder] = error
            left = [h for h in self._holders if h.name not in self.lost]
            # That one which is being filled is late, or gone, says nothing about what it will be as a source.
            filling = any(h.partial for h in self._holders if h.name == holder)
            if self.options.breaker is not None and isinstance(error, RemoteFault) and not filling:
                self.options.breaker.failed(holder)
            if self.agreed is not None:
                self.agreed.board.leave(holder)
            if not left or (self.agreed is None and all(h.partial for h in left)):
                self.fail(self._combined())
            elif all(h.reserve for h in left):
                self.needed.set()

    @property
    def over(self) -> bool:
        """Whether nothing is left to bring, for better or worse."""
        return self.failure is not None or (self.agreed is not None and self.agreed.board.placed.complete)

    @property
    def orphaned(self) -> bool:
        """Whether only holders are left that are themselves receiving."""
        return all(h.partial or h.name in self.lost for h in self._holders)

    def gone(self, holder: Holder) -> bool:
        """Whether the holder failed, on this connection or another."""
        return self.failure is not None or holder.name in self.lost

    def fail(self, error: Exception) -> None:
        """Stops all threads, wherever they are; of several failures the first one counts."""
        with self._lock:
            self.failure = self.failure or error
            if self.agreed is not None:
                self.agreed.board.stop()
        self.paged.set()
        self.needed.set()
        self.settled.set()
        # Whoever waits for a source need not wait out its deadline.
        for stream in self._running:
            stream.cut()

"""One refill: from the first hello to the last verified tensor, over any transport.

Pages come back first, dealt out evenly, while source and receiver agree on what is read; then bytes arrive and digests
are computed in one pass per stream, piece by piece, so that each piece is hashed while it is still in the cache. The
first failure stops all streams. Who is at fault, and whether the model is now dirty, is part of the error
(core/errors.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relight.core.clock import Clock
from relight.core.errors import LocalFault, ModelDirty, RelightError, RemoteFault, TransferError
from relight.core.failpoints import hit
from relight.core.fingerprint import Fingerprint
from relight.core.records import Phase
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.plan import Stripe, shares, stripes
from relight.transfer.segment import Segment, spans
from relight.transfer.transports.base import READ_BYTES, Connect, Reader
from relight.transfer.verify import Running

PIECE_BYTES = 1 << 20
"""Copied, then hashed, before the next: small enough to be in the second-level cache still."""
PAGES_BYTES = 16 << 20
"""Pages are brought back in steps of this, so that a refill that failed elsewhere stops soon."""
ASKED_AHEAD = 2
"""Reads asked for before their turn, so that the source never waits for the next question."""

OnProgress = Callable[[int, int], None]
"""Called with (bytes arrived, bytes in all), from any stream's thread."""


@dataclass(frozen=True, slots=True)
class Received:
    """A complete, verified refill."""

    manifest: WeightManifest
    bytes: int
    phases: tuple[Phase, ...]
    streams: int


@dataclass(slots=True)
class _Work:
    """What one kind of work took over all streams: first begin, last end, and time summed (seconds)."""

    start: float = float("inf")
    end: float = 0.0
    spent: float = 0.0

    def add(self, start: float, end: float, spent: float) -> None:
        self.start, self.end, self.spent = min(self.start, start), max(self.end, end), self.spent + spent


@dataclass(slots=True)
class _Shared:
    """What the streams of one refill share; `lock` guards it."""

    paged: threading.Barrier
    """Passed when every stream has brought its share of the pages back."""
    work: dict[str, _Work] = field(default_factory=lambda: {n: _Work() for n in ("pages", "pull", "verify")})
    agreed: threading.Event = field(default_factory=threading.Event)
    """Set once `tasks` says what each stream reads, or `failure` why nothing is read."""
    tasks: list[tuple[Stripe, Reader]] = field(default_factory=list)
    total: int = 0
    arrived: int = 0
    written: bool = False
    failure: Exception | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def agree(self, tasks: list[tuple[Stripe, Reader]]) -> None:
        """Lets the streams read."""
        self.tasks = tasks
        self.total = sum(stripe.bytes for stripe, _ in tasks)
        self.agreed.set()

    def fail(self, error: Exception) -> None:
        """Stops all streams, wherever they are; of several failures the first one counts."""
        with self.lock:
            self.failure = self.failure or error
        self.stop.set()
        self.paged.abort()
        self.agreed.set()


def check_source(
    theirs: WeightManifest, layout: Mapping[str, str], tensors: Mapping[str, TensorEntry], revision: str, source: str
) -> None:
    """Raises RemoteFault naming the field when the source's bytes would not fit, or are not the content asked for.

    `layout` and `tensors` are the receiver's own; `revision` is the content revision asked for.
    """
    differing = Fingerprint(layout=layout).differences(theirs.fingerprint, ("layout",))
    if differing:
        raise RemoteFault(f"{source} has another layout: " + "; ".join(map(str, differing)))
    got = theirs.fingerprint.content.get("revision", "")
    if got != revision:
        raise RemoteFault(f"{source} holds other content: content.revision: {revision!r} asked for, {got!r} there")
    names = {t.name for t in theirs.tensors}
    if names != set(tensors):
        odd = sorted(names ^ set(tensors))[0]
        raise RemoteFault(f"{source} has another layout: tensor {odd} exists on one side only")
    for their in theirs.tensors:
        ours = tensors[their.name]
        # Where a tensor lies is each side's own affair; what it is must be the same.
        for what in ("dtype", "shape", "stride", "bytes", "aliases"):
            a, b = getattr(ours, what), getattr(their, what)
            if a != b:
                raise RemoteFault(f"{source} has another layout: {their.name}.{what}: {a!r} here, {b!r} there")


def refill(
    segment: Segment,
    layout: Mapping[str, str],
    tensors: Mapping[str, TensorEntry],
    revision: str,
    connect: Connect,
    *,
    streams: int,
    clock: Clock,
    on_progress: OnProgress = lambda done, total: None,
) -> Received:
    """Fills `segment` from one source and verifies every tensor. Blocking; uses `streams` threads.

    Raises RemoteFault or LocalFault while the model is untouched, ModelDirty once a byte was written.
    """
    begun = clock.now()
    shared = _Shared(threading.Barrier(streams))
    threads = [
        threading.Thread(
            target=_Stream(segment, number, own, tensors, shared, clock, on_progress).run, name=f"relight-pull-{number}"
        )
        for number, own in enumerate(shares(segment.bytes, streams))
    ]
    # Pages cost as much as bytes: they come back while the source is still being asked what it has.
    for thread in threads:
        thread.start()
    readers: list[Reader] = []
    manifest: WeightManifest | None = None
    try:
        manifest, work = _agree(connect, readers, layout, tensors, revision, streams)
        shared.agree(list(zip(work, readers, strict=True)))
    except (RelightError, OSError, MemoryError) as error:
        shared.fail(error)
    finally:
        if not shared.agreed.is_set():
            shared.fail(LocalFault("the refill was given up"))
        for thread in threads:
            thread.join()
        if shared.failure is None:
            _finish(readers, shared)
        for reader in readers:
            reader.close()
    if shared.failure is not None or manifest is None:
        if not shared.written:
            segment.drop()
        raise _judged(shared.failure, shared.written)
    return Received(manifest, shared.arrived, _phases(shared, begun), len(readers))


def _agree(
    connect: Connect, readers: list[Reader], layout: Mapping[str, str], tensors: Mapping[str, TensorEntry],
    revision: str, streams: int,
) -> tuple[WeightManifest, tuple[Stripe, ...]]:  # fmt: skip
    """Compares manifests and opens a reader for each stripe; what was opened is in `readers` even when this raises."""
    readers.append(connect())
    manifest = readers[0].describe()
    check_source(manifest, layout, tensors, revision, readers[0].source)
    work = stripes(manifest, streams)
    while len(readers) < len(work):
        readers.append(connect())
    return manifest, work


def _finish(readers: list[Reader], shared: _Shared) -> None:
    """Asks the source once more whether all that was read was good to read."""
    try:
        for reader in readers:
            reader.finish()
    except TransferError as error:
        shared.fail(error)


def _judged(error: Exception | None, written: bool) -> TransferError:
    fault = error if isinstance(error, TransferError) else LocalFault(f"{type(error).__name__}: {error}")
    return ModelDirty(str(fault), cause=fault) if written else fault


def _phases(shared: _Shared, begun: float) -> tuple[Phase, ...]:
    said = {"pages": "all of the segment", "pull": f"{shared.arrived} bytes", "verify": "xxh3-128 of every tensor"}
    # The manifest was fetched and compared before the first byte: that is part of the pull.
    shared.work["pull"].start = begun
    return tuple(
        Phase(name, w.start, w.end, f"{said[name]}; {w.spent:.3f} s of work")
        for name, w in shared.work.items()
        if w.end
    )


@dataclass(slots=True)
class _Stream:
    """One thread's share of a refill: its pages first, then its stripe, each tensor put where the receiver has it."""

    segment: Segment
    number: int
    pages: tuple[int, int]
    tensors: Mapping[str, TensorEntry]
    shared: _Shared
    clock: Clock
    on_progress: OnProgress
    spent: dict[str, float] = field(default_factory=lambda: {"pages": 0.0, "pull": 0.0, "verify": 0.0})

    def run(self) -> None:
        """Never raises: the first failure of any stream is in `shared`, and stops the others."""
        shared, begun = self.shared, self.clock.now()
        marks = dict.fromkeys(self.spent, begun)
        try:
            self._bring_pages()
            marks["pages"] = self.clock.now()
            shared.agreed.wait()
            # A page may hold the edges of two streams' tensors: nobody writes before all pages are there.
            shared.paged.wait()
            if self.number < len(shared.tasks):
                self._fill(*shared.tasks[self.number])
                marks["pull"] = marks["verify"] = self.clock.now()
        except threading.BrokenBarrierError:
            pass  # another stream failed first, and said why
        except Exception as error:  # noqa: BLE001 - a defect too must let go those that wait for this stream
            shared.fail(error)
        with shared.lock:
            for name, work in shared.work.items():
                if marks[name] > begun:
                    work.add(begun, marks[name], self.spent[name])

    def _bring_pages(self) -> None:
        begun = self.clock.monotonic()
        for start, stop in spans(*self.pages, PAGES_BYTES):
            if self.shared.stop.is_set():
                return
            self.segment.populate(start, stop)
        self.spent["pages"] = self.clock.monotonic() - begun

    def _fill(self, stripe: Stripe, reader: Reader) -> None:
        ranges = list(spans(stripe.start, stripe.stop, READ_BYTES))
        for start, stop in ranges[:ASKED_AHEAD]:
            reader.ask(start, stop - start)
        tensors = iter(stripe.tensors)
        tensor, running = next(tensors), Running()
        for n, (start, stop) in enumerate(ranges):
            if self.shared.stop.is_set():
                return
            if n + ASKED_AHEAD < len(ranges):
                later, end = ranges[n + ASKED_AHEAD]
                reader.ask(later, end - later)
            at = start
            self.shared.written = True
            while at < stop:
                if at < tensor.offset:
                    # Between two tensors lies padding: it is asked for with them, and nobody's.
                    gap = memoryview(bytearray(min(tensor.offset, stop, at + PIECE_BYTES) - at))
                    reader.fill(gap)
                    at += len(gap)
                    continue
                edge = tensor.offset + tensor.bytes
                at = self._piece(reader, tensor, running, at, min(edge, stop, at + PIECE_BYTES))
                if at == edge:
                    running.check(tensor.name, tensor.digest, reader.source)
                    with self.shared.lock:
                        self.shared.arrived += tensor.bytes
                        self.on_progress(self.shared.arrived, self.shared.total)
                    tensor, running = next(tensors, tensor), Running()

    def _piece(self, reader: Reader, tensor: TensorEntry, running: Running, at: int, end: int) -> int:
        """Brings the source's [at, end) of `tensor` to where the receiver has it; returns `end`."""
        place = self.tensors[tensor.name].offset + at - tensor.offset
        piece = self.segment.view[place : place + end - at]
        begun = self.clock.monotonic()
        reader.fill(piece)
        arrived = self.clock.monotonic()
        hit("transfer.receive", piece)
        running.update(piece)
        self.spent["pull"] += arrived - begun
        self.spent["verify"] += self.clock.monotonic() - arrived
        return end

"""One refill: from the first hello to the last verified tensor, over any transport.

Pages come back, bytes arrive and digests are computed in one pass per stream, piece by piece, so that each
piece is hashed while it is still in the cache. The first failure stops all streams. Who is at fault, and
whether the model is now dirty, is part of the error (core/errors.py).
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
from relight.transfer.plan import Stripe, stripes
from relight.transfer.segment import HUGE, Segment, spans
from relight.transfer.transports.base import READ_BYTES, Connect, Reader
from relight.transfer.verify import Running

PIECE_BYTES = 1 << 20
"""Copied, then hashed, before the next: small enough to be in the second-level cache still."""
ASKED_AHEAD = 2
"""Reads asked for before their turn, so that the source never waits for the next question."""
PAGE_STEP = 256 << 20
"""Pages are brought back in steps of this many bytes, just ahead of the bytes that fill them; each step makes the
kernel drain the page lists of all processors, so there are few."""

OnProgress = Callable[[int, int], None]
"""Called with (bytes arrived, bytes in all), from any stream's thread."""


@dataclass(frozen=True, slots=True)
class Received:
    """A complete, verified refill."""

    manifest: WeightManifest
    bytes: int
    phases: tuple[Phase, ...]
    huge_pages: bool
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

    total: int
    arrived: int = 0
    written: bool = False
    failure: Exception | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    work: dict[str, _Work] = field(default_factory=lambda: {n: _Work() for n in ("pages", "pull", "verify")})


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
        for what in ("dtype", "shape", "stride", "offset", "bytes", "aliases"):
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
    first = connect()
    readers = [first]
    try:
        manifest = first.describe()
        check_source(manifest, layout, tensors, revision, first.source)
        work = stripes(manifest, streams)
        while len(readers) < len(work):
            readers.append(connect())
        shared = _Shared(total=manifest.weight_bytes)
        threads = [
            threading.Thread(
                target=_stream, args=(segment, stripe, reader, shared, clock, on_progress), name=f"relight-pull-{n}"
            )
            for n, (stripe, reader) in enumerate(zip(work, readers, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if shared.failure is None:
            for reader in readers:
                reader.finish()
    except TransferError as error:
        # Nothing but `finish` raises here after bytes were written: the stream's own errors are in `failure`.
        if "shared" in locals() and shared.written:
            raise ModelDirty(str(error), cause=error) from error
        raise
    finally:
        for reader in readers:
            reader.close()
    if shared.failure is not None:
        raise _judged(shared.failure, shared.written)
    return Received(manifest, shared.arrived, _phases(shared, segment, begun), segment.huge, len(work))


def _judged(error: Exception, written: bool) -> TransferError:
    fault = error if isinstance(error, TransferError) else LocalFault(f"{type(error).__name__}: {error}")
    return ModelDirty(str(fault), cause=fault) if written else fault


def _phases(shared: _Shared, segment: Segment, begun: float) -> tuple[Phase, ...]:
    pages = "2 MiB pages" if segment.huge else f"4 KiB pages ({segment.fallback_reason})"
    said = {"pages": pages, "pull": f"{shared.arrived} bytes", "verify": "xxh3-128 of every tensor"}
    # The manifest was fetched and compared before the first byte: that is part of the pull.
    shared.work["pull"].start = begun
    return tuple(
        Phase(name, w.start, w.end, f"{said[name]}; {w.spent:.3f} s of work")
        for name, w in shared.work.items()
        if w.end
    )


def _stream(
    segment: Segment, stripe: Stripe, reader: Reader, shared: _Shared, clock: Clock, on_progress: OnProgress
) -> None:
    spent = dict.fromkeys(shared.work, 0.0)
    begun = clock.now()
    marks = dict.fromkeys(shared.work, begun)
    try:
        _fill(segment, stripe, reader, shared, clock, spent, marks, on_progress)
    except (RelightError, OSError, MemoryError) as error:
        with shared.lock:
            shared.failure = shared.failure or error
        shared.stop.set()
    with shared.lock:
        for name, work in shared.work.items():
            if marks[name] > begun:
                work.add(begun, marks[name], spent[name])


def _fill(
    segment: Segment,
    stripe: Stripe,
    reader: Reader,
    shared: _Shared,
    clock: Clock,
    spent: dict[str, float],
    marks: dict[str, float],
    on_progress: OnProgress,
) -> None:
    ranges = list(spans(stripe.start, stripe.stop, READ_BYTES))
    for start, stop in ranges[:ASKED_AHEAD]:
        reader.ask(start, stop - start)
    paged = stripe.start // HUGE * HUGE
    tensors = iter(stripe.tensors)
    tensor, running = next(tensors), Running()
    for n, (start, stop) in enumerate(ranges):
        if shared.stop.is_set():
            return
        t0 = clock.monotonic()
        if stop > paged:
            ahead = min(max(paged + PAGE_STEP, stop), -(-stripe.stop // HUGE) * HUGE)
            segment.populate(paged, ahead)
            paged = ahead
            marks["pages"] = clock.now()
        spent["pages"] += clock.monotonic() - t0
        if n + ASKED_AHEAD < len(ranges):
            later, end = ranges[n + ASKED_AHEAD]
            reader.ask(later, end - later)
        at = start
        shared.written = True
        while at < stop:
            inside = at >= tensor.offset
            # Pieces never cross a tensor's edge; what lies between two tensors is padding, copied unhashed.
            edge = tensor.offset + tensor.bytes if inside else tensor.offset
            piece = segment.view[at : min(edge, stop, at + PIECE_BYTES)]
            t0 = clock.monotonic()
            reader.fill(piece)
            t1 = clock.monotonic()
            hit("transfer.receive", piece)
            if inside:
                running.update(piece)
            at += len(piece)
            spent["pull"] += t1 - t0
            spent["verify"] += clock.monotonic() - t1
            if inside and at == edge:
                running.check(tensor.name, tensor.digest, reader.source)
                with shared.lock:
                    shared.arrived += tensor.bytes
                    on_progress(shared.arrived, shared.total)
                tensor, running = next(tensors, tensor), Running()
        marks["pull"] = marks["verify"] = clock.now()

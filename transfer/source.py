"""The sending side's safety: what is readable, by whom, until when. No sockets: transports ask it at every read.

Generation, grant and pin are checked here at each read. A source is pinned while it is read; before it sleeps
it refuses new readers, drains the pinned ones, and cuts those that outlive the deadline. A receiver can be a source of
what it has proven so far: a read of a chunk that is still to come waits for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from relight.core.clock import Clock
from relight.core.errors import Conflict, Denied, InvalidInput, Unavailable
from relight.core.failpoints import hit
from relight.transfer import grants
from relight.transfer.board import Bitmap
from relight.transfer.chunks import Chunk, Places
from relight.transfer.device_segment import Held
from relight.transfer.manifest import Canary, WeightManifest, dump
from relight.transfer.pace import Pace

RELAY_SECONDS = 2.0
"""How long a reader waits here for a chunk that is still to come, before it is told to look elsewhere."""


@dataclass(slots=True, eq=False)
class Pin:
    """One reader's hold on a source; `reads` and `bytes` are what it has taken so far."""

    claims: grants.Claims
    reads: int = 0
    bytes: int = 0


class NotYet(Unavailable):
    """The chunk that was asked for has not arrived here: ask again, or somebody else."""

    code = "not-yet"


@dataclass(slots=True)
class _Partial:
    """What a source that is itself receiving has: which chunks, and what each occupies in its segment."""

    chunks: tuple[Chunk, ...]
    places: Places
    placed: Bitmap

    def lies_within(self, first: int, count: int, offset: int, length: int) -> bool:
        runs = self.places.runs(self.chunks[first : first + count])
        return any(r.there <= offset and offset + length <= r.there + r.bytes for r in runs)


class Source:
    """One engine member's readable weights. Thread-safe: each reader is served by a thread of its own."""

    def __init__(
        self,
        instance: str,
        segment: Held,
        manifest: WeightManifest | None,
        clock: Clock,
        pace: Pace | None = None,
    ) -> None:
        """Without a `manifest` it is a relay: readers wait until `relay` says what it receives.

        `pace` bounds the bytes that leave it per second, over all its readers.
        """
        self.instance = instance
        self.segment = segment
        self.pace = pace or Pace(None, clock)
        self._manifest = manifest
        # Made when somebody asks: a wake must not wait for what only a later reader needs.
        self._digest: str | None = None
        self._dumped: bytes | None = None
        self._partial: _Partial | None = None
        self._clock = clock
        self._changed = threading.Condition()
        self._pins: set[Pin] = set()
        self._generation = manifest.generation if manifest else 0
        self._key = ""
        self._open = False

    @property
    def manifest(self) -> WeightManifest:
        """The manifest as readers get it. Raises Unavailable while a relay has none."""
        with self._changed:
            return self._known()

    def _known(self) -> WeightManifest:
        if self._manifest is None:
            raise Unavailable(f"{self.instance} does not know yet what it receives")
        return self._manifest

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def manifest_digest(self) -> str:
        with self._changed:
            return self._digest_now()

    def _digest_now(self) -> str:
        if self._digest is None:
            self._digest = self._known().digest()
        return self._digest

    def dumped(self) -> bytes:
        """The manifest as bytes for the wire. Raises Unavailable when a relay has none after RELAY_SECONDS."""
        with self._changed:
            self._changed.wait_for(lambda: self._manifest is not None or not self._open, RELAY_SECONDS)
            if self._dumped is None:
                self._dumped = dump(self._known())
            return self._dumped

    @property
    def readers(self) -> int:
        """How many readers hold a pin now."""
        with self._changed:
            return len(self._pins)

    def set_canary(self, canary: Canary) -> None:
        """Puts the canary, recorded on this very content, into the manifest."""
        self._put(replace(self.manifest, canary=canary))

    def set_manifest(self, manifest: WeightManifest) -> None:
        """Replaces the manifest of a closed source after its content came anew. Raises Conflict while open."""
        with self._changed:
            if self._open:
                raise Conflict("the source is open: close it before its content changes")
        self._put(manifest)

    def _put(self, manifest: WeightManifest) -> None:
        with self._changed:
            self._manifest, self._digest, self._dumped = manifest, None, None

    # ------------------------------------------------------------------ what is there, of a source that receives

    def relay(self, manifest: WeightManifest, chunks: tuple[Chunk, ...], placed: Bitmap) -> None:
        """From here on it serves what `placed` has of `chunks`; `manifest` has this segment's own places."""
        with self._changed:
            self._manifest, self._digest, self._dumped = replace(manifest, generation=self._generation), None, None
            self._partial = _Partial(chunks, Places(manifest.tensors, {t.name: t for t in manifest.tensors}), placed)
            self._changed.notify_all()

    def arrived(self) -> None:
        """Wakes readers that wait for a chunk: one more is placed."""
        with self._changed:
            self._changed.notify_all()

    def held(self, pin: Pin, more_than: int) -> Bitmap | None:
        """Which chunks are here, None for all; waits a while for there to be more than `more_than`."""
        with self._changed:
            self._changed.wait_for(
                lambda: pin not in self._pins or self._news(more_than),
                RELAY_SECONDS,
            )
            self._check_pin(pin)
            return None if self._partial is None else Bitmap(self._partial.placed.count, self._partial.placed.dump())

    def _news(self, more_than: int) -> bool:
        placed = self._partial.placed if self._partial else None
        return placed is None or placed.complete or len(placed) > more_than

    # ------------------------------------------------------------------ readers

    def open(self, generation: int, key: str) -> None:
        """Admits readers with grants for `generation` signed under `key`; older generations are over."""
        with self._changed:
            if generation <= self._generation:
                raise Conflict(f"generation {generation} is not newer than {self._generation}")
            self._generation = generation
            if self._manifest is not None:
                self._manifest, self._dumped = replace(self._manifest, generation=generation), None
            self._key, self._open = key, True

    def close(self, deadline_seconds: float) -> int:
        """Refuses new readers, waits until all have gone, and returns how many were cut at the deadline."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pins, timeout=deadline_seconds)
            cut = len(self._pins)
            self._pins.clear()
            self._changed.notify_all()
            return cut

    def admit(self, grant: str) -> Pin:
        """A pin for the bearer of `grant`. Raises Denied, or Unavailable when the source is not open."""
        with self._changed:
            if not self._open:
                raise Unavailable(f"{self.instance} is no source now (asleep, or about to sleep)")
            pin = Pin(self._check(grant))
            self._pins.add(pin)
            return pin

    def _check(self, grant: str) -> grants.Claims:
        return grants.check(
            self._key, grant, now=self._clock.now(), source_instance=self.instance,
            generation=self._generation, manifest_digest=self._digest_now,
        )  # fmt: skip

    def _check_pin(self, pin: Pin) -> None:
        if pin not in self._pins:
            raise Unavailable(f"{self.instance} cut this reader: it is going to sleep")
        if pin.claims.generation != self._generation:
            raise Denied(f"generation {pin.claims.generation} is over", authenticated=True)
        if not self._clock.now() < pin.claims.expires_at:
            raise Denied("the grant expired while reading", authenticated=True)

    def permit(self, pin: Pin, offset: int, length: int, chunk: int = 0, chunks: int = 0) -> None:
        """Permits one read of [offset, offset + length), which lies in `chunks` chunks from `chunk` on.

        Raises Denied, Unavailable, InvalidInput, or NotYet when a chunk is still to come after RELAY_SECONDS.
        """
        hit("transfer.source.serve")
        with self._changed:
            self._check_pin(pin)
            most = self._known().segment_bytes
            if offset < 0 or length <= 0 or offset + length > most:
                raise InvalidInput(f"a read of [{offset}, {offset + length}) lies outside {most} bytes")
            if self._partial is not None:
                self._wait_for(pin, self._partial, offset, length, chunk, chunks)
            pin.reads += 1
            pin.bytes += length

    def _wait_for(self, pin: Pin, partial: _Partial, offset: int, length: int, chunk: int, chunks: int) -> None:
        if not 0 < chunks <= partial.placed.count - chunk:
            raise InvalidInput(f"chunks {chunk} to {chunk + chunks - 1} of {partial.placed.count} do not exist")
        if not partial.lies_within(chunk, chunks, offset, length):
            raise InvalidInput(f"[{offset}, {offset + length}) lies outside chunks {chunk} to {chunk + chunks - 1}")
        wanted = range(chunk, chunk + chunks)
        here = self._changed.wait_for(
            lambda: pin not in self._pins or all(n in partial.placed for n in wanted), RELAY_SECONDS
        )
        self._check_pin(pin)
        if not here:
            raise NotYet(f"chunk {chunk} has not arrived at {self.instance}")

    def confirm(self, pin: Pin) -> None:
        """Confirms that pin, grant and generation are good. Raises Denied or Unavailable."""
        with self._changed:
            self._check_pin(pin)

    def release(self, pin: Pin) -> None:
        """Ends the reader's hold; repeating it does no harm."""
        with self._changed:
            self._pins.discard(pin)
            self._changed.notify_all()

"""The sending side's safety: what is readable, by whom, until when. No sockets: transports ask it at every read.

Generation, grant and pin are checked here at each read. A source is pinned while it is read; before it sleeps
it refuses new readers, drains the pinned ones, and cuts those that outlive the deadline.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from relight.core.clock import Clock
from relight.core.errors import Conflict, Denied, InvalidInput, Unavailable
from relight.core.failpoints import hit
from relight.transfer import grants
from relight.transfer.manifest import Canary, WeightManifest, dump
from relight.transfer.segment import Segment


@dataclass(slots=True, eq=False)
class Pin:
    """One reader's hold on a source; `reads` and `bytes` are what it has taken so far."""

    claims: grants.Claims
    reads: int = 0
    bytes: int = 0


class Source:
    """One engine member's readable weights. Thread-safe: each reader is served by a thread of its own."""

    def __init__(self, instance: str, segment: Segment, manifest: WeightManifest, clock: Clock) -> None:
        self.instance = instance
        self.segment = segment
        self._manifest = manifest
        # Made when somebody asks: a wake must not wait for what only a later reader needs.
        self._digest: str | None = None
        self._dumped: bytes | None = None
        self._clock = clock
        self._changed = threading.Condition()
        self._pins: set[Pin] = set()
        self._key = ""
        self._open = False

    @property
    def manifest(self) -> WeightManifest:
        """The manifest as readers get it."""
        return self._manifest

    @property
    def manifest_digest(self) -> str:
        with self._changed:
            return self._digest_now()

    def _digest_now(self) -> str:
        if self._digest is None:
            self._digest = self._manifest.digest()
        return self._digest

    def dumped(self) -> bytes:
        """The manifest as bytes for the wire."""
        with self._changed:
            if self._dumped is None:
                self._dumped = dump(self._manifest)
            return self._dumped

    @property
    def readers(self) -> int:
        """How many readers hold a pin now."""
        with self._changed:
            return len(self._pins)

    def set_canary(self, canary: Canary) -> None:
        """Puts the canary, recorded on this very content, into the manifest."""
        self._put(replace(self._manifest, canary=canary))

    def set_manifest(self, manifest: WeightManifest) -> None:
        """Replaces the manifest of a closed source after its content came anew. Raises Conflict while open."""
        with self._changed:
            if self._open:
                raise Conflict("the source is open: close it before its content changes")
        self._put(manifest)

    def _put(self, manifest: WeightManifest) -> None:
        with self._changed:
            self._manifest, self._digest, self._dumped = manifest, None, None

    def open(self, generation: int, key: str) -> None:
        """Admits readers with grants for `generation` signed under `key`; older generations are over."""
        with self._changed:
            if generation <= self._manifest.generation and self._manifest.generation:
                raise Conflict(f"generation {generation} is not newer than {self._manifest.generation}")
            self._manifest, self._dumped = replace(self._manifest, generation=generation), None
            self._key, self._open = key, True

    def close(self, deadline_seconds: float) -> int:
        """Refuses new readers, waits until all have gone, and returns how many were cut at the deadline."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._pins, timeout=deadline_seconds)
            cut = len(self._pins)
            self._pins.clear()
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
            generation=self._manifest.generation, manifest_digest=self._digest_now(),
        )  # fmt: skip

    def permit(self, pin: Pin, offset: int, length: int) -> None:
        """Permits one read of [offset, offset + length). Raises Denied, Unavailable or InvalidInput."""
        hit("transfer.source.serve")
        with self._changed:
            if pin not in self._pins:
                raise Unavailable(f"{self.instance} cut this reader: it is going to sleep")
            if pin.claims.generation != self._manifest.generation:
                raise Denied(f"generation {pin.claims.generation} is over", authenticated=True)
            if not self._clock.now() < pin.claims.expires_at:
                raise Denied("the grant expired while reading", authenticated=True)
            if offset < 0 or length <= 0 or offset + length > self._manifest.segment_bytes:
                raise InvalidInput(
                    f"a read of [{offset}, {offset + length}) lies outside {self._manifest.segment_bytes} bytes"
                )
            pin.reads += 1
            pin.bytes += length

    def release(self, pin: Pin) -> None:
        """Ends the reader's hold; repeating it does no harm."""
        with self._changed:
            self._pins.discard(pin)
            self._changed.notify_all()

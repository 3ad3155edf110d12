"""One copy of a model's weights in host memory: read from a source and proven, and then a source itself.

    empty -> filling -> ready        filling -> failed -> filling (asked again)

It has no engine: the source's own manifest says what lies where, and it is that manifest, canary included, that the
copy serves on. What is not proven to the last block is never served.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from relight.agent.hostcopy.orders import Fill
from relight.core.clock import Clock
from relight.core.errors import LocalFault, RelightError, RemoteFault, TransferError
from relight.core.fingerprint import digest
from relight.core.logs import get_logger
from relight.core.records import HostState, Rung, SourceRef
from relight.core.tls import TlsFiles
from relight.transfer import grants
from relight.transfer.doors import connector, serve
from relight.transfer.manifest import WeightManifest
from relight.transfer.pace import Pace
from relight.transfer.request import Cancel, Holder, Options, Progress, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports.base import Connect, Listener

_log = get_logger("agent.hostcopy")
STREAMS = 2
EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Place:
    """Who the copy is and where it is read: `socket` by shm, `host` by tcp. `source_rate` is in bytes a second."""

    name: str
    socket: Path
    host: str
    tls: TlsFiles | None = None
    source_rate: int | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    segment: Segment
    manifest: WeightManifest


class HostCopy:
    """Thread-safe. `settled` is called, from the thread that reads, when a fill has ended for better or worse."""

    def __init__(self, place: Place, clock: Clock, settled: Callable[[], None] = lambda: None) -> None:
        self._place, self._clock, self._settled = place, clock, settled
        self._lock = threading.Lock()
        self._state: str = EMPTY
        self._reason = ""
        self._order: Fill | None = None
        self._done = (0, 0)
        self._cancel = Cancel()
        self._thread: threading.Thread | None = None
        self._listeners: list[Listener] = []
        self._source: Source | None = None
        self._key = ""
        self._addresses: dict[str, str] = {}

    def fill(self, order: Fill) -> None:
        """Begins to read, unless it is being done or was done."""
        with self._lock:
            if self._state in (HostState.FILLING, HostState.READY):
                return
            self._state, self._reason, self._order, self._done = HostState.FILLING, "", order, (0, 0)
            self._cancel = Cancel()
            self._thread = threading.Thread(target=self._bring, args=(order,), name="relight-host-copy")
            self._thread.start()

    def describe(self) -> dict[str, Any]:
        """All that its agent needs to know of it, the key of its grants included."""
        with self._lock:
            source, order = self._source, self._order
            return {
                "pid": os.getpid(),
                "copy": self._place.name,
                "state": str(self._state),
                "reason": self._reason,
                "content": asdict(order.content) if order else None,
                "placed": self._done[0],
                "total": self._done[1],
                "bytes": source.manifest.segment_bytes if source else 0,
                "readers": source.readers if source else 0,
                "source": self._offer(source) if source else None,
            }

    def _offer(self, source: Source) -> dict[str, Any]:
        manifest = source.manifest
        return {
            "generation": source.generation,
            "manifest_digest": source.manifest_digest,
            "content_digest": manifest.content_digest(),
            "layout_digest": digest(manifest.fingerprint.layout),
            "addresses": self._addresses,
            "weight_bytes": manifest.weight_bytes,
            "closed": {},
            "grant_key": self._key,
            "rate_limit": self._place.source_rate,
        }

    def close(self) -> None:
        """Cancels what is under way, and serves nobody any more."""
        self._cancel.set()
        thread = self._thread
        if thread is not None:
            thread.join()
        for listener in self._listeners:
            listener.release()
        self._listeners = []

    # ------------------------------------------------------------------ reading

    def _bring(self, order: Fill) -> None:
        reasons: list[str] = []
        for rung in order.rungs:
            try:
                self._serve(self._by(rung, order))
                reasons = []
                break
            except RelightError as error:
                reasons.append(f"{rung.kind}: {error}")
            except Exception as error:  # noqa: BLE001 - a defect must be told, not end as `filling` for ever
                _log.exception("hostcopy.defect", rung=rung.kind)
                reasons.append(f"{rung.kind}: {type(error).__name__}: {error}")
        with self._lock:
            self._state, self._reason = HostState.FAILED if reasons else HostState.READY, "; ".join(reasons)
        self._settled()

    def _by(self, rung: Rung, order: Fill) -> _Held:
        peers = [s for s in (rung.source, *rung.helpers) if s is not None]
        ways = [(peer, connector(rung.kind.transport, peer, self._place.tls)) for peer in peers]
        manifest = _first_manifest(ways)
        _check(manifest, order)
        segment = Segment(self._place.name, manifest.segment_bytes, freezes=True, digest=manifest.digests)
        holders = [
            Holder(
                peer.instance, connect, connections=STREAMS if n == 0 else 1, reserve=n > 0,
                manifest_digest=peer.manifest_digest,
            )
            for n, (peer, connect) in enumerate(ways)
        ]  # fmt: skip
        wanted = Wanted(manifest.fingerprint.layout, {t.name: t for t in manifest.tensors}, order.content.revision)
        options = Options(cancel=self._cancel, on_progress=self._progress)
        try:
            got = refill(segment, wanted, holders, streams=STREAMS, clock=self._clock, options=options)
            # What engines may map as it is must stay what was proven.
            segment.freeze()
        except BaseException:
            segment.close()
            raise
        # At this segment's own places, and with the digests that the bytes were proven by.
        proven = {t.name: t.blocks for t in got.manifest.tensors}
        tensors = tuple(replace(t, blocks=proven[t.name]) for t in manifest.tensors)
        return _Held(segment, replace(got.manifest, generation=0, segment_bytes=segment.bytes, tensors=tensors))

    def _progress(self, progress: Progress) -> None:
        self._done = (progress.bytes, progress.total)

    def _serve(self, held: _Held) -> None:
        place = self._place
        source = Source(place.name, held.segment, held.manifest, self._clock, Pace(place.source_rate, self._clock))
        key = grants.new_key()
        source.open(1, key)
        try:
            listeners, addresses = serve(source, place.socket, place.host, place.tls)
        except LocalFault:
            held.segment.close()
            raise
        with self._lock:
            self._source, self._key, self._listeners, self._addresses = source, key, listeners, addresses


def _first_manifest(ways: Sequence[tuple[SourceRef, Connect]]) -> WeightManifest:
    """Of the first source that says it. Raises RemoteFault or LocalFault with what all of them said."""
    failed: list[TransferError] = []
    for peer, connect in ways:
        try:
            reader = connect()
            try:
                manifest = reader.describe()
            finally:
                reader.close()
            if peer.manifest_digest and manifest.digest() != peer.manifest_digest:
                raise RemoteFault(f"{peer.instance} describes other weights than it offered")
            return manifest
        except TransferError as error:
            failed.append(error)
    kind = LocalFault if all(isinstance(e, LocalFault) for e in failed) else RemoteFault
    raise kind("; ".join(map(str, failed)) or "no source was named")


def _check(manifest: WeightManifest, order: Fill) -> None:
    got = manifest.fingerprint.content.get("revision", "")
    if got != order.content.revision:
        raise RemoteFault(f"content.revision: {order.content.revision!r} is asked for, {got!r} there")
    if not manifest.segment_bytes or manifest.segment_bytes > order.most_bytes:
        raise LocalFault(f"{manifest.segment_bytes} bytes are offered, and {order.most_bytes} are left of the budget")
    if manifest.canary is None:
        # Nobody could prove an engine that woke from it.
        raise RemoteFault("the source has no canary of this content yet")

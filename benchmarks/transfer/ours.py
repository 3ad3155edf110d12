"""Relight's own transfer, whole: connection, grant, manifest, bytes in place, every tensor proven."""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import body
from contender import STREAMS

from relight.core.clock import SystemClock
from relight.core.fingerprint import Fingerprint
from relight.core.tls import TlsFiles
from relight.transfer import grants
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.request import Holder, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports.base import Connect, Listener
from relight.transfer.transports.shm import Pages, ShmListener, ShmReader
from relight.transfer.transports.tcp import TcpListener, TcpReader
from relight.transfer.verify import Digest, blocks_of

CERTIFICATES = "RELIGHT_BENCH_CERTIFICATES"
"""Names the directory with ca.pem, node.pem and node.key."""
LAYOUT = {"engine": "benchmark"}
DEADLINE = 30.0


class _Ours(ABC):
    digest = Digest.XXH3

    def __init__(self, sizes: list[int], length: int) -> None:
        self._sizes, self._length = sizes, length

    def _table(self, view: memoryview | None = None) -> tuple[TensorEntry, ...]:
        places, _ = body.offsets(self._sizes)
        return tuple(
            TensorEntry(f"t{n}", "uint8", (size,), (1,), at, size, (), self._blocks(view, at, size))
            for n, (at, size) in enumerate(zip(places, self._sizes, strict=True))
        )

    def _blocks(self, view: memoryview | None, at: int, size: int) -> bytes:
        return b"" if view is None else blocks_of(view[at : at + size], self.digest)

    def serve(self) -> dict[str, Any]:
        segment = Segment("source", self._length, digest=self.digest)
        segment.populate(0, segment.bytes, patient=True)
        body.fill(segment.view[: self._length])
        prints = Fingerprint(LAYOUT, {"revision": "r1"}, {})
        manifest = WeightManifest(prints, 0, segment.bytes, self._table(segment.view), digests=self.digest)
        self._source = Source("i-source", segment, manifest, SystemClock())
        key = grants.new_key()
        self._source.open(1, key)
        claims = grants.Claims("i-source", 1, self._source.manifest_digest, "i-receiver", time.time() + 3600)
        self._listener = self._listen()
        return {"address": self._listener.register(self._source), "grant": grants.mint(key, claims)}

    def attach(self, address: dict[str, Any]) -> memoryview:
        self._address, self._grant = address["address"], address["grant"]
        self._segment = Segment("target", self._length, digest=self.digest)
        self._segment.populate(0, self._segment.bytes, patient=True)
        self._tensors = {t.name: t for t in self._table()}
        return self._segment.view[: self._length]

    def pull(self) -> dict[str, float]:
        begun = time.perf_counter()
        reader = self._connect()()
        reader.describe()
        setup = time.perf_counter() - begun
        reader.close()
        begun = time.perf_counter()
        holder = Holder("i-source", self._connect(), connections=STREAMS)
        wanted = Wanted(LAYOUT, self._tensors, "r1")
        refill(self._segment, wanted, [holder], streams=STREAMS, clock=SystemClock())
        return {"setup_seconds": setup, "refill_seconds": time.perf_counter() - begun}

    @abstractmethod
    def _listen(self) -> Listener:
        """The source's end, not yet registered."""

    @abstractmethod
    def _connect(self) -> Connect:
        """How new connections of one refill are made."""


class Shm(_Ours):
    """The source's pages by a passed descriptor."""

    def _listen(self) -> Listener:
        return ShmListener(Path(tempfile.mkdtemp(prefix="relight-bench-")) / "s.sock")

    def _connect(self) -> Connect:
        pages = Pages()
        return lambda: ShmReader(self._address, self._grant, "i-source", DEADLINE, pages)


class Tcp(_Ours):
    """Parallel streams, received straight into place."""

    tls: TlsFiles | None = None

    def _listen(self) -> Listener:
        return TcpListener("127.0.0.1", tls=self.tls)

    def _connect(self) -> Connect:
        return lambda: TcpReader(self._address, self._grant, "i-source", DEADLINE, self.tls)


class Sha256(Tcp):
    """The same, proven by SHA-256."""

    digest = Digest.SHA256


class Tls(Tcp):
    """The same over TLS."""

    def __init__(self, sizes: list[int], length: int) -> None:
        super().__init__(sizes, length)
        home = Path(os.environ[CERTIFICATES])
        self.tls = TlsFiles(home / "node.pem", home / "node.key", home / "ca.pem")

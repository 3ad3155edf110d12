"""Reading one bundle from whoever has it: the next holder takes over at the chunk where one died, lied or stalled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO, Protocol

from relight.agent.cache import bundle
from relight.agent.cache.bundle import Limits, Manifest, Sealed
from relight.agent.cache.key import CacheKey
from relight.agent.cache.peer import Peer
from relight.agent.cache.signing import Trust
from relight.core.errors import Denied, RelightError, RemoteFault


class Opened(Protocol):
    """A bundle that can be read: verified manifest, proven chunks."""

    @property
    def name(self) -> str: ...
    @property
    def manifest(self) -> Manifest: ...
    def chunks(self) -> Iterator[memoryview]:
        """The body in order, each chunk proven; it is valid until the next one is asked for."""
        ...


def file_chunks(body: BinaryIO, body_bytes: int) -> Iterator[bytes]:
    """The chunks of a body on disk, unproven."""
    for number in range(bundle.chunk_count(body_bytes)):
        yield body.read(bundle.chunk_length(body_bytes, number))


class RemoteBundle:
    """A bundle on one or several nodes. `faults` has a line for each node that was given up on."""

    def __init__(
        self, name: str, holders: Sequence[str], connect: Callable[[str], Peer], trust: Trust, limits: Limits,
        key: CacheKey | None = None, *, use: bool = True, release: Callable[[Peer], None] = Peer.close,
    ) -> None:  # fmt: skip
        """Asks the holders in turn for the manifest. Raises RemoteFault with all their reasons when none is good.

        With `key` the bundle has to be that key's. `release` gets the connection of the holder that was read last.
        """
        self.name = name
        self._release = release
        self.faults: list[str] = []
        self.gave: list[str] = []
        self._left = list(holders)
        self._connect, self._trust, self._limits, self._key, self._use = connect, trust, limits, key, use
        self._peer: Peer | None = None
        self.sealed, self.manifest = self._first()

    def _first(self) -> tuple[Sealed, Manifest]:
        while True:
            peer = self._next()
            try:
                sealed = peer.sealed(self.name, self._limits, use=self._use)
                if sealed.name != self.name:
                    raise Denied(f"cache node {peer.node} gave another manifest than {self.name[:16]}: it was altered")
                return sealed, bundle.verify(sealed, self._trust, self._limits, self._key)
            except RelightError as error:
                self._give_up(error)

    def _next(self) -> Peer:
        while self._peer is None:
            if not self._left:
                raise RemoteFault("no cache node gave the bundle: " + ("; ".join(self.faults) or "none has it"))
            node = self._left.pop(0)
            try:
                self._peer = self._connect(node)
                self.gave.append(node)
            except RelightError as error:
                self.faults.append(str(error))
        return self._peer

    def _give_up(self, error: RelightError) -> None:
        self.faults.append(str(error))
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def chunks(self) -> Iterator[memoryview]:
        """Raises RemoteFault when no holder is left."""
        total = self.manifest.body_bytes
        buffer = memoryview(bytearray(min(bundle.CHUNK_BYTES, total)))
        for number in range(bundle.chunk_count(total)):
            into = buffer[: bundle.chunk_length(total, number)]
            while True:
                peer = self._next()
                try:
                    peer.read(self.name, number * bundle.CHUNK_BYTES, into)
                    self._prove(peer, number, into)
                    break
                except RelightError as error:
                    self._give_up(error)
            yield into

    def _prove(self, peer: Peer, number: int, data: memoryview) -> None:
        try:
            bundle.prove(self.manifest, number, data)
        except Denied:
            with suppress(RelightError):
                peer.doubt(self.name)
            raise

    def close(self) -> None:
        """Releases the connection that is open."""
        if self._peer is not None:
            self._release(self._peer)
            self._peer = None

    def __enter__(self) -> RemoteBundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

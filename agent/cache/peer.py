"""One connection to one cache node: its operations as calls. Blocking; each wait is bounded by the deadline."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from relight.agent.cache import messages
from relight.agent.cache.bundle import Limits, Sealed
from relight.agent.cache.key import CacheKey, checked
from relight.agent.cache.messages import Fields
from relight.agent.cache.placement import Holding
from relight.agent.cache.store import Quarantine
from relight.core.errors import InvalidInput, RelightError, RemoteFault
from relight.core.tls import TlsFiles
from relight.transfer.transports import secured, wire


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node knows of a key."""

    holding: Holding | None
    quarantine: Quarantine | None


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Who has the lease on a key now, for how many seconds more."""

    mine: bool
    holder: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Listing:
    """All that a node holds, the model of each key, and the revision of the membership that it goes by."""

    revision: int
    holdings: tuple[Holding, ...]
    quarantines: tuple[Quarantine, ...]
    models: Mapping[str, str]


class Peer:
    """Raises RemoteFault when the node is gone or answers nonsense, and what it refused with otherwise."""

    def __init__(self, node: str, address: str, grant: str, deadline: float, tls: TlsFiles | None = None) -> None:
        """Connects and presents the grant. `deadline` bounds each single wait, in seconds."""
        self.node = node
        self._deadline = deadline
        host, port = wire.parse_endpoint(address, "tls" if tls else "tcp")
        self._sock: socket.socket = wire.reaching(host, port, deadline, f"cache node {node}")
        try:
            if tls is not None:
                self._sock = secured.reading(tls).wrap_socket(self._sock)
            self._ask_plain({"version": messages.VERSION, "grant": grant})
        except (OSError, RelightError) as error:
            self._sock.close()
            if isinstance(error, RelightError):
                raise
            raise RemoteFault(f"cache node {node}: no TLS with it: {error}") from error

    def _send(self, message: dict[str, Any], *frames: bytes) -> None:
        # Who refused has closed already, and its reason waits to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            try:
                messages.send(self._sock, message)
                for frame in frames:
                    wire.send_frame(self._sock, frame)
            except TimeoutError as error:
                raise RemoteFault(f"cache node {self.node}: took no request for {self._deadline} s") from error

    def _ask_plain(self, message: dict[str, Any], *frames: bytes) -> Fields:
        self._send(message, *frames)
        return Fields(messages.reply(self._sock, self.node))

    def _blame(self, error: Exception) -> RemoteFault:
        return RemoteFault(f"cache node {self.node}: {error or 'connection closed'}")

    def find(self, key: str) -> Answer:
        said = self._ask_plain({"op": "find", "key": key})
        try:
            held, bad = said.inner("holding"), said.inner("quarantine")
            return Answer(messages.holding(held) if held else None, messages.quarantine(bad) if bad else None)
        except InvalidInput as error:
            raise self._blame(error) from error

    def nearest(self, key: CacheKey) -> CacheKey | None:
        """The key held there that differs least."""
        said = self._ask_plain({"op": "nearest", "fields": dict(key.fields)})
        try:
            return None if said.raw("fields") is None else checked(said.raw("fields"))
        except InvalidInput as error:
            raise self._blame(error) from error

    def sealed(self, bundle: str, limits: Limits, *, use: bool) -> Sealed:
        """Manifest and signature, unchecked. `use` counts as a use of the bundle."""
        said = self._ask_plain({"op": "sealed", "bundle": bundle, "use": use})
        try:
            manifest = wire.receive_frame(self._sock, limits.manifest_bytes)
            return Sealed(manifest, said.text("signer"), said.data("signature"))
        except (OSError, wire.Closed, InvalidInput) as error:
            raise self._blame(error) from error

    def read(self, bundle: str, offset: int, into: memoryview) -> None:
        """Bytes of a bundle's body, unproven."""
        self._ask_plain({"op": "read", "bundle": bundle, "offset": offset, "length": len(into)})
        try:
            wire.receive_into(self._sock, into)
        except (OSError, wire.Closed) as error:
            raise self._blame(error) from error

    def put(self, sealed: Sealed, body: Iterable[bytes], last_use: float | None = None) -> bool:
        """Hands a bundle over. False when the node had it already. Raises what the node refuses it with."""
        asked = {
            "op": "put", "signer": sealed.signer, "signature": sealed.signature.hex(), "last_use": last_use,
        }  # fmt: skip
        if not self._ask_plain(asked, sealed.manifest).flag("wanted"):
            return False
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                for chunk in body:
                    self._sock.sendall(chunk)
        except TimeoutError as error:
            raise self._blame(error) from error
        messages.reply(self._sock, self.node)
        return True

    def acquire(self, key: str, holder: str, token: str, seconds: float) -> LeaseAnswer:
        """The lease on compiling a key: asked for, or renewed."""
        said = self._ask_plain({"op": "acquire", "key": key, "holder": holder, "token": token, "seconds": seconds})
        try:
            return LeaseAnswer(said.flag("mine"), said.text("holder"), said.number("seconds", 0, 1e6))
        except InvalidInput as error:
            raise self._blame(error) from error

    def unlease(self, key: str, token: str) -> None:
        self._ask_plain({"op": "unlease", "key": key, "token": token})

    def wait(self, key: str, seconds: float) -> None:
        """Blocks until the key has a bundle, a quarantine or no lease, at most `seconds`."""
        seconds = min(seconds, messages.MAX_WAIT)
        self._sock.settimeout(seconds + self._deadline)
        try:
            self._ask_plain({"op": "wait", "key": key, "seconds": seconds})
        finally:
            self._sock.settimeout(self._deadline)

    def quarantine(self, key: str, bundle: str, reason: str) -> None:
        self._ask_plain({"op": "quarantine", "key": key, "bundle": bundle, "reason": reason[:4096]})

    def release(self, key: str) -> bool:
        """Ends a quarantine. False when there was none."""
        return self._ask_plain({"op": "release", "key": key}).flag("released")

    def doubt(self, bundle: str) -> bool:
        """Has the node prove a bundle anew. False when it was bad, and is gone there now."""
        return self._ask_plain({"op": "doubt", "bundle": bundle}).flag("good")

    def list(self) -> Listing:
        said = self._ask_plain({"op": "list"})
        try:
            return Listing(
                said.natural("revision", 1 << 62),
                tuple(map(messages.holding, said.several("holdings"))),
                tuple(map(messages.quarantine, said.several("quarantines"))),
                said.texts("models"),
            )
        except InvalidInput as error:
            raise self._blame(error) from error

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

"""A cache node: serves its store and its leases to those who show a grant, and keeps what it shall keep (repair).

Bounded: connections, sizes of requests, waits. A hostile client costs one thread for a few seconds. What it puts is
proven before it is known; who puts is said by the bundle's signature, who asks by the grant.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from relight.agent.cache import bundle, messages
from relight.agent.cache.bundle import Sealed
from relight.agent.cache.key import checked, nearest
from relight.agent.cache.lease import LONGEST, Leases
from relight.agent.cache.messages import Fields
from relight.agent.cache.peer import Listing, Peer
from relight.agent.cache.placement import Holding, Membership, plan_repair
from relight.agent.cache.reading import RemoteBundle
from relight.agent.cache.store import Quarantine, Store
from relight.core.clock import Clock
from relight.core.errors import Conflict, InvalidInput, RelightError, Unavailable
from relight.core.logs import get_logger
from relight.core.tls import TlsFiles
from relight.transfer import grants
from relight.transfer.transports import secured, wire

_log = get_logger("agent.cache.node")
MAX_CONNECTIONS = 512
IDLE_SECONDS = 60.0
"""How long a connection may stand without a request, and a peer may take over any part of one."""
PEER_DEADLINE = 10.0
GENERATION = 0
"""Grants name a generation of the source; a cache node has one for ever."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """What one repair did. `unheard` are the nodes that did not answer, `failed` bundles that nobody gave."""

    fetched: int
    dropped: int
    bytes: int
    unheard: tuple[str, ...]
    failed: tuple[str, ...]


class CacheNode:
    """One member of the ring, from construction until `close`."""

    def __init__(
        self, name: str, store: Store, grant_key: str, clock: Clock, *, host: str, port: int = 0,
        tls: TlsFiles | None = None,
    ) -> None:  # fmt: skip
        """Listens on one address; `address` says which. `grant_key` is what grants for this node are signed with.

        Raises LocalFault when it cannot listen.
        """
        self.name, self._store, self._grant_key, self._clock, self._tls = name, store, grant_key, clock, tls
        self._members = Membership(0, {})
        self._leases = Leases()
        self._changed = threading.Condition()
        self._closed = False
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        context = secured.serving(tls) if tls else None
        listener = wire.listening_at(host, port)
        self.address = f"{'tls' if tls else 'tcp'}:{host}:{listener.getsockname()[1]}"
        self._operations: dict[str, Callable[[socket.socket, Fields], None]] = {
            "find": self._find, "nearest": self._nearest, "sealed": self._sealed, "read": self._read, "put": self._put,
            "acquire": self._acquire, "unlease": self._unlease, "wait": self._wait, "quarantine": self._quarantine,
            "release": self._release, "doubt": self._doubt, "list": self._list,
        }  # fmt: skip

        def prepare(sock: socket.socket) -> socket.socket:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return secured.accepted(sock, context) if context else sock

        self._acceptor = wire.Acceptor(listener, self._serve, f"relight-cache-{name}", prepare)

    @property
    def members(self) -> Membership:
        """Who keeps what, as this node last heard."""
        return self._members

    def set_members(self, members: Membership) -> None:
        """Hears who the cache nodes are now; an older revision is ignored. `repair` does what follows from it."""
        if members.revision >= self._members.revision:
            self._members = members

    def close(self) -> None:
        """Stops serving and lets all waiters go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._acceptor.close()

    # ------------------------------------------------------------------ serving

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(IDLE_SECONDS)
        room = self._room
        with suppress(wire.Closed, OSError):
            if not room.acquire(blocking=False):
                messages.refuse(sock, Unavailable(f"{MAX_CONNECTIONS} connections are open"))
                return
            try:
                self._converse(sock)
            finally:
                room.release()

    def _converse(self, sock: socket.socket) -> None:
        try:
            hello = Fields(messages.receive(sock, wire.MAX_HELLO))
            if hello.natural("version", 1 << 16) != messages.VERSION:
                raise InvalidInput(f"version {messages.VERSION} is spoken here")
            grants.check(
                self._grant_key, hello.text("grant", grants.MAX_GRANT_BYTES), now=self._clock.now(),
                source_instance=self.name, generation=GENERATION, manifest_digest=str,
            )  # fmt: skip
            messages.accept(sock, {})
            while True:
                said = Fields(messages.receive(sock, messages.MAX_REQUEST))
                operation = self._operations.get(said.text("op"))
                if operation is None:
                    raise InvalidInput(f"operations are {', '.join(self._operations)}")
                try:
                    operation(sock, said)
                except Unread:
                    raise
                except RelightError as error:
                    messages.refuse(sock, error)
        except Unread as error:
            messages.refuse(sock, error.cause)
        except RelightError as error:
            messages.refuse(sock, error)

    def _find(self, sock: socket.socket, said: Fields) -> None:
        key = said.key()
        held, bad = self._store.find(key), self._store.quarantined(key)
        messages.accept(
            sock,
            {"holding": messages.plain(held) if held else None, "quarantine": messages.plain(bad) if bad else None},
        )

    def _nearest(self, sock: socket.socket, said: Fields) -> None:
        found = nearest(checked(said.raw("fields")), self._store.keys())
        messages.accept(sock, {"fields": dict(found[0].fields) if found else None})

    def _sealed(self, sock: socket.socket, said: Fields) -> None:
        name = said.bundle()
        sealed = self._store.sealed(name)
        if said.flag("use"):
            self._store.touch(name)
        messages.accept(sock, {"signer": sealed.signer, "signature": sealed.signature.hex()})
        wire.send_frame(sock, sealed.manifest)

    def _read(self, sock: socket.socket, said: Fields) -> None:
        offset, length = said.natural("offset", 1 << 50), said.natural("length", messages.MAX_READ)
        with self._store.open_body(said.bundle()) as body:
            if offset + length > os.fstat(body.fileno()).st_size:
                raise InvalidInput(f"the body ends before {offset + length}")
            messages.accept(sock, {})
            if self._tls is None:
                # From the page cache to the socket; nothing is copied here.
                sock.sendfile(body, offset, length)
            else:
                body.seek(offset)
                sock.sendall(body.read(length))

    def _put(self, sock: socket.socket, said: Fields) -> None:
        used = None if said.raw("last_use") is None else said.number("last_use", 0, 1e12)
        sealed = Sealed(
            wire.receive_frame(sock, self._store.limits.manifest_bytes), said.text("signer"), said.data("signature")
        )
        incoming = self._store.receive(sealed, used)
        messages.accept(sock, {"wanted": incoming is not None})
        if incoming is None:
            return
        with incoming:
            total = incoming.manifest.body_bytes
            for number in range(bundle.chunk_count(total)):
                data = wire.receive(sock, bundle.chunk_length(total, number))
                try:
                    incoming.chunk(data)
                except RelightError as error:
                    # The rest of the body is on its way and nobody's: the connection ends with the reason.
                    raise Unread(error) from error
            incoming.commit()
        self._tell()
        messages.accept(sock, {})

    def _acquire(self, sock: socket.socket, said: Fields) -> None:
        key, token = said.key(), said.text("token", 64)
        with self._changed:
            now = self._clock.monotonic()
            held = self._leases.acquire(key, said.text("holder"), token, said.number("seconds", 0, LONGEST), now)
        left = held.expires_at - now
        messages.accept(sock, {"holder": held.holder, "mine": held.token == token, "seconds": left})

    def _unlease(self, sock: socket.socket, said: Fields) -> None:
        with self._changed:
            released = self._leases.release(said.key(), said.text("token", 64), self._clock.monotonic())
            self._changed.notify_all()
        messages.accept(sock, {"released": released})

    def _wait(self, sock: socket.socket, said: Fields) -> None:
        key = said.key()
        until = self._clock.monotonic() + said.number("seconds", 0, messages.MAX_WAIT)
        with self._changed:
            while not self._closed and not self._store.find(key) and not self._store.quarantined(key):
                now = self._clock.monotonic()
                held = self._leases.current(key, now)
                if held is None or now >= until:
                    break
                self._changed.wait(min(held.expires_at, until) - now)
        messages.accept(sock, {})

    def _quarantine(self, sock: socket.socket, said: Fields) -> None:
        name = said.text("bundle")
        record = Quarantine(
            said.key(), said.bundle() if name else "", said.text("reason", 4096), self._clock.now()
        )  # fmt: skip
        self._store.quarantine(record)
        self._tell()
        messages.accept(sock, {})

    def _release(self, sock: socket.socket, said: Fields) -> None:
        messages.accept(sock, {"released": self._store.release(said.key())})

    def _doubt(self, sock: socket.socket, said: Fields) -> None:
        messages.accept(sock, {"good": self._store.doubt(said.bundle())})

    def _list(self, sock: socket.socket, _: Fields) -> None:
        messages.accept(
            sock,
            {
                "revision": self._members.revision,
                "holdings": [messages.plain(h) for h in self._store.entries()],
                "quarantines": [messages.plain(q) for q in self._store.quarantines()],
                "models": self._store.models(),
            },
        )

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ repair

    def repair(self, grant: Callable[[str], str]) -> Repaired:
        """Brings what this node holds to what it shall hold; `grant` gives a grant for a node by its name.

        Level-triggered and harmless to repeat: whatever changed since, the next one sees. Called at each change of the
        members, and now and then.
        """
        members = self._members
        idle: dict[str, Peer] = {}

        def connect(node: str) -> Peer:
            return idle.pop(node, None) or Peer(node, members.nodes[node], grant(node), PEER_DEADLINE, self._tls)

        def release(peer: Peer) -> None:
            idle[peer.node] = peer

        heard: dict[str, Listing] = {}
        for node in sorted(set(members.nodes) - {self.name}):
            try:
                with connect(node) as peer:
                    heard[node] = peer.list()
            except RelightError as error:
                _log.warning("cache.repair-unheard", node=node, reason=str(error))
        for listing in heard.values():
            for record in listing.quarantines:
                with suppress(Conflict):
                    self._store.quarantine(record)
        self._learn_uses(heard)
        # A node of another revision may place a key elsewhere, and give up what we count on: it confirms nothing.
        agreed = {n: h.holdings if h.revision == members.revision else () for n, h in heard.items()}
        plan = plan_repair(self.name, members, self._store.entries(), {n: h.holdings for n, h in heard.items()})
        for name, other, holders in plan.superseded:
            self._give_way(name, other, holders, connect, release)
        fetched, size, failed = 0, 0, []
        for holding, holders in plan.fetch:
            reason = self._fetch(holding, holders, connect, release)
            if reason:
                failed.append(f"{holding.bundle[:16]}: {reason}")
            else:
                fetched, size = fetched + 1, size + holding.bytes
        for peer in idle.values():
            peer.close()
        surplus = plan_repair(self.name, members, self._store.entries(), agreed).drop
        for name in surplus:
            self._store.drop(name)
        unheard = tuple(sorted(set(members.nodes) - {self.name} - set(heard)))
        self._tell()
        return Repaired(fetched, len(surplus), size, unheard, tuple(failed))

    def _learn_uses(self, heard: dict[str, Listing]) -> None:
        """A bundle is read from one of its nodes; the others hear of it here, and do not collect it as unused."""
        mine = {h.bundle: h.last_use for h in self._store.entries()}
        newest: dict[str, float] = {}
        for listing in heard.values():
            for holding in listing.holdings:
                newest[holding.bundle] = max(newest.get(holding.bundle, 0.0), holding.last_use)
        for name, used in newest.items():
            if name in mine and used > mine[name]:
                self._store.touch(name, used)

    def _give_way(
        self, name: str, other: Holding, holders: tuple[str, ...], connect: Callable[[str], Peer],
        release: Callable[[Peer], None],
    ) -> None:  # fmt: skip
        """Gives a bundle up for another of its key, if that one is signed and of this very key: a word is not
        enough."""
        try:
            key = bundle.parse(self._store.sealed(name).manifest, self._store.limits).key
            with RemoteBundle(
                other.bundle, holders, connect, self._store.trust, self._store.limits, key, use=False, release=release
            ):
                self._store.drop(name)
        except RelightError as error:
            _log.warning("cache.not-superseded", bundle=name, other=other.bundle, reason=str(error))

    def _fetch(
        self, holding: Holding, holders: tuple[str, ...], connect: Callable[[str], Peer],
        release: Callable[[Peer], None],
    ) -> str:  # fmt: skip
        """Takes over one bundle. Returns why not, or an empty text."""
        try:
            with RemoteBundle(
                holding.bundle, holders, connect, self._store.trust, self._store.limits, use=False, release=release
            ) as remote:
                incoming = self._store.receive(remote.sealed, holding.last_use)
                if incoming is not None:
                    with incoming:
                        for chunk in remote.chunks():
                            incoming.chunk(chunk)
                        incoming.commit()
            return ""
        except RelightError as error:
            return str(error)


class Unread(Exception):
    """A request was refused while its body was still coming: what follows on the connection is no request."""

    def __init__(self, cause: RelightError) -> None:
        super().__init__(str(cause))
        self.cause = cause

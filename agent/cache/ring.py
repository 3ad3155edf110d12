"""The ring as those who start engines see it: ask, wait for another's compile, fetch, publish, quarantine.

Blocking calls, for a thread of their own. The nodes of a key are asked best first, then all others (after a change of
members a bundle may lie where it was, and a miss costs a compile). A node that failed goes to the end of the line for a
while, so that a hung one is waited for once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from relight.agent.cache.bundle import Limits
from relight.agent.cache.key import CacheKey, Difference, nearest
from relight.agent.cache.peer import Listing, Peer
from relight.agent.cache.placement import Holding, Membership, ranked
from relight.agent.cache.reading import RemoteBundle, file_chunks
from relight.agent.cache.sealing import SealedTree
from relight.agent.cache.signing import Trust
from relight.core.clock import Clock
from relight.core.errors import Conflict, Denied, InvalidInput, RelightError, Unavailable
from relight.core.logs import get_logger
from relight.core.tls import TlsFiles

_log = get_logger("agent.cache.ring")
LEASE_SECONDS = 60.0
"""A compile's holder renews it three times in this; when it dies, others go on after at most this."""
LONGEST_COMPILE = 3600.0
"""A claim that was neither published nor released in so long is forgotten: sweeps of half an hour have been seen."""
SUSPECT_SECONDS = 30.0
WAIT_SLICE = 1.0
"""Seconds after which whoever waits for another's compile is asked whether it still wants to."""
DEADLINE = 5.0


@dataclass(frozen=True, slots=True)
class Present:
    """A bundle of the key exists: its name, size, and the nodes that may have it, best first."""

    bundle: str
    bytes: int
    nodes: tuple[str, ...]
    waited: float = 0.0
    """Seconds that another engine's compile was waited for."""


@dataclass(frozen=True, slots=True)
class Absent:
    """No bundle can be had, and why. `changed` are the components in which the nearest known key differs."""

    reason: str
    changed: tuple[Difference, ...] = ()
    quarantined: bool = False
    unreachable: bool = False
    """No node answers."""


@dataclass(frozen=True, slots=True)
class Published:
    """Where a bundle is kept now, and why elsewhere not."""

    nodes: tuple[str, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Contested:
    """Somebody else has the lease, on `node`, for `seconds` more."""

    node: str
    holder: str
    seconds: float


@dataclass(slots=True)
class Claim:
    """The right to compile a key: leases on all its nodes that answer, renewed by a thread until `release`."""

    key: CacheKey
    token: str
    nodes: tuple[str, ...]
    why: Absent
    waited: float
    let_go: Callable[[Claim], None]
    ended: threading.Event = field(default_factory=threading.Event)
    """Once it is set nobody renews."""

    def release(self) -> None:
        """Lets the next one compile, or, after a publication, all waiters fetch."""
        if not self.ended.is_set():
            self.ended.set()
            self.let_go(self)


class Ring:
    """Safe for threads."""

    def __init__(
        self, members: Membership, grant: Callable[[str], str], trust: Trust, clock: Clock, *,
        holder: str, limits: Limits | None = None, deadline: float = DEADLINE, lease_seconds: float = LEASE_SECONDS,
        tls: TlsFiles | None = None,
    ) -> None:  # fmt: skip
        """`grant` gives a fresh grant for a node by its name; `holder` is who leases are for, for people to read."""
        self.members = members
        self.trust, self.limits = trust, limits or Limits()
        self._grant, self._clock, self._holder = grant, clock, holder
        self._deadline, self._lease_seconds, self._tls = deadline, lease_seconds, tls
        self._suspect: dict[str, float] = {}

    def connect(self, node: str) -> Peer:
        """A connection to a node. Raises RemoteFault, Denied, Unavailable, InvalidInput (no such node)."""
        address = self.members.nodes.get(node)
        if address is None:
            raise InvalidInput(f"no cache node {node}")
        try:
            return Peer(node, address, self._grant(node), self._deadline, self._tls)
        except RelightError:
            self._suspect[node] = self._clock.monotonic() + SUSPECT_SECONDS
            raise

    def _order(self, nodes: Iterable[str]) -> list[str]:
        now = self._clock.monotonic()
        return sorted(nodes, key=lambda node: self._suspect.get(node, 0.0) > now)

    # ------------------------------------------------------------------ asking

    def find(self, key: CacheKey) -> Present | Absent:
        """Whether the ring has a bundle of the key. Never raises for what nodes do: a reason comes back instead."""
        nodes = self._order(ranked(key.digest, self.members.nodes))
        faults = []
        for at, node in enumerate(nodes):
            try:
                with self.connect(node) as peer:
                    said = peer.find(key.digest)
            except RelightError as error:
                faults.append(str(error))
                continue
            if said.quarantine is not None:
                return Absent(f"the key is in quarantine: {said.quarantine.reason}", quarantined=True)
            if said.holding is not None:
                return Present(said.holding.bundle, said.holding.bytes, (*nodes[at:], *nodes[:at]))
        if len(faults) == len(nodes):
            return Absent("no cache node answers: " + ("; ".join(faults) or "there is none"), unreachable=True)
        return Absent("no bundle of this key")

    def explain(self, key: CacheKey) -> tuple[Difference, ...]:
        """In what the nearest key of the ring differs: what changed since that one was compiled."""
        found: list[CacheKey] = []
        for node in self.members.nodes:
            try:
                with self.connect(node) as peer:
                    other = peer.nearest(key)
            except RelightError:
                continue
            if other is not None:
                found.append(other)
        best = nearest(key, found)
        return tuple(best[1]) if best else ()

    def obtain(
        self, key: CacheKey, deadline_seconds: float, waits: Callable[[str], bool] = lambda _: True
    ) -> Present | Claim | Absent:
        """A bundle of the key, at once or when another engine's compile is published; or the right to compile it.

        `waits` hears who compiles it, each second that is waited; False ends the wait.

        Absent when neither: the ring does not answer, the key is in quarantine, or the wait took longer than
        `deadline_seconds`. Then the engine compiles for itself and publishes nothing.
        """
        begun = self._clock.monotonic()
        token = secrets.token_hex(16)
        waited = 0.0
        while True:
            found = self.find(key)
            if isinstance(found, Present):
                return replace(found, waited=waited)
            if found.quarantined or found.unreachable:
                return found
            claim = self._claim(key, token, waited)
            if isinstance(claim, Absent):
                return claim
            if isinstance(claim, Claim):
                # Between the question and the lease the last holder may have published and gone.
                found = self.find(key)
                if isinstance(found, Present):
                    claim.release()
                    return replace(found, waited=waited)
                claim.why = Absent(found.reason, self.explain(key), found.quarantined)
                return claim
            if waited >= deadline_seconds:
                return Absent(
                    f"{claim.holder} has been compiling it for {waited:.0f} s, longer than this start may wait"
                )
            if not waits(claim.holder):
                return Absent("the start was given up while another one compiled")
            with suppress(RelightError), self.connect(claim.node) as peer:
                peer.wait(key.digest, min(deadline_seconds - waited, max(claim.seconds, 0.05), WAIT_SLICE))
            waited = self._clock.monotonic() - begun

    def _claim(self, key: CacheKey, token: str, waited: float) -> Claim | _Contested | Absent:
        """Leases on all nodes of the key that answer, one after the other in one order for everybody.

        So whoever has the first has all; and when that node dies, the others still know who compiles.
        """
        got: list[str] = []
        faults = []
        for node in self.members.keepers(key.digest):
            try:
                with self.connect(node) as peer:
                    said = peer.acquire(key.digest, self._holder, token, self._lease_seconds)
            except RelightError as error:
                faults.append(str(error))
                continue
            if not said.mine:
                self._unlease(key, token, got)
                return _Contested(node, said.holder, said.seconds)
            got.append(node)
        if not got:
            return Absent("no lease could be had: " + "; ".join(faults))
        claim = Claim(key, token, tuple(got), Absent(""), waited, lambda c: self._unlease(c.key, c.token, c.nodes))
        threading.Thread(target=self._renew, args=(claim,), name="relight-cache-lease", daemon=True).start()
        return claim

    def _renew(self, claim: Claim) -> None:
        until = self._clock.monotonic() + LONGEST_COMPILE
        while not claim.ended.wait(self._lease_seconds / 3) and self._clock.monotonic() < until:
            for node in claim.nodes:
                # A node that went away forgets, or is asked again next time; the others remember.
                with suppress(RelightError), self.connect(node) as peer:
                    peer.acquire(claim.key.digest, self._holder, claim.token, self._lease_seconds)

    def _unlease(self, key: CacheKey, token: str, nodes: Iterable[str]) -> None:
        for node in nodes:
            with suppress(RelightError), self.connect(node) as peer:
                peer.unlease(key.digest, token)

    # ------------------------------------------------------------------ bytes

    def open(self, present: Present, key: CacheKey | None = None, *, use: bool = True) -> RemoteBundle:
        """The bundle, to be read from whoever has it; verified against `key` when it is given. Raises RemoteFault.

        `use` counts as a use of it.
        """
        return RemoteBundle(present.bundle, present.nodes, self.connect, self.trust, self.limits, key, use=use)

    def publish(self, tree: SealedTree) -> Published:
        """Hands a bundle to the nodes that shall keep it; the next best stand in for those that do not take it.

        Raises Conflict when the ring has another bundle of this key or it is in quarantine, Denied when nobody trusts
        the signature, Unavailable when no node takes it.
        """
        key = tree.manifest.key.digest
        kept: list[str] = []
        refused: list[str] = []
        for node in self._order(ranked(key, self.members.nodes)):
            if len(kept) == self.members.replicas:
                break
            try:
                with self.connect(node) as peer, tree.body.open("rb") as body:
                    peer.put(tree.sealed, file_chunks(body, tree.manifest.body_bytes))
                kept.append(node)
            except (Conflict, Denied, InvalidInput) as error:
                # A word about the bundle, not about the node: what one refuses so must not be tried on the next.
                if not kept:
                    raise
                refused.append(str(error))
                break
            except RelightError as error:
                refused.append(str(error))
        if not kept:
            raise Unavailable("no cache node takes the bundle: " + "; ".join(refused))
        return Published(tuple(kept), tuple(refused))

    # ------------------------------------------------------------------ quarantine, listing

    def quarantine(self, key: CacheKey, bundle: str, reason: str) -> list[str]:
        """Takes a key out of service on every node that answers; repair tells the rest. Returns who heard."""
        heard = []
        for node in self.members.nodes:
            try:
                with self.connect(node) as peer:
                    peer.quarantine(key.digest, bundle, reason)
                heard.append(node)
            except RelightError as error:
                _log.warning("cache.quarantine-unheard", node=node, reason=str(error))
        return heard

    def release(self, key_digest: str) -> list[str]:
        """Ends a quarantine everywhere. Raises Unavailable when a node does not answer: it would tell the others
        again."""
        silent = []
        released = []
        for node in self.members.nodes:
            try:
                with self.connect(node) as peer:
                    if peer.release(key_digest):
                        released.append(node)
            except RelightError as error:
                silent.append(str(error))
        if silent:
            raise Unavailable("released, but not everywhere: " + "; ".join(silent))
        return released

    def listings(self) -> tuple[dict[str, Listing], dict[str, str]]:
        """What each node holds; and why others did not say."""
        heard: dict[str, Listing] = {}
        silent: dict[str, str] = {}
        for node in self.members.nodes:
            try:
                with self.connect(node) as peer:
                    heard[node] = peer.list()
            except RelightError as error:
                silent[node] = str(error)
        return heard, silent

    def holdings(self) -> dict[str, tuple[Holding, tuple[str, ...]]]:
        """Every bundle of the ring by name, with the nodes that have it. Nodes that do not answer are left out."""
        found: dict[str, tuple[Holding, tuple[str, ...]]] = {}
        for node, listing in self.listings()[0].items():
            for holding in listing.holdings:
                found[holding.bundle] = (holding, (*found.get(holding.bundle, (holding, ()))[1], node))
        return found

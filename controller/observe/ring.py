"""Who belongs to the compile-cache ring, and what each slot is told of it. Pure but for `Rings`, which remembers.

Members are the cache nodes of slots that are alive, the grace time included; signers are all that the store ever saw
with a slot of this fleet, because what a node sealed outlives it. A key of nobody's slot is not among them. Each tenant
has a ring of its own: a bundle is code, and nobody runs what another tenant's slot has sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relight.core.logs import get_logger
from relight.core.records import CacheReport, CacheRing, RingNode, Snapshot
from relight.core.tenants import tenant
from relight.transfer.grants import Claims, mint

log = get_logger("controller.ring")
REPLICAS = 2
"""Nodes that keep each bundle."""
GRANT_SECONDS = 6 * 3600.0
"""Grants are renewed so often, and good for twice as long: so long may a controller be away."""
KEPT_SIGNERS = 4
"""Keys that are remembered of one slot: one that lost its disk has a new one, and what it sealed before is good."""


@dataclass(frozen=True, slots=True)
class Members:
    """The ring as of `revision`: cache nodes by slot, and signers."""

    revision: int
    nodes: Mapping[str, CacheReport] = field(repr=False)
    signers: tuple[str, ...] = ()


def nodes_of(snapshot: Snapshot, whose: str = "") -> dict[str, CacheReport]:
    """The cache nodes of a tenant's living slots."""
    return {s.slot: s.cache for s in snapshot.slots if s.alive and s.cache is not None and tenant(s.pool) == whose}


def signers_of(snapshot: Snapshot, whose: str = "") -> tuple[str, ...]:
    """Every public key that a slot of this tenant has or had, sorted."""
    return tuple(sorted({key for slot in snapshot.slots if tenant(slot.pool) == whose for key in slot.signers}))


def remembered(reported: CacheReport | None, before: tuple[str, ...]) -> tuple[str, ...]:
    """A slot's signers, the newest first."""
    if reported is None or not reported.signer:
        return before
    return (reported.signer, *(key for key in before if key != reported.signer))[:KEPT_SIGNERS]


def told(members: Members, receiver: str, now: float) -> CacheRing:
    """What `receiver` is told. Equal for all calls within one period of the grants, so that nothing is sent twice."""
    expires_at = (period(now) + 2) * GRANT_SECONDS
    nodes = []
    for slot, node in sorted(members.nodes.items()):
        try:
            grant = mint(node.grant_key, Claims(slot, 0, "", receiver, expires_at)) if node.grant_key else ""
        except ValueError:
            # The node refuses an empty grant and says so; the others are asked.
            log.warning("ring.unusable-key", slot=slot)
            grant = ""
        nodes.append(RingNode(slot, node.address, grant))
    return CacheRing(members.revision, REPLICAS, tuple(nodes), members.signers)


def period(now: float) -> int:
    """Grants of one period are equal."""
    return int(now // GRANT_SECONDS)


def renewed_in(now: float) -> float:
    """Seconds until grants are made anew."""
    return GRANT_SECONDS - now % GRANT_SECONDS


class Rings:
    """The present rings. Revisions grow over restarts too, because the epoch stands in their upper half."""

    def __init__(self) -> None:
        self._present: dict[str, Members] = {}
        self._listeners: list[Callable[[], None]] = []
        self._count = 0

    def of(self, whose: str = "") -> Members | None:
        """The ring of one tenant."""
        return self._present.get(whose)

    def listen(self, changed: Callable[[], None]) -> None:
        """`changed` is called whenever a ring was replaced."""
        self._listeners.append(changed)

    def update(self, epoch: int, snapshot: Snapshot) -> None:
        """Takes in a snapshot. One that is not synced says nothing: a ring of half the fleet would move bundles."""
        if not snapshot.synced:
            return
        tenants = {"", *(tenant(slot.pool) for slot in snapshot.slots)}
        self._present = {whose: ring for whose, ring in self._present.items() if whose in tenants}
        changed = [whose for whose in sorted(tenants) if self._update(epoch, snapshot, whose)]
        if changed:
            for listener in self._listeners:
                listener()

    def _update(self, epoch: int, snapshot: Snapshot, whose: str) -> bool:
        nodes, signers = nodes_of(snapshot, whose), signers_of(snapshot, whose)
        before = self._present.get(whose)
        if before is not None and before.revision >> 32 == epoch and _same(before, nodes, signers):
            return False
        self._count += 1
        made = self._present[whose] = Members((epoch << 32) + self._count, nodes, signers)
        log.info("ring.changed", tenant=whose, nodes=sorted(nodes), signers=len(signers), revision=made.revision)
        return True


def _same(before: Members, nodes: Mapping[str, CacheReport], signers: tuple[str, ...]) -> bool:
    """Whether nobody would be told anything else: how full nodes are changes all the time."""
    return before.signers == signers and _told(before.nodes) == _told(nodes)


def _told(nodes: Mapping[str, CacheReport]) -> dict[str, tuple[str, str]]:
    return {slot: (node.address, node.grant_key) for slot, node in nodes.items()}

"""What agents are told: sources, rungs, and the whole assignment of a slot. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from relight.core.records.reported import HostContent, Shapes
from relight.core.records.wanted import Desired, Mode, ModelSpec, RungKind, Storage


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A source of weights as a receiver needs it: where, which generation, and the grant to read it."""

    instance: str
    slot: str
    generation: int
    manifest_digest: str
    content_digest: str
    address: str
    """`unix:/path` for shm, `nvlink:/path` for nvlink, `tcp:host:port` for tcp, `tls:host:port` for tcp over TLS,
    `rdma:host:port` or `nixl:host:port` for each card with `+` between them; by rank, separated by commas."""
    grant: str = ""
    filling: bool = False
    """It is being filled at the same time: it gives what it has proven so far, and may come a little later."""
    parts: tuple[int, ...] = ()
    """The parts of the body that are dealt to it, in the order in which they are asked for."""


@dataclass(frozen=True, slots=True)
class Deal:
    """How receivers that are filled at the same time divide one body among them, as transfer/plan.py answered.

    The body is cut into `parts` of equal length; 0 where nobody passes anything on. This receiver is the one of number
    `turn` of `receivers`. `seconds` is when all have everything, if paths carry what is counted on.
    """

    shape: str
    reason: str
    seconds: float
    receivers: int
    turn: int
    parts: int = 0

    @property
    def told(self) -> str:
        """For records."""
        return f"{self.turn + 1} of {self.receivers} at once: {self.reason}"


@dataclass(frozen=True, slots=True)
class Rung:
    """One allowed step of the source ladder, with the reason why it stands where it stands.

    `helpers` hold the same weights, and are read beside or after `source` in one and the same refill; those that are
    filled meanwhile are among them. `instead_of` names a faster path that both ends are equipped for, and why it is
    closed.
    """

    kind: RungKind
    reason: str
    source: SourceRef | None = None
    helpers: tuple[SourceRef, ...] = ()
    instead_of: str = ""
    deal: Deal | None = None
    """None for one that is filled alone."""


@dataclass(frozen=True, slots=True)
class InstanceAssignment:
    """What one member of one instance should be. `deadline_seconds` counts from receipt."""

    instance: str
    model: str
    spec: ModelSpec
    rank: int
    members: int
    devices: tuple[str, ...]
    desired: Desired
    level: int = 2
    mode: Mode = Mode.COLD
    content_revision: str = ""
    rungs: tuple[Rung, ...] = ()
    operation: str = ""
    cause: str = ""
    deadline_seconds: float = 900.0
    shapes: Shapes | None = None
    """What the model's engines run, for a start to prepare for; None where it is not known, or nothing is started."""


@dataclass(frozen=True, slots=True)
class RingNode:
    """One cache node, with this slot's own grant for it."""

    slot: str
    address: str
    grant: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class CacheRing:
    """Who the cache nodes are, as of a revision that grows at each change of them, and whose signatures count."""

    revision: int
    replicas: int
    nodes: tuple[RingNode, ...] = ()
    signers: tuple[str, ...] = ()
    """Public keys. They outlive their slots: what a dead node has sealed is still good."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where an engine of another slot is read by one transport, to be tried: `grant` lets this slot in, no further."""

    slot: str
    transport: str
    instance: str
    address: str
    """Of its first rank, as in SourceRef."""
    grant: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The doors that a slot shall try and tell of, as of a revision that grows at each change of them."""

    revision: int
    doors: tuple[Door, ...] = ()


@dataclass(frozen=True, slots=True)
class HostWanted:
    """One copy of weights that a slot shall keep in host memory: what it is, whom to read it from, and why here.

    Without rungs it is kept if it is there, and cannot be made.
    """

    copy: str
    content: HostContent
    bytes: int
    """Of the weights, as their source says; what they take in memory is a little more."""
    rungs: tuple[Rung, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A checkpoint that a slot shall read ahead, because nothing else holds it: from `storage` into its own memory, or
    from `uri` into the system's page cache."""

    model: str
    revision: str
    uri: str
    reason: str = ""
    storage: Storage | None = None


@dataclass(frozen=True, slots=True)
class HostTier:
    """All copies that a slot shall keep in host memory, and no other; and what it shall read ahead."""

    wanted: tuple[HostWanted, ...] = ()
    prefetch: tuple[Prefetch, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that one slot should run. Revision decides (higher replaces), epoch fences (lower is refused).

    `ring`, `host_tier`, `neighbours` and `caller` travel along and are no part of what the revision names: they are
    heard whenever the epoch is not fenced.
    """

    slot: str
    epoch: int
    revision: int
    instances: tuple[InstanceAssignment, ...] = ()
    ring: CacheRing | None = None
    """None while the controller does not know the fleet: then the last one heard stands."""
    host_tier: HostTier | None = None
    """None likewise."""
    neighbours: Neighbours | None = None
    """None likewise."""
    caller: str = ""
    """SHA-256 of the token that the controller shows when it calls this slot's agent, and no other."""

"""What deciding and planning look at and return: snapshots, decisions, prices, plans, operations. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from relight.core.records.assigned import Rung
from relight.core.records.reported import (
    CacheReport,
    Capability,
    DeviceReport,
    Failure,
    HostReport,
    InstanceReport,
    Phase,
    Reach,
)
from relight.core.records.wanted import Desired, Mode, ModelSpec, RungKind
from relight.core.states import State


@dataclass(frozen=True, slots=True)
class Demand:
    """What the gateways see of one model. Absent demand (no gateway attached) is None, never zero."""

    held: int
    oldest_held_seconds: float
    in_flight: int
    last_request_at: float | None


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot in a snapshot: alive means its agent is attached or was within the grace time."""

    slot: str
    alive: bool
    boot_id: str
    force_tcp: bool
    engines: Mapping[str, str]
    devices: tuple[DeviceReport, ...]
    transports: Mapping[str, str] = field(default_factory=dict)
    """As its agent reports them (SlotReport)."""
    cache: CacheReport | None = None
    """As its agent reports it (SlotReport)."""
    signers: tuple[str, ...] = ()
    """Public keys by which this slot seals bundles, or once did; the newest first."""
    host_tier: HostReport | None = None
    """As its agent reports it (SlotReport)."""
    pool: str = ""
    """The pool that it is of, as `namespace/name`, by the word of whoever made it and never of its agent."""
    allowed: tuple[str, ...] = ()
    """The models that its pool allows, by key; empty for all that name the pool."""
    closing: str = ""
    """Why nothing new goes there and what is there moves elsewhere; empty while it stays."""
    images_seconds: float = 0.0
    """How long its containers waited for their images when it was made, as far as whoever made it can see; else 0."""
    clear: bool = True
    """Whether it is known what runs there: its agent was heard of, and all that it runs is assigned; or it is lost."""
    presumed: str = ""
    """The model, by key, of which a replica is said to stand there, while neither the slot's agent was heard of nor the
    store knows; empty otherwise."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """As its agent reports them (SlotReport)."""
    capabilities: tuple[Capability, ...] = ()
    """As its agent reports them (SlotReport)."""
    reach: tuple[Reach, ...] = ()
    """As its agent reports it (SlotReport)."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member of an instance in a snapshot: the assignment for it and the newest report of it."""

    slot: str
    rank: int
    devices: tuple[str, ...]
    report: InstanceReport | None


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance in a snapshot: what it was last told to be, and what it is (the state of the group)."""

    instance: str
    model: str
    spec: ModelSpec
    members: tuple[MemberView, ...]
    desired: Desired
    state: State
    level: int
    operation: str
    mode: Mode
    failure: Failure | None = None
    failed_at: float = 0.0
    """When `failure` was seen; its `retry_after` counts from here."""
    remembered: bool = False
    """The instance is gone or asleep again; what is left is the memory that `desired` failed on it."""
    drained: bool = False
    """No gateway routes to it or has a request of it open, or its drain time passed."""
    drain_until: float | None = None
    """When the drain time passes; None while it is not draining."""
    in_flight: int = 0
    """Requests of it that gateways have open."""
    reads: str = ""
    """Whom it reads its weights from while it comes up; empty while it reads no other."""


@dataclass(frozen=True, slots=True)
class HeldLevel:
    """A number of replicas that demand wanted. `left_at` is when it stopped to (wall); None while it does."""

    replicas: int
    left_at: float | None = None


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model in a snapshot: its spec, demand, and the open operation that asked for its number."""

    spec: ModelSpec
    demand: Demand | None
    operation: str = ""
    allowed_rungs: tuple[RungKind, ...] = ()
    changed_at: float = 0.0
    """When somebody last wrote the replica number or the spec."""
    activated_at: float | None = None
    """Since when held requests keep one replica up although the written number is 0."""
    idled_at: float | None = None
    """Since when idleness keeps the model at zero although the written number is higher."""
    waits_since: float | None = None
    """Since when it lacks devices for a replica without having got any; None while it lacks none."""
    burst: tuple[HeldLevel, ...] = ()
    """What demand alone woke above the number, as of the last decision."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that deciding and planning may look at, at one store revision."""

    now: float
    revision: int
    epoch: int
    models: tuple[ModelView, ...]
    slots: tuple[SlotView, ...]
    instances: tuple[InstanceView, ...]
    synced: bool = True
    """False until every slot of the store was heard of or missed its grace time: nothing is scaled down."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas and guardians a model shall have, and why."""

    model: str
    replicas: int
    guardians: int
    reason: str
    floor: int = 0
    burst: tuple[HeldLevel, ...] = ()
    """What is held above the number that was written, the lowest first."""


@dataclass(frozen=True, slots=True)
class Price:
    """The predicted time of one mode for one missing replica, in parts; `fits` False carries the reason."""

    mode: Mode
    seconds: float
    fits: bool
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict)
    measured: bool = False
    """Whether `seconds` rests on starts of this very model by this mode."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One instance that shall change: what it becomes, where, how, and why this and not another."""

    instance: str
    model: str
    desired: Desired
    mode: Mode
    level: int
    slots: tuple[str, ...]
    devices: tuple[tuple[str, ...], ...]
    """One tuple of device ids per member, in rank order."""
    rungs: tuple[Rung, ...]
    reason: str
    predicted_seconds: float | None
    prices: tuple[Price, ...] = ()
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What shall change, and what could not be placed; empty when the fleet is as decided."""

    revision: int
    decisions: tuple[Decision, ...]
    placements: tuple[Placement, ...]
    unplaced: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """Models of which a replica is missing for want of devices."""


class OperationState(StrEnum):
    """An operation ends done, failed or superseded, whatever crashes."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Operation:
    """One accepted change and how it ended. `revision` is the store revision that it was accepted at."""

    id: str
    kind: str
    model: str
    by: str
    state: OperationState
    reason: str
    created_at: float
    replicas_before: int
    replicas_after: int
    finished_at: float | None = None
    idempotency_key: str = ""
    rungs: tuple[RungKind, ...] = ()
    predicted_seconds: float | None = None
    phases: tuple[Phase, ...] = ()
    """The control plane's own share: accept, decide, dispatch."""
    instances: tuple[str, ...] = ()

"""The frozen records that travel between the hops of a scale-out. No I/O.

    ScaleRequest -> Snapshot -> Decision(reason) -> Plan(placements, modes, sources, predicted times)
      -> Assignment(slot, epoch, revision) -> EngineEvent -> TransferSession -> Proof -> Endpoint -> StartRecord

Units: bytes, seconds, wall times in seconds since the Unix epoch. Field names equal those of
protos/relight/v1, so that protos/convert.py carries a record over the wire without a second definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from relight.core.fingerprint import Fingerprint
from relight.core.states import State


class Mode(StrEnum):
    """How a missing replica comes to exist; `auto` takes the fastest that fits."""

    AUTO = "auto"
    GUARDIAN = "guardian"
    COLD = "cold"


class RungKind(StrEnum):
    """Where a wake takes its weights from, fastest first."""

    PEER_SHM = "peer_shm"
    PEER_TCP = "peer_tcp"
    HOST_COPY = "host_copy"
    DISK = "disk"


class Desired(StrEnum):
    """What an assignment wants of an instance."""

    READY = "ready"
    DRAINED = "drained"
    """Not routable, still awake: the step before sleep or stop, so that the gateway can drain it."""
    DORMANT = "dormant"
    GONE = "gone"


class OnTimeout(StrEnum):
    """What happens to requests that outlive the drain's time."""

    WAIT = "wait"
    ABORT = "abort"


class Keep(StrEnum):
    """What scale to zero leaves behind."""

    GUARDIAN = "guardian"
    NOTHING = "nothing"


# ---------------------------------------------------------------------------------- what is wanted


@dataclass(frozen=True, slots=True)
class Guardians:
    """How many dormant instances stand by, and at which level (1 keeps a host copy, 2 keeps nothing)."""

    replicas: int = 0
    level: int = 2


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    """Idle time before the last replica goes (None: never by itself) and what is kept then."""

    idle_seconds: float | None = None
    keep: Keep = Keep.GUARDIAN


@dataclass(frozen=True, slots=True)
class Drain:
    """How long requests may finish before sleep or stop, and what happens to those that do not."""

    timeout_seconds: float = 30.0
    on_timeout: OnTimeout = OnTimeout.ABORT


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model as its owner asks for it. `uri` is a local directory; `args` go to the engine as they are."""

    namespace: str
    name: str
    uri: str
    revision: str
    engine: str
    served_names: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    members: int = 1
    devices_per_member: int = 1
    memory_bytes: int = 0
    replicas: int = 0
    max_replicas: int = 64
    guardians: Guardians = field(default_factory=Guardians)
    mode: Mode = Mode.AUTO
    scale_to_zero: ScaleToZero = field(default_factory=ScaleToZero)
    rungs: tuple[RungKind, ...] = tuple(RungKind)
    drain: Drain = field(default_factory=Drain)
    start_deadline_seconds: float = 900.0
    wake_deadline_seconds: float = 60.0

    @property
    def key(self) -> str:
        """`namespace/name`, unique in a fleet."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A change of one model's replica number, as it came in: `by` is the identity that asked."""

    model: str
    replicas: int
    by: str
    received_at: float
    idempotency_key: str = ""
    rungs: tuple[RungKind, ...] = ()
    """When given, only these rungs are allowed for the wakes of this request."""


# ------------------------------------------------------------------------- what agents are told


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A source of weights as a receiver needs it: where, which generation, and the grant to read it."""

    instance: str
    slot: str
    generation: int
    manifest_digest: str
    content_digest: str
    address: str
    """`unix:/path` for shm, `tcp:host:port` for tcp."""
    grant: str = ""


@dataclass(frozen=True, slots=True)
class Rung:
    """One allowed step of the source ladder, with the reason why it stands where it stands."""

    kind: RungKind
    reason: str
    source: SourceRef | None = None


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that one slot should run. Revision decides (higher replaces), epoch fences (lower is refused)."""

    slot: str
    epoch: int
    revision: int
    instances: tuple[InstanceAssignment, ...] = ()


# ------------------------------------------------------------------------- what agents report


@dataclass(frozen=True, slots=True)
class Phase:
    """A named stretch of wall time of one start; stretches may overlap. `detail` says path, bytes, rate."""

    name: str
    start: float
    end: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RungResult:
    """What became of one tried rung; `reason` names the tensor, field or error when it failed."""

    kind: RungKind
    ok: bool
    reason: str
    seconds: float
    source: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start or wake as a timeline: why, by which mode and rungs, and where its wall time went."""

    instance: str
    incarnation: int
    model: str
    mode: Mode
    operation: str
    begun_at: float
    ended_at: float
    ok: bool
    reason: str
    rungs: tuple[RungResult, ...] = ()
    phases: tuple[Phase, ...] = ()
    predicted_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an instance failed, and when to try again: seconds from now, or None for never by itself."""

    reason: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a ready instance answers. `url` is the engine's own HTTP base, loopback unless configured."""

    url: str
    served_name: str


@dataclass(frozen=True, slots=True)
class SourceOffer:
    """What a ready engine offers to readers of its weights. `grant_key` signs grants for it: a secret."""

    generation: int
    manifest_digest: str
    content_digest: str
    layout_digest: str
    shm_address: str
    tcp_address: str
    weight_bytes: int
    grant_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Measured bytes of one instance: proportional set size of its process tree plus segments it owns."""

    measured_at: float
    total_bytes: int
    weight_bytes: int = 0
    kv_bytes: int = 0
    residual_bytes: int = 0
    """What the last sleep left behind; 0 when it never slept."""


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """One member of one instance as its agent sees it."""

    instance: str
    model: str
    rank: int
    members: int
    devices: tuple[str, ...]
    state: State
    since: float
    cause: str
    incarnation: int
    level: int = 2
    operation: str = ""
    pid: int = 0
    endpoint: Endpoint | None = None
    source: SourceOffer | None = None
    fingerprint: Fingerprint | None = None
    failure: Failure | None = None
    memory: MemoryReading | None = None
    start: StartRecord | None = None
    progress: str = ""
    """One line for people while a start is under way."""
    requests_running: int = 0


@dataclass(frozen=True, slots=True)
class DeviceHolder:
    """A process that holds memory of a device; `instance` is empty for a stranger."""

    pid: int
    name: str
    bytes: int
    instance: str = ""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device as measured. `id` is opaque; `parent` owns the memory and carries the transition lock."""

    id: str
    kind: str
    parent: str
    total_bytes: int
    used_bytes: int
    holders: tuple[DeviceHolder, ...] = ()
    model_name: str = ""
    healthy: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SlotReport:
    """Everything one agent knows, sent whole: repeats and reordering do no harm (`sequence` decides)."""

    slot: str
    epoch: int
    """Highest epoch the agent has seen."""
    revision: int
    """Assignment revision it acts on; 0 before the first."""
    sequence: int
    agent: str
    """Incarnation of the agent process."""
    boot_id: str
    host: str
    agent_address: str
    force_tcp: bool = False
    engines: Mapping[str, str] = field(default_factory=dict)
    """Engine name -> version that this slot can start."""
    devices: tuple[DeviceReport, ...] = ()
    instances: tuple[InstanceReport, ...] = ()


# ------------------------------------------------------------------------- deciding and planning


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


@dataclass(frozen=True, slots=True)
class Price:
    """The predicted time of one mode for one missing replica, in parts; `fits` False carries the reason."""

    mode: Mode
    seconds: float
    fits: bool
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict)


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


# ------------------------------------------------------------------------- routing


@dataclass(frozen=True, slots=True)
class RouteReplica:
    """A replica that may be given requests: only ready instances are ever listed."""

    instance: str
    incarnation: int
    url: str
    served_name: str


@dataclass(frozen=True, slots=True)
class RouteModel:
    """One known model for the gateway: where it answers, and what may be expected when nowhere."""

    namespace: str
    name: str
    served_names: tuple[str, ...]
    replicas: tuple[RouteReplica, ...]
    coming: int
    can_come: bool
    next_ready_seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RouteTable:
    """What the gateway routes by, sent whole at each change."""

    revision: int
    models: tuple[RouteModel, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayModel:
    """One model's demand at one gateway."""

    namespace: str
    name: str
    held: int
    oldest_held_seconds: float
    in_flight: int
    last_request_at: float


@dataclass(frozen=True, slots=True)
class GatewayInstance:
    """Requests of one incarnation that one gateway still has open."""

    instance: str
    incarnation: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class GatewaySpan:
    """A phase that only the gateway sees (`route`, `first_token`) of the first request of an incarnation."""

    instance: str
    incarnation: int
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """One gateway's view, sent whole; `route_revision` acknowledges the table it routes by."""

    gateway: str
    route_revision: int
    models: tuple[GatewayModel, ...] = ()
    instances: tuple[GatewayInstance, ...] = ()
    spans: tuple[GatewaySpan, ...] = ()

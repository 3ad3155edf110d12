"""What an owner wants of a model: its specification, and a change of its number. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """How a missing replica comes to exist; `auto` takes the fastest that fits.

    `guardian` wakes a dormant engine. `lazy` and `normal` start one out of what the node keeps ready (a zygote,
    compiled code from the ring, weights by the ladder); `lazy` serves before everything is warmed up or captured.
    `cold` is the engine's own start, with nothing of ours: what the others are measured against.
    """

    AUTO = "auto"
    GUARDIAN = "guardian"
    LAZY = "lazy"
    NORMAL = "normal"
    COLD = "cold"


class RungKind(StrEnum):
    """Where a wake takes its weights from, fastest first."""

    PEER_SHM = "peer_shm"
    PEER_NVLINK = "peer_nvlink"
    """From device to device, inside one host."""
    PEER_NIXL = "peer_nixl"
    PEER_RDMA = "peer_rdma"
    PEER_TCP = "peer_tcp"
    HOST_COPY = "host_copy"
    """The engine's own, kept by its sleep at level 1."""
    HOST_SHM = "host_shm"
    """A copy of the host tier, on the same host."""
    HOST_TCP = "host_tcp"
    STORAGE = "storage"
    """The checkpoint in remote storage, by way of the slot's memory."""
    DISK = "disk"

    @property
    def transport(self) -> str:
        """The transport that reads another process by this rung; empty for those that read none."""
        alone = (RungKind.HOST_COPY, RungKind.STORAGE, RungKind.DISK)
        return "" if self in alone else self.value.partition("_")[2]

    @property
    def from_host_tier(self) -> bool:
        """Whether a copy in host memory is read, and no engine."""
        return self in (RungKind.HOST_SHM, RungKind.HOST_TCP)


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


class Spread(StrEnum):
    """Whether instances of a model keep away from hosts that have another of them: one that is lost takes fewer along.

    A guardian on the host of its source wakes by shared memory, which is the faster way: so not unless it is asked for.
    """

    NONE = "none"
    PREFERRED = "preferred"
    REQUIRED = "required"
    """Where every host has one already, the next stays missing."""


@dataclass(frozen=True, slots=True)
class Guardians:
    """How many dormant instances stand by, and at which level (1 keeps a host copy, 2 keeps nothing)."""

    replicas: int = 0
    level: int = 2
    spread: Spread = Spread.NONE
    """Of guardians and replicas alike: what is a guardian now is a replica next."""
    max_per_device: int = 1
    """How many engines, of whatever models, a device may hold where one of this model is; one of them may be awake."""


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
class Strategy:
    """How replicas that no longer fit are replaced: how many above the number meanwhile, how many below it."""

    max_surge: int = 1
    max_unavailable: int = 0
    paused: bool = False
    """Replicas of an earlier specification stay; those on closing slots are replaced all the same."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the files of weights lie in remote storage: a base address of HTTP(S), which may be presigned by its query.

    `sha256` holds digests by file name; a file that is not named there is checked by its own header alone.
    """

    uri: str = field(repr=False)
    sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scaling:
    """What load a replica is for: what all that follow demand count by."""

    requests_per_replica: int = 8
    """Requests at once, held ones included."""


@dataclass(frozen=True, slots=True)
class Burst:
    """How far guardians are woken above the written number while demand asks for it; 0 for never."""

    max_replicas: int = 0
    hold_seconds: float = 60.0
    """How long each stays after the demand that woke it: longer than an autoscaler takes to write its number."""


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Whether the built-in autoscaler writes the number."""

    enabled: bool = False
    window_seconds: float = 60.0
    """It lowers the number to the highest that demand asked for within this time."""


@dataclass(frozen=True, slots=True)
class Proving:
    """What the canary of a replica is held to (docs/adr/0005): how many greedy tokens, each equal to the source's, and
    by how many nats their log-probabilities may differ from the source's."""

    tokens: int = 1
    tolerance_nats: float = 0.05
    """Equal kernels on equal bytes differ by nothing; a lost KV scale or a wrong layer by far more."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter that every replica serves beside its model, under a name of its own. `uri` is a directory."""

    name: str
    uri: str


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
    host_copies: int = 1
    """Copies of the content that slots with a budget keep in host memory (docs/host-tier.md)."""
    strategy: Strategy = field(default_factory=Strategy)
    pool: str = ""
    """The pool of slots that it runs on, as `namespace/name`; empty for slots that are in none."""
    min_replicas: int = 0
    """The written number counts as at least this one."""
    share_host_copies: bool = False
    """Whether engines map the pages of a copy on their host instead of copying them (docs/host-tier.md)."""
    warm_up_requests: int = 2
    """Requests of common shapes that a started engine answers before it is routed to; 0 for none (docs/modes.md)."""
    storage: Storage | None = None
    """Where this revision's weights can be had besides `uri`; None: nowhere."""
    scaling: Scaling = field(default_factory=Scaling)
    burst: Burst = field(default_factory=Burst)
    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    priority: int = 0
    """Higher ones take free devices first (controller/plan/order.py)."""
    encrypt: bool = False
    """Weights come from other hosts over TLS alone: what cannot do that is no source."""
    source_rate: int | None = None
    """Bytes per second that others together may read from each engine; an agent's own limit holds besides."""

    expert_parallel: bool = False
    """Whether the experts of a mixture are dealt over the devices of a member, and not each cut into slices."""
    proof: Proving = field(default_factory=Proving)
    adapters: tuple[Adapter, ...] = ()

    @property
    def key(self) -> str:
        """`namespace/name`, unique in a fleet."""
        return f"{self.namespace}/{self.name}"

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names by which engines and clients alike know the adapters."""
        return tuple(adapter.name for adapter in self.adapters)


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

"""What agents report: devices, instances, where a start's time went, what may be read from whom. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from relight.core.fingerprint import Fingerprint
from relight.core.records.wanted import Mode, RungKind
from relight.core.states import State


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
    instead_of: str = ""
    """Faster paths that were expected, and why they were not taken, as `kind: reason`; empty when none was."""
    cause: str = ""
    """A word for `reason` when it failed: the error's code, `proof-failed`, or `defect`."""
    brought: Mapping[str, int] = field(default_factory=dict)
    """Bytes by the instance or copy that they were read from."""
    passed_on: int = 0
    """How many of them came from instances that were being filled themselves."""
    deal: str = ""
    """How several that were filled at the same time shared the work, and why so; empty for one alone."""


@dataclass(frozen=True, slots=True)
class StartCache:
    """What the compile-cache ring did for one start (docs/compile-cache.md). Counts are of files, times in seconds."""

    key: str
    """Digest of all that changes the artefacts; empty where it could not be said."""
    verdict: str
    """hit, partly, not-selected, not-loaded, compiled; failed when the engine never served."""
    reason: str
    bundle: str = ""
    """The bundle that was installed, or that was published of what this start compiled."""
    installed: int = 0
    selected: bool = False
    hit: bool = False
    compiled: int = 0
    waited_seconds: float = 0.0
    """For another start that was compiling the same."""
    fetched_seconds: float = 0.0
    saved_seconds: float | None = None
    """Against the start that compiled; None where an engine does not say what its own part took."""
    changed: tuple[str, ...] = ()
    """Why there was no bundle: the components in which the nearest known key differs."""
    published: tuple[str, ...] = ()
    """The nodes that keep what this start compiled."""
    not_published: str = ""
    quarantined: str = ""


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
    process: str = ""
    """How a start's process came to be, with the reason when it was spawned although a zygote was to be forked."""
    cache: StartCache | None = None
    """Known a while after the start has ended; None for a start that had nothing to do with the ring."""


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
    """What a ready engine offers to readers of its weights. `grant_key` signs grants for it: a secret.

    An engine of several ranks gives their addresses and manifest digests in their order, separated by commas.
    """

    generation: int
    manifest_digest: str
    content_digest: str
    layout_digest: str
    addresses: Mapping[str, str]
    """By transport: where it is read. A transport that could not be served is absent, and `closed` says why."""
    weight_bytes: int
    closed: Mapping[str, str] = field(default_factory=dict)
    grant_key: str = field(default="", repr=False)
    rate_limit: int | None = None
    """Bytes a second that all its readers together get at most; None where nothing is set."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Measured bytes of one instance: proportional set size of its process tree plus segments it owns."""

    measured_at: float
    total_bytes: int
    weight_bytes: int = 0
    kv_bytes: int = 0
    residual_bytes: int = 0
    """What the last sleep left behind; 0 when it never slept."""
    unsafe: str = ""
    """Why the engine is no safe guardian: its last sleep gave back too little, measured. Empty when it did, or never
    slept."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What ran lately, as weights by size in tokens (core/shapes.py): older work counts less. `at` is a wall time."""

    at: float
    steps: Mapping[int, float] = field(default_factory=dict)
    """Steps of engines, by the tokens of a step."""
    prompts: Mapping[int, float] = field(default_factory=dict)
    """Requests, by the tokens of their prompt."""


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
    relay: SourceOffer | None = None
    """Of a sleeper: where it will be read while it is filled. It has no digests yet."""
    fingerprint: Fingerprint | None = None
    failure: Failure | None = None
    memory: MemoryReading | None = None
    start: StartRecord | None = None
    progress: str = ""
    """One line for people while a start is under way."""
    requests_running: int = 0
    shapes: Shapes | None = None
    """None until something ran that is not Relight's own."""


@dataclass(frozen=True, slots=True)
class DeviceHolder:
    """A process that holds memory of a device; `instance` is empty for a stranger."""

    pid: int
    name: str
    bytes: int
    instance: str = ""


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The link between a device and its host: generation and lanes now, and at best. An idle device lowers the
    generation by itself, and never the lanes."""

    generation: int
    width: int
    best_generation: int
    best_width: int


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
    pcie: PcieLink | None = None
    """None where it cannot be told."""
    nic: str = ""
    """The RDMA card that carries its traffic; empty where there is none, or the device's place is not known."""
    nic_distance: str = ""
    """How far away that card is: PIX, PXB, PHB, NODE or SYS, as vendors' tools say it."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """A slot's cache node: where it is, whose signature its bundles carry, and its numbers.

    `grant_key` signs grants for it: a secret. Counts of starts are since the agent's own start.
    """

    address: str
    signer: str
    """Public key, 64 hexadecimal digits."""
    bundles: int = 0
    bytes: int = 0
    quota: int = 0
    quarantined: int = 0
    """Keys in quarantine, as this node knows them."""
    hits: int = 0
    misses: int = 0
    """Starts that got no bundle or none that the engine used."""
    compiles: int = 0
    """Starts in which an engine compiled something."""
    grant_key: str = field(default="", repr=False)


class Verdict(StrEnum):
    """What is known of a capability. Unknown means the slower way that is safe."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Capability:
    """What engines of one kind can do on a slot's devices with its versions, as seen there or as read of them."""

    engine: str
    name: str
    verdict: Verdict
    reason: str
    """The measurement or failure that it rests on, or what was read."""
    ranks: int = 0
    """Devices of one member that it was seen with; 0 for any number."""
    at: float = 0.0
    """When it was seen (wall); 0 for what was read."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What came of trying to read another slot by one transport. No verdict: it was not tried, or said nothing."""

    slot: str
    transport: str
    verdict: Verdict
    reason: str
    at: float
    """When it was tried (wall)."""


class HostState(StrEnum):
    """A copy of the host tier is read from a source, then it is one; or neither, with a reason."""

    FILLING = "filling"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class HostContent:
    """What a copy is of, and for which engines it fits as far as can be said before they have a fingerprint."""

    model: str
    revision: str
    runtime: str
    """Names engine, arguments, environment, members and devices per member, as the planner does."""
    engine_version: str
    """Of the engine whose memory it is a copy of."""
    device_kind: str


@dataclass(frozen=True, slots=True)
class HostCopyReport:
    """One copy as its process says: `bytes` are of host memory; with a `source` it can be read."""

    copy: str
    content: HostContent
    state: HostState
    reason: str = ""
    bytes: int = 0
    source: SourceOffer | None = None


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """How far a checkpoint is read into the page cache; `reason` says what stopped it, empty while nothing did."""

    model: str
    revision: str
    bytes: int
    total: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """A slot's part of the host tier: copies of weights in host memory, and what is read ahead."""

    budget_bytes: int
    copies: tuple[HostCopyReport, ...] = ()
    prefetches: tuple[PrefetchReport, ...] = ()


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
    transports: Mapping[str, str] = field(default_factory=dict)
    """Transports between hosts that this slot is equipped for, besides tcp; what stands in the way, empty if nothing
    does."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Engine name -> version that this slot can start."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What version locks and the doctor look at: driver, firmware, runtime of the devices, limits of the host."""
    capabilities: tuple[Capability, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    instances: tuple[InstanceReport, ...] = ()
    cache: CacheReport | None = None
    """None where no cache node runs."""
    host_tier: HostReport | None = None
    """None where no memory is set aside for it."""
    reach: tuple[Reach, ...] = ()
    """Of the neighbours that it was told of."""

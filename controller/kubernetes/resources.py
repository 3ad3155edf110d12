"""Relight's resources as users write them: fields, bounds and defaults; the definitions are generated from here.

Field names follow Kubernetes (camel case, units in names). Every bound stands in the schema, so that the API server
refuses what the controller would; what a schema cannot say is said by rules (definitions.py), in CEL for servers that
have it and in Python for those that have not (translate.py).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from relight.controller.kubernetes.api import Kind
from relight.controller.specs import ADAPTER_PATTERN, MAX_REPLICAS, STORAGE_PATTERN, WEIGHTS_PATTERN
from relight.core.records import Keep, Mode, OnTimeout, RungKind, Spread

GROUP, VERSION = "relight.dev", "v1alpha1"
MODEL_DEPLOYMENT = Kind(GROUP, VERSION, "modeldeployments", "ModelDeployment")
DEVICE_POOL = Kind(GROUP, VERSION, "devicepools", "DevicePool")
ENGINE_RUNTIME = Kind(GROUP, VERSION, "engineruntimes", "EngineRuntime")

POOL_LABEL, MODEL_LABEL, STATE_LABEL = f"{GROUP}/pool", f"{GROUP}/model", f"{GROUP}/state"
PROVEN_GATE = f"{GROUP}/proven"
FINALIZER = f"{GROUP}/instances"
CLOSING = f"{GROUP}/closing"
"""Annotation of a slot pod that its pool wants to be rid of: why."""


class Writer(StrEnum):
    """Who may write `replicas`, told apart by field manager; all others give the condition ConflictingWriters."""

    ANY = "Any"
    KUBECTL = "Kubectl"
    HPA = "HPA"
    KEDA = "KEDA"
    AUTOSCALER = "Autoscaler"


class _Field(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


_OPEN: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}
Label = Annotated[str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Text = Annotated[str, Field(max_length=4096)]
NonEmpty = Annotated[str, Field(min_length=1, max_length=4096)]
Number = Annotated[int, Field(ge=0, le=MAX_REPLICAS)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Wire = Literal[
    "PeerShm", "PeerNvlink", "PeerNixl", "PeerRdma", "PeerTcp", "HostCopy", "HostShm", "HostTcp", "Storage", "Disk"
]  # fmt: skip


class StoredFile(_Field):
    """What one file of weights has to be."""

    name: Annotated[str, Field(max_length=255, pattern=f"^{WEIGHTS_PATTERN}$")]
    sha256: Annotated[str, Field(max_length=64, pattern="^[0-9a-f]{64}$")]


class Storage(_Field):
    """Where the files of weights lie in remote storage besides; empty for nowhere."""

    uri: Annotated[str, Field(max_length=4096, pattern=f"^({STORAGE_PATTERN})?$")] = ""
    files: Annotated[list[StoredFile], Field(max_length=4096)] = []


class Adapter(_Field):
    """A low-rank adapter that every replica serves beside its model, under a name of its own."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=ADAPTER_PATTERN)]
    uri: NonEmpty


class Model(_Field):
    """What is served: where its weights are, which revision of them, and under which names."""

    uri: NonEmpty
    revision: NonEmpty
    served_names: Annotated[list[NonEmpty], Field(max_length=64)] = []
    storage: Storage = Storage()
    adapters: Annotated[list[Adapter], Field(max_length=64)] = []


class Ref(_Field):
    """An object of the same namespace."""

    name: Label


class EnvVar(_Field):
    """One variable of the engine's environment."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Text = ""


class Parallelism(_Field):
    """How one replica is spread: devices of a slot by `tensor`, slots by `pipeline`; with `expert` the experts of a
    mixture are dealt over the devices of a slot, and not each cut into slices. `data` is 1, and refused above instead
    of pruned in silence: each replica is one rank of that kind, and their number is `spec.replicas`."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    pipeline: Annotated[int, Field(ge=1, le=256)] = 1
    data: Annotated[int, Field(ge=1, le=1)] = 1
    expert: bool = False


class Bounds(_Field):
    """Within which every writer's number is taken."""

    min_replicas: Number = 0
    max_replicas: Number = 64


class Guardians(_Field):
    """How many dormant instances stand by, what they keep (a host copy of the weights, 1, or nothing, 2), whether
    replicas and guardians of the model keep off nodes that have one of them, and how many engines of whatever models a
    device may hold where one of this model is (one of them awake)."""

    replicas: Number = 0
    level: Annotated[int, Field(ge=1, le=2)] = 2
    spread: Literal["None", "Preferred", "Required"] = "None"
    max_per_device: Annotated[int, Field(ge=1, le=64)] = 1


class Start(_Field):
    """How a missing replica comes to exist, and how long that may take."""

    mode: Literal["Auto", "Guardian", "Lazy", "Normal", "Cold"] = "Auto"
    deadline_seconds: Seconds = 900.0
    wake_deadline_seconds: Seconds = 60.0
    warm_up_requests: Annotated[int, Field(ge=0, le=64)] = 2


class ScaleToZero(_Field):
    """When the last replica goes, and what it leaves behind."""

    idle_seconds: Seconds | None = None
    keep: Literal["Guardian", "Nothing"] = "Guardian"


class Scaling(_Field):
    """How many requests at once a replica is for, held ones included."""

    requests_per_replica: Annotated[int, Field(ge=1, le=100_000)] = 8


class Burst(_Field):
    """How far guardians are woken above the number while demand asks for it (0: never), and how long each stays."""

    max_replicas: Number = 0
    hold_seconds: Seconds = 60.0


class Autoscaler(_Field):
    """How long the built-in autoscaler looks back before it lowers the number; `writer: Autoscaler` turns it on."""

    window_seconds: Seconds = 60.0


class Sources(_Field):
    """Where weights may be read from (empty for everywhere), whether between nodes over TLS alone, and how many bytes a
    second may be read of each engine that is started from now on (0: as the node's agent allows)."""

    allow: Annotated[list[Wire], Field(max_length=16)] = []
    encrypt: bool = False
    max_bytes_per_second: Annotated[int, Field(ge=0, le=1 << 50)] = 0


class Drain(_Field):
    """How long requests may finish before sleep or stop."""

    timeout_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    on_timeout: Literal["Abort", "Wait"] = "Abort"


class Proof(_Field):
    """What a replica's canary is held to before it is routed to: how many tokens, each equal to the source's, and by
    how many nats their log-probabilities may differ."""

    tokens: Annotated[int, Field(ge=1, le=64)] = 1
    tolerance_nats: Annotated[float, Field(gt=0, le=10)] = 0.05


class RollingStrategy(_Field):
    """How replicas of an earlier specification are replaced."""

    max_surge: Number = 1
    max_unavailable: Number = 0


class ModelDeploymentSpec(_Field):
    """A model, and how many replicas of it there shall be."""

    model: Model
    runtime_ref: Ref
    pool_ref: Ref
    args: Annotated[list[Text], Field(max_length=512)] = []
    env: Annotated[list[EnvVar], Field(max_length=512)] = []
    parallelism: Parallelism = Parallelism()
    memory_mebibytes: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    replicas: Number = 0
    writer: Writer = Writer.ANY
    bounds: Bounds = Bounds()
    guardians: Guardians = Guardians()
    start: Start = Start()
    scaling: Scaling = Scaling()
    burst: Burst = Burst()
    autoscaler: Autoscaler = Autoscaler()
    scale_to_zero: ScaleToZero = ScaleToZero()
    sources: Sources = Sources()
    host_copies: Annotated[int, Field(ge=0, le=64)] = 1
    share_host_copies: bool = False
    drain: Drain = Drain()
    proof: Proof = Proof()
    strategy: RollingStrategy = RollingStrategy()
    paused: bool = False
    priority_class_name: Annotated[str, Field(max_length=253)] = ""


class Slot(_Field):
    """What one slot pod asks for: devices by an extended resource, or by a resource claim's template."""

    devices: Annotated[int, Field(ge=1, le=64)] = 1
    resource_name: Annotated[str, Field(max_length=317, pattern=r"^([a-z0-9.-]+/[A-Za-z0-9._-]+)?$")] = ""
    resource_claim_template_name: Annotated[str, Field(max_length=253)] = ""


class DevicePoolSpec(_Field):
    """Slot pods of one kind: how many, what each asks for, and whose models may run there."""

    replicas: Number = 0
    slot: Slot = Slot()
    runtime_ref: Ref
    pod_template: Annotated[dict[str, Any], Field(json_schema_extra=_OPEN)] = {}
    agent_config: Annotated[dict[str, Any], Field(json_schema_extra=_OPEN)] = {}
    """Settings of this pool's agents, each in place of what their `agent.json` says."""
    allowed_models: Annotated[list[Label], Field(max_length=256)] = []


class EngineRuntimeSpec(_Field):
    """An engine and the image that it comes in; arguments and environment go before those of each model."""

    engine: Annotated[str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    image: Text = ""
    args: Annotated[list[Text], Field(max_length=512)] = []
    env: Annotated[list[EnvVar], Field(max_length=512)] = []


class Condition(_Field):
    """As Kubernetes writes conditions."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(max_length=1024)] = ""
    message: Annotated[str, Field(max_length=32_768)] = ""
    last_transition_time: str = ""
    observed_generation: int = 0


class GuardiansStatus(_Field):
    """Guardians wanted and there; starts that woke one, and starts that found none."""

    desired: int = 0
    ready: int = 0
    hits: int = 0
    misses: int = 0


class LastScale(_Field):
    """The last change of the number: who, why, and the operation that tells how it went."""

    from_: Annotated[int, Field(alias="from")] = 0
    to: int = 0
    by: str = ""
    reason: str = ""
    operation: str = ""


class LastStart(_Field):
    """One of the last starts."""

    instance: str = ""
    mode: str = ""
    seconds: float = 0.0
    predicted_seconds: float | None = None
    ok: bool = False
    reason: str = ""


class ModelDeploymentStatus(_Field):
    """How a model stands."""

    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    waking_replicas: int = 0
    starting_replicas: int = 0
    draining_replicas: int = 0
    selector: str = ""
    guardians: GuardiansStatus = GuardiansStatus()
    current_revision: str = ""
    update_revision: str = ""
    next_ready_seconds: float | None = None
    last_scale: LastScale | None = None
    last_starts: Annotated[list[LastStart], Field(max_length=16)] = []
    guardian_safe: bool | None = None
    conditions: Annotated[list[Condition], Field(max_length=32)] = []


class SlotCounts(_Field):
    """Slots whose agent is attached, those of them without a replica, and those that are still to come."""

    ready: int = 0
    idle: int = 0
    pending: int = 0


class DevicePoolStatus(_Field):
    """How a pool stands."""

    observed_generation: int = 0
    replicas: int = 0
    slots: SlotCounts = SlotCounts()
    selector: str = ""
    conditions: Annotated[list[Condition], Field(max_length=32)] = []


class EngineRuntimeStatus(_Field):
    """What agents report of an engine."""

    observed_generation: int = 0
    version: str = ""
    capabilities: Annotated[list[str], Field(max_length=64)] = []
    conditions: Annotated[list[Condition], Field(max_length=32)] = []


def to_enum(text: str) -> str:
    """A resource's word as the records have it: `PeerShm` is `peer_shm`."""
    return "".join(f"_{c.lower()}" if c.isupper() and n else c.lower() for n, c in enumerate(text))


MODES = {to_enum(word): Mode(to_enum(word)) for word in ("Auto", "Guardian", "Lazy", "Normal", "Cold")}
RUNGS = {word: RungKind(to_enum(word)) for word in get_args(Wire)}
SPREADS = {word: Spread(to_enum(word)) for word in ("None", "Preferred", "Required")}
KEEPS = {"Guardian": Keep.GUARDIAN, "Nothing": Keep.NOTHING}
ON_TIMEOUT = {"Abort": OnTimeout.ABORT, "Wait": OnTimeout.WAIT}

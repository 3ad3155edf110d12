"""What an owner may write of a model, with every bound: the body of REST requests and of the configuration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from relight.core.errors import Conflict
from relight.core.records import (
    Adapter,
    Autoscaler,
    Burst,
    Drain,
    Guardians,
    Keep,
    Mode,
    ModelSpec,
    OnTimeout,
    Proving,
    RungKind,
    ScaleToZero,
    Scaling,
    Spread,
    Storage,
    Strategy,
)

_NAME = "[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?"
NAME_PATTERN = f"^{_NAME}$"
POOL_PATTERN = f"^({_NAME}/{_NAME})?$"
ADAPTER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$"
WEIGHTS_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors"
STORAGE_PATTERN = r"https?://[^/@?#\s]+(/[^@#\s]*)?"
MAX_REPLICAS = 10_000


def _whole(value: Any) -> Any:
    """JSON's own integers, 2.0 among them; neither text nor truth values."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("Input should be a whole number")


# Outermost, so that the bounds stay on the integer and in its schema.
Whole = BeforeValidator(_whole)
Count = Annotated[int, Field(ge=0, le=MAX_REPLICAS), Whole]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False, strict=True)]
# A NUL would end an argument early on its way to the process.
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
NonEmpty = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
Rungs = Annotated[list[RungKind], Field(min_length=1, max_length=len(RungKind))]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GuardiansBody(_Body):
    """How many dormant instances stand by, at which sleep level, and how many engines of whatever models a device may
    hold where one of this model is (one of them awake)."""

    replicas: Count = 0
    level: Annotated[int, Field(ge=1, le=2), Whole] = 2
    spread: Spread = Spread.NONE
    max_per_device: Annotated[int, Field(ge=1, le=64), Whole] = 1


class ScaleToZeroBody(_Body):
    """When the last replica goes, and what it leaves behind."""

    idle_seconds: Seconds | None = None
    keep: Keep = Keep.GUARDIAN


class DrainBody(_Body):
    """How long requests may finish before sleep or stop."""

    timeout_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False, strict=True)] = 30.0
    on_timeout: OnTimeout = OnTimeout.ABORT


class StrategyBody(_Body):
    """How replicas of an earlier specification are replaced: how many above the number meanwhile, how many below it.

    Not both 0: no replica could ever be replaced.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "anyOf": [
                {"properties": {"max_surge": {"minimum": 1}}},
                {"properties": {"max_unavailable": {"minimum": 1}}, "required": ["max_unavailable"]},
            ]
        },
    )
    max_surge: Count = 1
    max_unavailable: Count = 0
    paused: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _goes_on(self) -> StrategyBody:
        if not self.max_surge and not self.max_unavailable:
            raise ValueError("max_surge and max_unavailable must not both be 0")
        return self


class StorageBody(_Body):
    """Where the files of weights lie in remote storage. A query goes with every request, and is in no log; who may read
    the model reads it, as its environment."""

    uri: Annotated[str, Field(max_length=4096, pattern=f"^{STORAGE_PATTERN}$")]
    sha256: Annotated[
        dict[
            Annotated[str, Field(pattern=f"^{WEIGHTS_PATTERN}$")],
            Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")],
        ],
        Field(max_length=4096, json_schema_extra={"additionalProperties": False}),
    ] = {}


class ScalingBody(_Body):
    """How many requests at once a replica is for, held ones included."""

    requests_per_replica: Annotated[int, Field(ge=1, le=100_000), Whole] = 8


class BurstBody(_Body):
    """How far guardians are woken above the number while demand asks for it (0: never), and how long each stays."""

    max_replicas: Count = 0
    hold_seconds: Seconds = 60.0


class AutoscalerBody(_Body):
    """Whether the built-in autoscaler writes the number, and how long it looks back before it lowers it."""

    enabled: Annotated[bool, Field(strict=True)] = False
    window_seconds: Seconds = 60.0


class ProofBody(_Body):
    """What a replica's canary is held to: how many tokens, each equal to the source's, and by how many nats their
    log-probabilities may differ."""

    tokens: Annotated[int, Field(ge=1, le=64), Whole] = 1
    tolerance_nats: Annotated[float, Field(gt=0, le=10)] = 0.05


class AdapterBody(_Body):
    """A low-rank adapter that every replica serves beside its model, under a name of its own."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=ADAPTER_PATTERN)]
    uri: NonEmpty


class ModelBody(_Body):
    """One model as its owner asks for it; its name and namespace stand in the path."""

    uri: NonEmpty
    revision: NonEmpty
    engine: NonEmpty
    served_names: Annotated[list[NonEmpty], Field(max_length=64)] = []
    args: Annotated[list[Text], Field(max_length=512)] = []
    env: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)], Text],
        # Without it the document would allow other names beside those of the pattern.
        Field(max_length=512, json_schema_extra={"additionalProperties": False}),
    ] = {}
    members: Annotated[int, Field(ge=1, le=256), Whole] = 1
    devices_per_member: Annotated[int, Field(ge=1, le=64), Whole] = 1
    memory_bytes: Annotated[int, Field(ge=0, le=1 << 50), Whole] = 0
    replicas: Count = 0
    min_replicas: Count = 0
    max_replicas: Count = 64
    guardians: GuardiansBody = GuardiansBody()
    mode: Mode = Mode.AUTO
    scale_to_zero: ScaleToZeroBody = ScaleToZeroBody()
    rungs: Rungs = list(RungKind)
    drain: DrainBody = DrainBody()
    start_deadline_seconds: Seconds = 900.0
    wake_deadline_seconds: Seconds = 60.0
    host_copies: Annotated[int, Field(ge=0, le=64), Whole] = 1
    strategy: StrategyBody = StrategyBody()
    pool: Annotated[str, Field(max_length=127, pattern=POOL_PATTERN)] = ""
    share_host_copies: Annotated[bool, Field(strict=True)] = False
    warm_up_requests: Annotated[int, Field(ge=0, le=64), Whole] = 2
    storage: StorageBody | None = None
    scaling: ScalingBody = ScalingBody()
    burst: BurstBody = BurstBody()
    autoscaler: AutoscalerBody = AutoscalerBody()
    priority: Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000), Whole] = 0
    encrypt: Annotated[bool, Field(strict=True)] = False
    source_rate: Annotated[int, Field(ge=1, le=1 << 50), Whole] | None = None
    expert_parallel: Annotated[bool, Field(strict=True)] = False
    proof: ProofBody = ProofBody()
    adapters: Annotated[list[AdapterBody], Field(max_length=64)] = []

    def spec(self, namespace: str, name: str) -> ModelSpec:
        """As the shared record. Raises Conflict for an adapter whose name is another's, or the model's own."""
        served, adapters = {name, *self.served_names}, [a.name for a in self.adapters]
        if len(served | set(adapters)) < len(served) + len(adapters):
            raise Conflict(f"adapters of {name} need names that are neither its own nor served ones: {adapters}")
        return ModelSpec(
            namespace=namespace,
            name=name,
            uri=self.uri,
            revision=self.revision,
            engine=self.engine,
            served_names=tuple(self.served_names),
            args=tuple(self.args),
            env=dict(self.env),
            members=self.members,
            devices_per_member=self.devices_per_member,
            memory_bytes=self.memory_bytes,
            replicas=self.replicas,
            max_replicas=self.max_replicas,
            guardians=Guardians(
                self.guardians.replicas, self.guardians.level, self.guardians.spread, self.guardians.max_per_device
            ),
            mode=self.mode,
            scale_to_zero=ScaleToZero(self.scale_to_zero.idle_seconds, self.scale_to_zero.keep),
            rungs=tuple(dict.fromkeys(self.rungs)),
            drain=Drain(self.drain.timeout_seconds, self.drain.on_timeout),
            start_deadline_seconds=self.start_deadline_seconds,
            wake_deadline_seconds=self.wake_deadline_seconds,
            host_copies=self.host_copies,
            strategy=Strategy(self.strategy.max_surge, self.strategy.max_unavailable, self.strategy.paused),
            pool=self.pool,
            min_replicas=self.min_replicas,
            share_host_copies=self.share_host_copies,
            warm_up_requests=self.warm_up_requests,
            storage=Storage(self.storage.uri, dict(self.storage.sha256)) if self.storage else None,
            scaling=Scaling(self.scaling.requests_per_replica),
            burst=Burst(self.burst.max_replicas, self.burst.hold_seconds),
            autoscaler=Autoscaler(self.autoscaler.enabled, self.autoscaler.window_seconds),
            priority=self.priority,
            encrypt=self.encrypt,
            source_rate=self.source_rate,
            expert_parallel=self.expert_parallel,
            proof=Proving(self.proof.tokens, self.proof.tolerance_nats),
            adapters=tuple(Adapter(a.name, a.uri) for a in self.adapters),
        )

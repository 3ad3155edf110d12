"""From resources to the records that deciding and planning take. Pure: objects in, records or field errors out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from relight.controller.kubernetes import resources
from relight.controller.kubernetes.api import Object
from relight.controller.kubernetes.resources import (
    KEEPS,
    ON_TIMEOUT,
    RUNGS,
    SPREADS,
    DevicePoolSpec,
    EngineRuntimeSpec,
    ModelDeploymentSpec,
    Writer,
    to_enum,
)
from relight.core.errors import FieldError, InvalidInput
from relight.core.records import (
    Adapter,
    Autoscaler,
    Burst,
    Drain,
    Guardians,
    Mode,
    ModelSpec,
    Proving,
    RungKind,
    ScaleToZero,
    Scaling,
    Storage,
    Strategy,
)
from relight.protos.settings import wrong_fields

B = TypeVar("B", bound=BaseModel)


def model_spec(
    found: Object,
    runtimes: Mapping[str, Object],
    pools: Mapping[str, Object],
    priorities: Mapping[str, Object] | None = None,
) -> ModelSpec:
    """A ModelDeployment with its runtime, pool and PriorityClass as a record.

    The maps are by `namespace/name`; `priorities`, which are the cluster's, by name. Raises InvalidInput naming every
    field that is wrong, whatever the server's schema let through.
    """
    namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
    spec = _parsed(found, ModelDeploymentSpec)
    wrong = list(_broken_rules(name, spec))
    runtime_key, pool_key = f"{namespace}/{spec.runtime_ref.name}", f"{namespace}/{spec.pool_ref.name}"
    runtime = pool = None
    if runtime_key in runtimes:
        runtime = _parsed(runtimes[runtime_key], EngineRuntimeSpec)
    else:
        wrong.append(FieldError("spec.runtimeRef.name", f"an EngineRuntime of {namespace}", spec.runtime_ref.name))
    if pool_key in pools:
        pool = _parsed(pools[pool_key], DevicePoolSpec)
        if pool.allowed_models and name not in pool.allowed_models:
            expected = f"a pool that allows {name} (allowedModels)"
            wrong.append(FieldError("spec.poolRef.name", expected, spec.pool_ref.name))
        if pool.slot.devices < spec.parallelism.tensor:
            expected = f"at most the {pool.slot.devices} devices of a slot of pool {spec.pool_ref.name}"
            wrong.append(FieldError("spec.parallelism.tensor", expected, str(spec.parallelism.tensor)))
    else:
        wrong.append(FieldError("spec.poolRef.name", f"a DevicePool of {namespace}", spec.pool_ref.name))
    priority = (priorities or {}).get(spec.priority_class_name)
    if spec.priority_class_name and priority is None:
        wrong.append(FieldError("spec.priorityClassName", "a PriorityClass of the cluster", spec.priority_class_name))
    if wrong or runtime is None:
        raise InvalidInput(f"ModelDeployment {namespace}/{name} cannot be run", wrong)
    return ModelSpec(
        namespace=namespace,
        name=name,
        uri=spec.model.uri,
        revision=spec.model.revision,
        engine=runtime.engine,
        served_names=tuple(spec.model.served_names),
        args=(*runtime.args, *spec.args),
        env={v.name: v.value for v in (*runtime.env, *spec.env)},
        members=spec.parallelism.pipeline,
        devices_per_member=spec.parallelism.tensor,
        memory_bytes=spec.memory_mebibytes << 20,
        replicas=spec.replicas,
        min_replicas=spec.bounds.min_replicas,
        max_replicas=spec.bounds.max_replicas,
        guardians=Guardians(
            spec.guardians.replicas,
            spec.guardians.level,
            SPREADS[spec.guardians.spread],
            spec.guardians.max_per_device,
        ),
        mode=Mode(to_enum(spec.start.mode)),
        scale_to_zero=ScaleToZero(spec.scale_to_zero.idle_seconds, KEEPS[spec.scale_to_zero.keep]),
        rungs=tuple(dict.fromkeys(RUNGS[w] for w in spec.sources.allow)) or tuple(RungKind),
        drain=Drain(spec.drain.timeout_seconds, ON_TIMEOUT[spec.drain.on_timeout]),
        start_deadline_seconds=spec.start.deadline_seconds,
        wake_deadline_seconds=spec.start.wake_deadline_seconds,
        host_copies=spec.host_copies,
        share_host_copies=spec.share_host_copies,
        warm_up_requests=spec.start.warm_up_requests,
        storage=_storage(spec.model.storage),
        strategy=Strategy(spec.strategy.max_surge, spec.strategy.max_unavailable, spec.paused),
        pool=pool_key,
        priority=int(priority.get("value") or 0) if priority else 0,
        encrypt=spec.sources.encrypt,
        source_rate=spec.sources.max_bytes_per_second or None,
        scaling=Scaling(spec.scaling.requests_per_replica),
        burst=Burst(spec.burst.max_replicas, spec.burst.hold_seconds),
        expert_parallel=spec.parallelism.expert,
        adapters=tuple(Adapter(a.name, a.uri) for a in spec.model.adapters),
        proof=Proving(spec.proof.tokens, spec.proof.tolerance_nats),
        autoscaler=Autoscaler(spec.writer is Writer.AUTOSCALER, spec.autoscaler.window_seconds),
    )


def _storage(storage: resources.Storage) -> Storage | None:
    return Storage(storage.uri, {f.name: f.sha256 for f in storage.files}) if storage.uri else None


def pool_spec(found: Object, runtimes: Mapping[str, Object]) -> tuple[DevicePoolSpec, EngineRuntimeSpec]:
    """A DevicePool's fields and its runtime's. Raises InvalidInput naming every field that is wrong."""
    namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
    spec = _parsed(found, DevicePoolSpec)
    slot, wrong = spec.slot, []
    if bool(slot.resource_name) == bool(slot.resource_claim_template_name):
        got = f"{slot.resource_name!r} and {slot.resource_claim_template_name!r}"
        wrong.append(FieldError("spec.slot", "resourceName or resourceClaimTemplateName, and not both", got))
    runtime = runtimes.get(f"{namespace}/{spec.runtime_ref.name}")
    if runtime is None:
        wrong.append(FieldError("spec.runtimeRef.name", f"an EngineRuntime of {namespace}", spec.runtime_ref.name))
    if wrong or runtime is None:
        raise InvalidInput(f"DevicePool {namespace}/{name} cannot be made", wrong)
    return spec, _parsed(runtime, EngineRuntimeSpec)


def _parsed(found: Object, fields: type[B]) -> B:
    try:
        return fields.model_validate(found.get("spec") or {})
    except ValidationError as error:
        what = f"{found.get('kind', fields.__name__)} {found['metadata'].get('name', '')}"
        raise InvalidInput(f"{what} is not valid", wrong_fields(error)) from None


def _broken_rules(name: str, spec: ModelDeploymentSpec) -> Iterator[FieldError]:
    """What the definitions say in CEL (definitions.py), for servers that have none."""
    low, high = spec.bounds.min_replicas, spec.bounds.max_replicas
    if low > high:
        yield FieldError("spec.bounds.minReplicas", f"at most bounds.maxReplicas, {high}", str(low))
    if not spec.strategy.max_surge and not spec.strategy.max_unavailable:
        yield FieldError("spec.strategy", "maxSurge or maxUnavailable above 0", "both 0")
    served, adapters = {name, *spec.model.served_names}, [a.name for a in spec.model.adapters]
    if len(served | set(adapters)) < len(served) + len(adapters):
        expected = "a name for each adapter that is not the model's or one of servedNames"
        yield FieldError("spec.model.adapters", expected, ", ".join(adapters))
    if spec.scale_to_zero.idle_seconds is not None and low:
        yield FieldError("spec.bounds.minReplicas", "0 where scaleToZero.idleSeconds is set", str(low))

"""Routes of models and of their number: read, write, delete, scale, dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response

from relight.controller.api.callers import Anybody, Caller, needs
from relight.controller.api.doctor import judge
from relight.controller.api.parts import ModelName, Namespace, Parts, Running
from relight.controller.api.problems import AsciiJson, documented
from relight.controller.api.schemas import AutoscalerOut, Cursor, Limit, ModelOut, Page, ScaleBody, paginate
from relight.controller.doctor.case import Severity
from relight.controller.specs import ModelBody
from relight.controller.state.base import ABSENT
from relight.core.auth import Identity
from relight.core.errors import NotFound
from relight.core.records import Desired, InstanceView, Operation, Plan, ScaleRequest
from relight.core.states import COMING, State
from relight.core.tenants import tenant

router = APIRouter(prefix="/api/v1/namespaces/{namespace}/models", tags=["models"])

IfMatch = Annotated[
    str,
    Header(
        alias="If-Match",
        max_length=256,
        pattern=r"^[\x20-\x7e]*$",
        description="Only if the model has this ETag; `*`: only if it exists",
    ),
]


Lister = Annotated[Identity, Depends(needs("list"))]
Reader = Annotated[Identity, Depends(needs("get"))]
Updater = Annotated[Identity, Depends(needs("update"))]
Deleter = Annotated[Identity, Depends(needs("delete"))]
Scaler = Annotated[Identity, Depends(needs("patch", "scale"))]


class DryRun(StrEnum):
    """What is only tried out."""

    SERVER = "server"


def _etag(revision: int) -> str:
    return f'"{revision}"'


def _precondition(if_match: str) -> Callable[[int], bool]:
    if not if_match:
        return lambda _: True
    tags = {tag.strip() for tag in if_match.split(",")}
    return lambda revision: revision != ABSENT and ("*" in tags or _etag(revision) in tags)


def _show(parts: Parts, key: str, *, judged: bool = True) -> ModelOut:
    stored = parts.catalog.models.get(key)
    if stored is None:
        raise NotFound(f"there is no model {key}")
    own = [i for i in parts.reconciler.snapshot().instances if i.model == key and not i.remembered]
    return ModelOut(
        spec=stored.record.spec,
        revision=stored.revision,
        changed_at=stored.record.changed_at,
        ready=sum(i.state is State.READY and i.desired is Desired.READY for i in own),
        coming=sum(_coming(i) for i in own),
        dormant=sum(i.state is State.DORMANT and i.desired is Desired.DORMANT for i in own),
        demand=parts.reconciler.gateways.demand(key),
        warnings=[
            f"{finding.severity}: {finding.title}: {finding.evidence}"
            for finding in judge(parts, stored.record.spec)
            if finding.severity is not Severity.ADVICE
        ]
        if judged
        else None,
    )


def _coming(instance: InstanceView) -> bool:
    states = COMING | {State.DORMANT, State.SLEEPING}
    return instance.desired is Desired.READY and instance.state in states


async def _only_seen(caller: Caller, made: Plan) -> Plan:
    """Of a plan, which is always of the whole fleet, what is of models that the caller may see."""
    keys = {d.model for d in made.decisions} | {p.model for p in made.placements}
    seen = await caller.within("list", {tenant(key) for key in keys})
    return replace(
        made,
        decisions=tuple(d for d in made.decisions if tenant(d.model) in seen),
        placements=tuple(p for p in made.placements if tenant(p.model) in seen),
        unplaced=tuple(u for u in made.unplaced if tenant(u) in seen),
    )


@router.get("", responses=documented(422), response_model=Page[ModelOut])
async def list_models(
    namespace: Namespace, identity: Lister, parts: Running, limit: Limit = 100, cursor: Cursor = ""
) -> Any:
    """The models of a namespace."""
    found = sorted((k, k) for k in parts.catalog.models if k.partition("/")[0] == namespace)
    return paginate(found, limit, cursor, lambda key: _show(parts, key, judged=False))


@router.get("/{name}", responses=documented(404, 422), response_model=ModelOut)
async def get_model(namespace: Namespace, name: ModelName, identity: Reader, parts: Running, response: Response) -> Any:
    """One model. Its ETag is for a later If-Match."""
    shown = _show(parts, f"{namespace}/{name}")
    response.headers["ETag"] = _etag(shown.revision)
    return shown


@router.put(
    "/{name}",
    responses=documented(400, 409, 412, 422) | {201: {"model": ModelOut, "description": "The model is new"}},
    response_model=ModelOut,
)
async def put_model(
    namespace: Namespace,
    name: ModelName,
    body: ModelBody,
    identity: Updater,
    parts: Running,
    response: Response,
    if_match: IfMatch = "",
) -> Any:
    """Writes a model whole, its number included."""
    spec = body.spec(namespace, name)
    revision, new = await parts.accept.put_model(spec, _precondition(if_match))
    response.status_code = 201 if new else 200
    response.headers["ETag"] = _etag(revision)
    return _show(parts, spec.key)


@router.delete("/{name}", responses=documented(404, 409, 412, 422), status_code=204)
async def delete_model(
    namespace: Namespace, name: ModelName, identity: Deleter, parts: Running, if_match: IfMatch = ""
) -> None:
    """Deletes a model; its instances are drained, then ended."""
    await parts.accept.delete_model(f"{namespace}/{name}", _precondition(if_match))


@router.get("/{name}/autoscaler", responses=documented(404, 422), response_model=AutoscalerOut)
async def get_autoscaler(namespace: Namespace, name: ModelName, identity: Reader, parts: Running) -> Response:
    """What the built-in autoscaler decided of a model of late, and why; the newest first."""
    key = f"{namespace}/{name}"
    stored = parts.catalog.models.get(key)
    if stored is None:
        raise NotFound(f"there is no model {key}")
    entries = [asdict(entry) for entry in reversed(parts.autoscaler.logs.get(key, ()))]
    return AsciiJson({"enabled": stored.record.spec.autoscaler.enabled, "decisions": entries})


@router.put(
    "/{name}/scale",
    responses=documented(400, 404, 409, 422) | {200: {"model": Plan, "description": "The plan of a dry run"}},
    response_model=Operation,
    status_code=202,
)
async def scale_model(
    namespace: Namespace,
    name: ModelName,
    body: ScaleBody,
    identity: Scaler,
    caller: Anybody,
    parts: Running,
    request: Request,
    idempotency_key: Annotated[
        str,
        Header(
            alias="Idempotency-Key",
            min_length=1,
            max_length=256,
            pattern=r"^[\x21-\x7e]+$",
            description="A repeat with the same key and body answers the same operation",
        ),
    ] = "",
    dry_run: Annotated[
        DryRun | SkipJsonSchema[None], Query(description="`server`: answer the plan, change nothing")
    ] = None,
) -> Response:
    """Changes how many replicas there shall be; the operation says when they are."""
    asked = ScaleRequest(
        model=f"{namespace}/{name}",
        replicas=body.replicas,
        by=identity.name,
        received_at=request.state.received_at,
        idempotency_key=idempotency_key,
        rungs=tuple(dict.fromkeys(body.rungs or ())),
    )
    if dry_run is not None:
        return AsciiJson(asdict(await _only_seen(caller, parts.accept.preview(asked))))
    operation = await parts.accept.scale(asked)
    return AsciiJson(asdict(operation), 202, {"Location": f"/api/v1/operations/{operation.id}"})

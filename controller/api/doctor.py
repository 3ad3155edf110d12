"""Route of the doctor: what could be better of models and slots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from relight.controller.api.callers import Anybody, needs, only_seen
from relight.controller.api.parts import ModelName, Namespace, Parts, Running
from relight.controller.api.problems import documented
from relight.controller.api.schemas import Cursor, Limit, Page, paginate
from relight.controller.doctor.case import Finding
from relight.controller.doctor.fleet import judge_fleet, model_case
from relight.controller.doctor.judge import judge_model
from relight.controller.doctor.suggest import Suggestion, suggest
from relight.controller.observe.shapes import present
from relight.core.auth import Identity
from relight.core.errors import NotFound
from relight.core.records import ModelSpec

router = APIRouter(prefix="/api/v1", tags=["doctor"])


def judge(parts: Parts, spec: ModelSpec) -> tuple[Finding, ...]:
    """What could be better of one model."""
    starts = [v.record for v in parts.catalog.starts.values()]
    return judge_model(model_case(spec, parts.reconciler.snapshot(), starts))


@router.get("/doctor", responses=documented(404, 422), response_model=Page[Finding])
async def list_findings(
    caller: Anybody,
    parts: Running,
    limit: Limit = 100,
    cursor: Cursor = "",
    model: Annotated[str, Query(max_length=127, description="Only of this model, as namespace/name")] = "",
) -> Any:
    """What could be better of models and slots, with the evidence, what it costs and what to do; the worst first."""
    snapshot = parts.reconciler.snapshot()
    specs = await only_seen(caller, [v.record.spec for v in parts.catalog.models.values()], lambda s: s.key)
    if model and model not in [spec.key for spec in specs]:
        raise NotFound(f"there is no model {model}")
    slots = {s.slot for s in await only_seen(caller, snapshot.slots, lambda s: s.pool)}
    found = judge_fleet(snapshot, [v.record for v in parts.catalog.starts.values()], specs)
    models = {spec.key for spec in specs}
    shown = [f for f in found if (f.about == model if model else f.about in models or f.about in slots)]
    return paginate([(f"{n:06}", f) for n, f in enumerate(shown)], limit, cursor, asdict)


@router.get(
    "/namespaces/{namespace}/models/{name}/suggestions", responses=documented(404, 422), response_model=Page[Suggestion]
)
async def list_suggestions(
    namespace: Namespace,
    name: ModelName,
    identity: Annotated[Identity, Depends(needs("get"))],
    parts: Running,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> Any:
    """What a model's own record speaks for changing, with what it rests on. Nothing is applied."""
    stored = parts.catalog.models.get(f"{namespace}/{name}")
    if stored is None:
        raise NotFound(f"there is no model {namespace}/{name}")
    spec, snapshot = stored.record.spec, parts.reconciler.snapshot()
    starts = [v.record for v in parts.catalog.starts.values()]
    shapes = parts.catalog.shapes.get(spec.key)
    kind = model_case(spec, snapshot, starts).kind
    found = suggest(spec, kind, starts, present(snapshot, spec.key, shapes.record if shapes else None))
    return paginate([(s.setting, s) for s in sorted(found, key=lambda s: s.setting)], limit, cursor, asdict)

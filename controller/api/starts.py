"""Routes of the flight recorder: starts, where their time went, why they were so, and what other tools can open."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from relight.controller.api.callers import Anybody, Caller, needs, only_seen
from relight.controller.api.parts import Id, ModelName, Namespace, Parts, Running
from relight.controller.api.problems import AsciiJson, documented
from relight.controller.api.schemas import Cursor, Limit, Page, paginate
from relight.controller.flight.compare import Comparison, compare
from relight.controller.flight.explain import Explanation, explain, newest_of_each
from relight.controller.flight.timeline import Timeline
from relight.controller.flight.traces import chrome, otlp
from relight.core.auth import Identity
from relight.core.errors import NotFound

router = APIRouter(prefix="/api/v1", tags=["starts"])


@dataclass(frozen=True, slots=True)
class ComparedTimeline(Timeline):
    """A timeline, and what became slower since the last good start like it."""

    comparison: Comparison | None = None


Reader = Annotated[Identity, Depends(needs("get"))]


def _starts(parts: Parts) -> list[Timeline]:
    return [v.record for v in parts.catalog.starts.values()]


async def _newest(caller: Caller, parts: Parts, instance: str) -> Timeline:
    found = await only_seen(caller, (t for t in _starts(parts) if t.instance == instance), lambda t: t.model)
    if not found:
        raise NotFound(f"no start of {instance} is recorded")
    return max(found, key=lambda t: t.ended_at)


def _by_age(timeline: Timeline) -> str:
    """A key that grows with age, so that pages go from the newest to the oldest."""
    return f"{1e12 - timeline.ended_at:020.6f}-{timeline.id}"


@router.get("/starts", responses=documented(422), response_model=Page[Timeline])
async def list_starts(
    caller: Anybody,
    parts: Running,
    limit: Limit = 100,
    cursor: Cursor = "",
    operation: Annotated[str, Query(max_length=63, description="Only those of this operation")] = "",
) -> Any:
    """Timelines of starts and wakes, newest first."""
    seen = await only_seen(caller, _starts(parts), lambda t: t.model)
    found = [(_by_age(t), t) for t in seen if operation in ("", t.operation)]
    return AsciiJson(paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, asdict))


@router.get("/instances/{id}/timeline", responses=documented(404, 422), response_model=ComparedTimeline)
async def get_timeline(id: Id, caller: Anybody, parts: Running) -> Response:
    """The newest start of an instance, and what became slower since the last good one like it."""
    timeline = await _newest(caller, parts, id)
    return AsciiJson({**asdict(timeline), "comparison": asdict(compare(timeline, _starts(parts)))})


@router.get("/instances/{id}/timeline/chrome", responses=documented(404, 422), response_model=dict[str, Any])
async def get_chrome_trace(id: Id, caller: Anybody, parts: Running) -> Response:
    """The newest start of an instance as Chrome trace events: open it in Perfetto."""
    return AsciiJson(chrome([await _newest(caller, parts, id)]))


@router.get("/instances/{id}/timeline/otlp", responses=documented(404, 422), response_model=dict[str, Any])
async def get_otlp_trace(id: Id, caller: Anybody, parts: Running) -> Response:
    """The newest start of an instance as OTLP/JSON spans, as collectors take them at /v1/traces."""
    return AsciiJson(otlp([await _newest(caller, parts, id)]))


@router.get("/instances/{id}/explanation", responses=documented(404, 422), response_model=Explanation)
async def explain_instance(id: Id, caller: Anybody, parts: Running) -> Response:
    """Why an instance came up the way it did, and what the other modes would have cost."""
    return AsciiJson(asdict(explain(await _newest(caller, parts, id), _starts(parts))))


@router.get(
    "/namespaces/{namespace}/models/{name}/explanations",
    responses=documented(404, 422),
    response_model=Page[Explanation],
)
async def explain_model(
    namespace: Namespace, name: ModelName, identity: Reader, parts: Running, limit: Limit = 100, cursor: Cursor = ""
) -> Response:
    """The same of each instance of a model that is there, by its newest start, newest first."""
    key = f"{namespace}/{name}"
    if key not in parts.catalog.models:
        raise NotFound(f"there is no model {key}")
    starts = _starts(parts)
    present = {i.instance for i in parts.reconciler.snapshot().instances if i.model == key and not i.remembered}
    found = [(_by_age(t), t) for t in newest_of_each(t for t in starts if t.instance in present)]
    return AsciiJson(paginate(found, limit, cursor, lambda timeline: asdict(explain(timeline, starts))))

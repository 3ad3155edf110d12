"""The REST application, put together from its rooms, and its OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from relight.controller.api import (
    cache,
    capabilities,
    doctor,
    events,
    fleet,
    models,
    operations,
    problems,
    starts,
    system,
)
from relight.controller.api.callers import Callers
from relight.controller.api.middleware import OPEN_PATHS, Gate
from relight.controller.api.parts import Parts

VERSION = "0.1.0"


def _routes() -> FastAPI:
    """The routes and how their errors leave, with no controller behind them."""
    app = FastAPI(
        title="Relight",
        version=VERSION,
        summary="Elastic scale-out control plane for LLM inference",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    problems.install(app)
    for room in (models, operations, fleet, capabilities, starts, doctor, cache, events, system):
        app.include_router(room.router)
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document; no running controller is needed for it."""
    return _document(_routes())


def build(parts: Parts, callers: Callers) -> FastAPI:
    """The application over a running controller."""
    app = _routes()
    app.state.parts = parts
    app.add_middleware(Gate, callers=callers, clock=parts.clock)
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(_document(app))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """The generated document with what the framework cannot know: problems, and the bearer scheme."""
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    problem = problems.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path not in OPEN_PATHS:
                operation["security"] = [{"token": []}]
            for status, response in operation["responses"].items():
                # Validation errors leave as problems, never in the framework's own shape.
                if status == "422":
                    reference = {"$ref": "#/components/schemas/Problem"}
                    response["content"] = {problems.MEDIA_TYPE: {"schema": reference}}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document

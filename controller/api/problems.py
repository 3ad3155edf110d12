"""Problem details (RFC 9457) for every error, the framework's own included."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from relight.controller.accept import PreconditionFailed
from relight.core.errors import (
    Conflict,
    Denied,
    InvalidInput,
    NotFound,
    RelightError,
    TooOld,
    Unavailable,
)
from relight.core.logs import get_logger

log = get_logger("controller.api")

TYPE_BASE = "urn:relight:problem:"
MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1


class ProblemField(BaseModel):
    """One wrong field: where it is, what was expected there, what stood there."""

    field: str
    expected: str
    got: str


class Problem(BaseModel):
    """What went wrong, for people and machines."""

    type: str = Field(description="A stable URI of the kind of problem")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    instance: str = Field(description="The path that was asked for")
    errors: list[ProblemField] = []
    retryable: bool = Field(description="Whether the same request may succeed later, unchanged")


# Most special first: a subclass must be found before its base.
_STATUS: tuple[tuple[type[RelightError], int, str], ...] = (
    (InvalidInput, 422, "The input is not valid"),
    (NotFound, 404, "There is no such thing"),
    (PreconditionFailed, 412, "The precondition does not hold"),
    (TooOld, 410, "The revision is too old"),
    (Conflict, 409, "The state does not allow it"),
    (Unavailable, 503, "Not now"),
)
_TITLES = {
    400: "The request is malformed",
    401: "No valid identity",
    403: "The role is missing",
    404: "There is no such path",
    405: "The method is not allowed here",
    422: "The input is not valid",
    500: "A defect of the controller",
}


class AsciiJson(Response):
    """JSON whose every character is ASCII, so that no text that was accepted can fail on its way out."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def problem(
    path: str,
    status: int,
    detail: str,
    *,
    code: str = "",
    title: str = "",
    errors: list[dict[str, str]] | None = None,
    retryable: bool = False,
    headers: dict[str, str] | None = None,
) -> Response:
    """One problem as a response."""
    title = title or _TITLES.get(status, "The request failed")
    body = {
        "type": TYPE_BASE + (code or f"http-{status}"),
        "title": title,
        "status": status,
        "detail": detail,
        "instance": path,
        "errors": errors or [],
        "retryable": retryable,
    }
    return AsciiJson(body, status, headers, MEDIA_TYPE)


def of_error(path: str, error: RelightError) -> Response:
    """The problem that a typed error is."""
    headers: dict[str, str] = {}
    if isinstance(error, Denied):
        status, title = (403, _TITLES[403]) if error.authenticated else (401, _TITLES[401])
        if status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="relight"'
    else:
        status, title = next(((s, t) for kind, s, t in _STATUS if isinstance(error, kind)), (500, ""))
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if status == 500:
        log.error("api.defect", path=path, error=repr(error))
    errors = []
    if isinstance(error, InvalidInput):
        errors = [{"field": e.field, "expected": e.expected, "got": e.got} for e in error.errors]
    return problem(
        path,
        status,
        str(error),
        code=error.code,
        title=title,
        errors=errors,
        retryable=error.retryable or isinstance(error, Conflict),
        headers=headers,
    )


def install(app: FastAPI) -> None:
    """Makes every error of `app` a problem."""

    @app.exception_handler(RelightError)
    async def _typed(request: Request, error: RelightError) -> Response:
        return of_error(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        errors = [
            {
                "field": ".".join(str(part) for part in found["loc"]),
                "expected": str(found["msg"]),
                "got": repr(found.get("input"))[:80],
            }
            for found in error.errors()
        ]
        detail = "; ".join(f"{e['field']}: {e['expected']}" for e in errors)
        return problem(request.url.path, 422, detail, code="invalid-input", errors=errors)

    @app.exception_handler(HTTPException)
    async def _framework(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # The framework names the methods of the first route that matches the path, not of all.
            headers = {"Allow": ", ".join(sorted(_methods(app, request.url.path)))}
        return problem(request.url.path, error.status_code, str(error.detail), headers=headers)

    @app.exception_handler(Exception)
    async def _defect(request: Request, error: Exception) -> Response:
        log.exception("api.defect", path=request.url.path)
        return problem(request.url.path, 500, "a defect; it was logged under the request id")


def _methods(app: FastAPI, path: str) -> set[str]:
    for template, methods in app.openapi()["paths"].items():
        pattern = re.sub(r"\\\{[a-z]+\\\}", "[^/]+", re.escape(template))
        if re.fullmatch(pattern, path):
            return {method.upper() for method in methods}
    return set()


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems that an operation may answer with, for OpenAPI; 401, 403 and 503 are always among them."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": _TITLES.get(status) or next((t for _, s, t in _STATUS if s == status), "Problem"),
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in sorted({401, 403, 503, *statuses})
    }

"""Who may call, and how typed errors leave a gRPC service."""

from __future__ import annotations

from typing import Any

import grpc

from relight.core.auth import Role, Tokens
from relight.core.errors import Conflict, Denied, Fenced, InvalidInput, NotFound, RelightError, Unavailable

_CODES: tuple[tuple[type[RelightError], grpc.StatusCode], ...] = (
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Fenced, grpc.StatusCode.FAILED_PRECONDITION),
    (Conflict, grpc.StatusCode.ABORTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
)


async def authorize(context: grpc.aio.ServicerContext[Any, Any], tokens: Tokens, role: Role) -> None:
    """Ends the call unless its `authorization` metadata carries a token with `role`."""
    metadata = dict(context.invocation_metadata() or ())
    value = metadata.get("authorization")
    try:
        tokens.require(value if isinstance(value, str) else None, role)
    except Denied as error:
        await refuse(context, error)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: RelightError) -> None:
    """Ends the call with the status that fits the error."""
    if isinstance(error, Denied):
        code = grpc.StatusCode.PERMISSION_DENIED if error.authenticated else grpc.StatusCode.UNAUTHENTICATED
    else:
        code = next((c for kind, c in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error))

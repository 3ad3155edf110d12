"""Who may call, and how typed errors leave a gRPC service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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


SlotCheck = Callable[[str], None]
"""Raises Denied for a slot that the caller is not, Unavailable for one of which that cannot be said yet."""
AdmitAgent = Callable[[str | None], Awaitable[SlotCheck]]
"""Takes an `authorization` value. Raises Denied for who is no agent, Unavailable when nobody can say."""


def agents_by_token(tokens: Tokens) -> AdmitAgent:
    """Admits whoever has a token with the role of an agent, as any slot."""

    async def admit(authorization: str | None) -> SlotCheck:
        tokens.require(authorization, Role.AGENT)
        return lambda _: None

    return admit


def authorization(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """What the call's metadata says of who calls."""
    value = dict(context.invocation_metadata() or ()).get("authorization")
    return value if isinstance(value, str) else None


async def authorize(context: grpc.aio.ServicerContext[Any, Any], tokens: Tokens, role: Role) -> None:
    """Ends the call unless its `authorization` metadata carries a token with `role`."""
    try:
        tokens.require(authorization(context), role)
    except Denied as error:
        await refuse(context, error)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: RelightError) -> None:
    """Ends the call with the status that fits the error."""
    if isinstance(error, Denied):
        code = grpc.StatusCode.PERMISSION_DENIED if error.authenticated else grpc.StatusCode.UNAUTHENTICATED
    else:
        code = next((c for kind, c in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error))

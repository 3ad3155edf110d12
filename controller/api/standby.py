"""What a controller answers while another one leads: that it lives, and to everything else to come back."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from relight.controller.api.problems import AsciiJson, of_error
from relight.core.errors import Unavailable


async def standby(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application; a process that does not even answer this is ended by whoever watches it."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/livez":
        await AsciiJson({"status": "standby"})(scope, receive, send)
        return
    away = Unavailable("another controller leads", retry_after=1.0)
    await of_error(scope["path"], away)(scope, receive, send)

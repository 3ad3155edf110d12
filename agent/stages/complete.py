"""After a lazy start: what it put off is done piece by piece, in quiet moments between requests."""

from __future__ import annotations

import asyncio

from relight.agent.member import Member
from relight.agent.stages.common import Tools, explain
from relight.core.logs import get_logger
from relight.core.states import State

_log = get_logger("agent.complete")
LOOK = 0.5
"""Seconds between two looks for a quiet moment."""
PATIENCE = 30.0
"""Seconds after which a piece is done between two steps of a busy engine: waiting longer costs its requests more."""


async def complete(member: Member, tools: Tools) -> None:
    """Returns when nothing is left, or the member does something else; a sleep then does the rest first."""
    busy_since: float | None = None
    # Its first request goes first: it is what the start was for.
    await asyncio.sleep(LOOK)
    while member.state is State.READY and member.task is None and not member.complete:
        try:
            handle, now = tools.attach(member), tools.clock.monotonic()
            health = await handle.health()
            busy_since = (busy_since or now) if health.requests_running + health.requests_waiting else None
            if busy_since is None or now - busy_since > PATIENCE:
                left = await handle.complete()
                busy_since = None
                member.complete = left == 0
                member.say(f"serving; {left} pieces of the warm-up left" if left else "")
        except Exception as error:  # noqa: BLE001 - it serves without the rest
            _log.warning("complete.failed", instance=member.instance, reason=explain(error))
            return
        if not member.complete:
            await asyncio.sleep(LOOK)
    if member.complete:
        _log.info("complete.done", instance=member.instance)

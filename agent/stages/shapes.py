"""What an engine runs, read from its own counts now and then, and before it sleeps or stops."""

from __future__ import annotations

import asyncio

from relight.agent.member import Member
from relight.agent.stages.common import Tools, explain
from relight.core import shapes
from relight.core.logs import get_logger

_log = get_logger("agent.shapes")
REST = 30.0
"""Seconds between two readings."""
PATIENCE = 2.0
"""Seconds that one may take: looks at other engines, a sleep or a stop wait for it."""


async def read(member: Member, tools: Tools) -> None:
    """Takes in what ran since the last reading. An engine that does not say is asked again later."""
    try:
        async with asyncio.timeout(PATIENCE):
            counted = await tools.attach(member).shapes()
    except Exception as error:  # noqa: BLE001 - nothing depends on it but the order of later warm-ups
        _log.info("shapes.unread", instance=member.instance, reason=explain(error))
        return
    before, member.counted = member.counted, counted
    if counted.steps and (before is None or before.steps != counted.steps):
        member.shapes = shapes.grown(member.shapes, before, counted)
        member.changed(False)


def due(member: Member, tools: Tools) -> bool:
    """Whether it is time for a reading."""
    return member.counted is None or tools.clock.now() - member.counted.at >= REST

"""Stop: the instance's whole process tree ends, its private directory goes, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

from relight.agent.member import Member
from relight.agent.stages import shapes
from relight.agent.stages.common import END_GRACE, Tools, explain
from relight.core.errors import Unavailable
from relight.core.logs import get_logger
from relight.core.states import State

_log = get_logger("agent.stop")


async def stop(member: Member, tools: Tools, cause: str) -> None:
    """Ends GONE. In DRAINING the requests are waited for first, by the model's drain policy."""
    if member.state is State.NONE:
        member.move(State.GONE, cause)
        return
    drain = member.assignment.spec.drain
    if member.state is State.DRAINING:
        try:
            await tools.attach(member).wait_idle(drain.timeout_seconds, drain.on_timeout)
        except Exception as error:  # noqa: BLE001 - an engine that does not answer has no requests to save
            _log.warning("drain.cut", instance=member.instance, reason=explain(error))
        else:
            await shapes.read(member, tools)
    member.begin(State.STOPPING, cause)
    member.source = None
    if member.handle is not None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(END_GRACE):
                await member.handle.close_source(END_GRACE / 2)
    try:
        await tools.end(member, END_GRACE)
    except Unavailable as error:
        # The supervisor is being restarted: the same stop is taken up again.
        member.retry_at = tools.clock.now() + error.retry_after
        member.say(str(error))
        return
    if member.handle is not None:
        with contextlib.suppress(Exception):
            await member.handle.close()
        member.handle = None
    member.pid = member.start_time = 0
    member.facts = member.memory = None
    member.unmapped_bytes = 0
    await asyncio.to_thread(shutil.rmtree, member.directory, ignore_errors=True)
    member.move(State.GONE, cause)

"""Wake: from dormant to proven, up the assignment's rungs in order, inside one transition.

Nothing answers before `prove` agreed with the source's own canary. A rung that fails leaves its reason and
the next one is tried; after the last the memory is given back and the instance is failed.
"""

from __future__ import annotations

import asyncio

from relight.agent.member import Member
from relight.agent.stages.common import RETRY_AFTER, Recorder, Tools
from relight.agent.stages.ladder import climb, give_back
from relight.core import failpoints
from relight.core.records import Mode
from relight.core.states import State


async def wake(member: Member, tools: Tools, cause: str) -> None:
    """Ends READY or FAILED. The deadline counts from the receipt of the assignment."""
    resumed = member.state is State.WAKING
    handle = tools.attach(member)
    record = Recorder(member, tools.clock, Mode.GUARDIAN, tools.clock.now() if resumed else member.received_at)
    member.incarnation += 1
    member.begin(State.WAKING, cause)
    if resumed:
        # The agent died in the middle: what the engine holds is unknown, so it starts from nothing.
        await give_back(member, tools, handle)
        record.mark("dispatch", "agent: the wake was cut and begins again")
    remaining = member.assignment.deadline_seconds - (tools.clock.now() - record.begun_at)
    reason, again = "the assignment allows no rung", False
    try:
        async with asyncio.timeout(max(remaining, 0.0)):
            for rung in member.assignment.rungs:
                reason, again = await climb(member, tools, handle, record, rung)
                if not reason:
                    break
    except TimeoutError:
        reason, again = f"the wake took longer than {member.assignment.deadline_seconds:g} s", True
        record.mark("pull", reason)
    if reason:
        await give_back(member, tools, handle)
        record.finish(False, reason)
        member.fail(reason, RETRY_AFTER if again else None)
        return
    known = member.facts.fingerprint.content.get("revision") if member.facts else None
    if known != member.assignment.content_revision:
        # It slept with other content: what is said of it must be of what it holds now.
        member.facts = await handle.describe()
    failpoints.hit("agent.wake.after-proof")
    member.level = member.assignment.level
    record.finish(True, record.rungs[-1].reason)
    member.move(State.READY, cause)

"""Start: an engine process comes to exist and becomes ready or (after its first sleep) dormant."""

from __future__ import annotations

import asyncio

from relight.agent.engines.base import ProofFailed
from relight.agent.member import Member
from relight.agent.stages import ladder, process
from relight.agent.stages.common import END_GRACE, RETRY_AFTER, Recorder, Tools, explain, fault
from relight.agent.stages.process import FORKED
from relight.agent.stages.sleep import release, stand_by
from relight.agent.stages.warm_up import warm_up
from relight.core.errors import InvalidInput
from relight.core.logs import get_logger
from relight.core.records import Desired, Mode
from relight.core.states import State

_log = get_logger("agent.start")


async def start(member: Member, tools: Tools, cause: str) -> None:
    """Ends READY, DORMANT or FAILED (with no process left). The deadline counts from receipt.

    Called again in STARTING after the agent's own death it goes on with the process that runs.
    """
    record = Recorder(member, tools.clock, member.assignment.mode, member.received_at)
    member.incarnation += 1
    member.begin(State.STARTING, cause)
    remaining = member.assignment.deadline_seconds - (tools.clock.now() - member.received_at)
    try:
        async with asyncio.timeout(max(remaining, 0.0)):
            await _start(member, tools, record, remaining)
    except Exception as error:  # noqa: BLE001 - whatever went wrong, no process may be left
        if fault(error) is None and not isinstance(error, InvalidInput):
            _log.exception("start.defect", instance=member.instance)
        reason = explain(error)
        record.mark("engine", reason)
        await tools.end(member, END_GRACE)
        record.finish(False, reason)
        member.pid = member.start_time = 0
        # Wrong arguments stay wrong; anything else may pass.
        member.fail(reason, None if isinstance(error, InvalidInput) else RETRY_AFTER)
    else:
        await tools.forker.started(member.instance)
    finally:
        tools.caches.ended(member)


async def _start(member: Member, tools: Tools, record: Recorder, remaining: float) -> None:
    if member.pid == 0:
        command = await tools.driver(member).command(tools.context(member))
        record.mark("dispatch", "agent: receipt to the engine's process")
        command = await tools.caches.prepare(member, tools, record, command)
        running, record.process = await process.begin(member, tools, command)
        member.pid, member.start_time = running.pid, running.start_time
        member.counted = None
        member.remember()
    handle = tools.attach(member)
    filled = None
    if await handle.wait_empty(remaining, member.say):
        record.mark("process", "the engine's process up to where its weights go")
        filled = await ladder.fill(member, tools, handle, record)
    await handle.wait_ready(remaining, member.say)
    member.facts = await handle.describe()
    record.weave(member.facts.phases)
    if record.process.startswith(FORKED):
        record.process += await tools.forker.shared(member.assignment.spec.engine)
    opened = True
    try:
        proof, phase = await handle.prove_or_record()
    except ProofFailed as error:
        if filled is None:
            raise
        await ladder.fall_back(member, tools, handle, record, filled, error)
    else:
        opened = False
        record.add((phase,))
        if filled is not None:
            ladder.worked(tools, record, filled, proof)
    await warm_up(member, handle, record)
    member.level, member.complete = member.assignment.level, member.assignment.mode is not Mode.LAZY
    if member.assignment.desired is Desired.DORMANT:
        if opened:
            await handle.close_source(0.0)
            member.source = None
        told = await release(member, tools)
        await stand_by(member, handle)
        record.mark("sleep", told)
        record.finish(True, member.assignment.cause)
        member.move(State.DORMANT, told)
        return
    if not opened:
        member.source = await handle.open_source()
        record.mark("canary", "the source is opened to readers")
    record.finish(True, member.assignment.cause)
    member.move(State.READY, member.assignment.cause or "started")

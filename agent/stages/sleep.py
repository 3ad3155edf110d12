"""Sleep: from draining to dormant; requests first, then readers of the weights, memory, the measure."""

from __future__ import annotations

from dataclasses import replace

from relight.agent.engines.base import EngineHandle
from relight.agent.member import Member
from relight.agent.stages import shapes
from relight.agent.stages.common import END_GRACE, RETRY_AFTER, Tools, explain
from relight.core.errors import LocalFault, RelightError
from relight.core.logs import get_logger
from relight.core.states import State

_log = get_logger("agent.sleep")
READERS_DEADLINE = 10.0
"""Seconds that readers of the weights may finish before they are cut."""
SAFE_SHARE = 0.95
"""Least share of weights and KV cache that a sleep must give back to count as a guardian's sleep."""


async def sleep(member: Member, tools: Tools, cause: str) -> None:
    """Ends DORMANT, FAILED (no process left), or still DRAINING when requests may not be cut and go on."""
    handle = tools.attach(member)
    drain = member.assignment.spec.drain
    if member.state is State.DRAINING:
        try:
            await handle.wait_idle(drain.timeout_seconds, drain.on_timeout)
        except LocalFault as error:
            member.retry_at = tools.clock.now() + 1.0
            member.say(f"still draining: {error}")
            return
        await shapes.read(member, tools)
    try:
        member.begin(State.SLEEPING, cause)
        await _complete(member, handle)
        await handle.close_source(READERS_DEADLINE)
        member.source = None
        told = await release(member, tools)
        await stand_by(member, handle)
    except Exception as error:  # noqa: BLE001 - an engine between awake and asleep is of no use
        reason = f"sleep failed: {explain(error)}"
        _log.warning("sleep.failed", instance=member.instance, reason=reason)
        await tools.end(member, END_GRACE)
        member.fail(reason, RETRY_AFTER)
        return
    member.move(State.DORMANT, told)


async def stand_by(member: Member, handle: EngineHandle) -> None:
    """Lets a sleeper say where it will be read while it is filled. One that cannot wakes as well, and passes nothing
    on."""
    member.relay = None
    try:
        member.relay = await handle.open_relay()
    except RelightError as error:
        _log.warning("relay.closed", instance=member.instance, reason=explain(error))


async def _complete(member: Member, handle: EngineHandle) -> None:
    """A guardian has nothing to warm up when it wakes: what a lazy start put off is done while it can be."""
    try:
        while not member.complete:
            member.complete = await handle.complete() == 0
    except RelightError as error:
        # It sleeps and wakes without, and serves as it did until now.
        _log.warning("complete.failed", instance=member.instance, reason=str(error))


async def release(member: Member, tools: Tools) -> str:
    """Measures, gives the memory back, and measures what is left. Returns what to say of it.

    A sleeper that keeps more than the first one of its kind left behind is named: planning by its count
    instead of its bytes would over-claim the device.
    """
    before = await tools.measure(member)
    known = before.residual_bytes
    level = member.assignment.level
    await tools.attach(member).sleep(level)
    member.level = level
    after = await tools.measure(member, residual_bytes=known)
    promised = before.kv_bytes + (before.weight_bytes if level == 2 else 0)
    released = before.total_bytes - after.total_bytes
    said = f"asleep at level {level}: {after.total_bytes} bytes left, {released} of {promised} given back"
    unsafe = ""
    if released < SAFE_SHARE * promised:
        unsafe = said
    elif known and after.total_bytes > 1.1 * known:
        unsafe = f"{said}, and an earlier sleep left {known}"
    member.memory = replace(after, unsafe=unsafe)
    return f"not guardian-safe, {unsafe}" if unsafe else said

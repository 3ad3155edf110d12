"""Wake: from dormant to proven, up the assignment's rungs in order, inside one transition.

Nothing answers before `prove` agreed with the source's own canary. A rung that fails leaves its reason and
the next one is tried; after the last the memory is given back and the instance is failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relight.agent.engines.base import EngineHandle, Proof, ProofFailed, Refill
from relight.agent.member import Member
from relight.agent.stages.common import (
    END_GRACE,
    RETRY_AFTER,
    SUSPEND_DEADLINE,
    Recorder,
    Tools,
    explain,
    fault,
)
from relight.core import failpoints
from relight.core.logs import get_logger
from relight.core.records import Mode, Phase, Rung, RungResult, SourceOffer
from relight.core.states import State

_log = get_logger("agent.wake")


async def wake(member: Member, tools: Tools, cause: str) -> None:
    """Ends READY or FAILED. The deadline counts from the receipt of the assignment."""
    resumed = member.state is State.WAKING
    handle = tools.attach(member)
    record = Recorder(member, tools.clock, Mode.GUARDIAN, tools.clock.now() if resumed else member.received_at)
    member.incarnation += 1
    member.begin(State.WAKING, cause)
    if resumed:
        # The agent died in the middle: what the engine holds is unknown, so it starts from nothing.
        await _give_back(member, tools, handle)
        record.mark("dispatch", "agent: the wake was cut and begins again")
    remaining = member.assignment.deadline_seconds - (tools.clock.now() - record.begun_at)
    reason, again = "the assignment allows no rung", False
    try:
        async with asyncio.timeout(max(remaining, 0.0)):
            for rung in member.assignment.rungs:
                reason, again = await _climb(member, tools, handle, record, rung)
                if not reason:
                    break
    except TimeoutError:
        reason, again = f"the wake took longer than {member.assignment.deadline_seconds:g} s", True
        record.mark("pull", reason)
    if reason:
        await _give_back(member, tools, handle)
        record.finish(False, reason)
        member.fail(reason, RETRY_AFTER if again else None)
        return
    failpoints.hit("agent.wake.after-proof")
    member.level = member.assignment.level
    record.finish(True, record.rungs[-1].reason)
    member.move(State.READY, cause)


async def _climb(member: Member, tools: Tools, handle: EngineHandle, record: Recorder, rung: Rung) -> tuple[str, bool]:
    """("", ...) when the rung led to a proven engine, else (the reason, whether a later try may succeed)."""
    source = rung.source.instance if rung.source else ""
    failpoints.hit("agent.wake.before-pull")
    record.mark("dispatch", "agent: receipt to refill" if not record.rungs else f"agent: on to {rung.kind}")
    begun = tools.clock.monotonic()
    refill: Refill | None = None
    again = True
    try:
        refill = await handle.refill(rung, member.assignment.content_revision, member.say)
        record.add(refill.phases)
        record.add((await handle.resume(),))
        proof, phase, member.source = await _prove(handle)
        record.add((phase,))
    except ProofFailed as error:
        # The same bytes would fail again: waiting alone cures nothing.
        reason, again = f"the canary disagrees: {error}", False
    except Exception as error:  # noqa: BLE001 - every failure of a rung is a reason
        if fault(error) is None:
            _log.exception("rung.defect", instance=member.instance, rung=rung.kind)
        reason = explain(error)
    else:
        said = f"{rung.reason}; {refill.detail}; canary of {proof.tokens} tokens agrees"
        seconds = tools.clock.monotonic() - begun
        left = _left_aside(rung, record.rungs)
        record.rungs.append(RungResult(rung.kind, True, said, seconds, source, refill.bytes, left))
        return "", False
    _log.warning("rung.failed", instance=member.instance, rung=rung.kind, reason=reason)
    if refill is not None:
        # Weights are up and not proven: they go before the next rung is tried.
        await _give_back(member, tools, handle)
    record.mark("pull", f"{rung.kind} failed: {reason}")
    seconds = tools.clock.monotonic() - begun
    record.rungs.append(RungResult(rung.kind, False, reason, seconds, source, refill.bytes if refill else 0))
    return f"{rung.kind}: {reason}", again


def _left_aside(rung: Rung, failed: Sequence[RungResult]) -> str:
    """The faster paths to a peer that were expected instead, and what became of them."""
    tried = [f"{r.kind}: {r.reason}" for r in failed if r.kind.transport]
    return "; ".join([*tried, *filter(None, [rung.instead_of])])


async def _prove(handle: EngineHandle) -> tuple[Proof, Phase, SourceOffer]:
    """Proves the engine, and meanwhile makes it a source; nobody hears of that offer unless the proof is good."""
    opening = asyncio.ensure_future(handle.open_source())
    try:
        proof, phase = await handle.prove()
    except BaseException:
        # A source that was opened for nothing is closed by `suspend`, which follows: it must not come after that.
        await asyncio.gather(opening, return_exceptions=True)
        raise
    return proof, phase, await opening


async def _give_back(member: Member, tools: Tools, handle: EngineHandle) -> None:
    """The memory is free afterwards, whatever it takes."""
    try:
        async with asyncio.timeout(SUSPEND_DEADLINE):
            await handle.suspend()
    except Exception as error:  # noqa: BLE001 - an engine that cannot suspend is ended
        _log.warning("suspend.failed", instance=member.instance, reason=explain(error))
        await tools.end(member, END_GRACE)

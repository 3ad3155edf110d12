"""The source ladder: rungs in order until one brings proven weights; one that fails leaves its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from relight.agent.engines.base import EngineHandle, Proof, ProofFailed, Refill
from relight.agent.member import Member
from relight.agent.stages.common import END_GRACE, SUSPEND_DEADLINE, Recorder, Tools, explain, fault
from relight.core import failpoints
from relight.core.errors import LocalFault
from relight.core.logs import get_logger
from relight.core.records import Phase, Rung, RungKind, RungResult, SourceOffer

_log = get_logger("agent.ladder")
UNPROVEN = "proof-failed"
"""The cause of a rung whose weights arrived and do not answer as their source does."""
FETCH_SHARE = 0.8
"""How much of what is left of the deadline remote storage may take: then the next rung has some."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A rung brought weights that are verified and not proven yet. `begun` is monotonic."""

    rung: Rung
    refill: Refill
    begun: float


async def climb(member: Member, tools: Tools, handle: EngineHandle, record: Recorder, rung: Rung) -> tuple[str, bool]:
    """Wakes an engine by one rung: ("", ...) when it is proven, else (the reason, whether a later try may succeed)."""
    failpoints.hit("agent.wake.before-pull")
    record.mark("dispatch", "agent: receipt to refill" if not record.rungs else f"agent: on to {rung.kind}")
    begun = tools.clock.monotonic()
    refill: Refill | None = None
    again = True
    try:
        refill = await _refill(member, tools, handle, record, rung)
        record.add(refill.phases)
        record.add((await handle.resume(),))
        proof, phase, member.source = await _prove(handle, rung)
        record.add((phase,))
    except ProofFailed as error:
        # The same bytes would fail again: waiting alone cures nothing.
        reason, cause, again = _disagrees(error), UNPROVEN, False
    except Exception as error:  # noqa: BLE001 - every failure of a rung is a reason
        reason, cause = _explained(member, rung, error)
    else:
        worked(tools, record, Filled(rung, refill, begun), proof)
        return "", False
    if refill is not None:
        # Weights are up and not proven: they go before the next rung is tried.
        await give_back(member, tools, handle)
    _failed(member, tools, record, rung, (reason, cause), begun, refill.bytes if refill else 0)
    return f"{rung.kind}: {reason}", again


async def fill(member: Member, tools: Tools, handle: EngineHandle, record: Recorder) -> Filled:
    """Brings weights to an engine that starts and waits for them. Raises LocalFault when no rung does."""
    reason = "the assignment allows no rung"
    for rung in member.assignment.rungs:
        begun = tools.clock.monotonic()
        try:
            refill = await _refill(member, tools, handle, record, rung)
        except Exception as error:  # noqa: BLE001 - every failure of a rung is a reason
            reason, cause = _explained(member, rung, error)
            _failed(member, tools, record, rung, (reason, cause), begun, 0)
            continue
        record.add(refill.phases)
        return Filled(rung, refill, begun)
    raise LocalFault(f"no rung brought weights; the last one: {reason}")


async def fall_back(
    member: Member, tools: Tools, handle: EngineHandle, record: Recorder, filled: Filled, error: ProofFailed
) -> None:
    """After a start whose weights are not proven: on to the rungs behind. Raises LocalFault when none is proven."""
    reason = _disagrees(error)
    await give_back(member, tools, handle)
    _failed(member, tools, record, filled.rung, (reason, UNPROVEN), filled.begun, filled.refill.bytes)
    rungs = member.assignment.rungs
    for rung in rungs[rungs.index(filled.rung) + 1 :]:
        reason, _ = await climb(member, tools, handle, record, rung)
        if not reason:
            return
    raise LocalFault(reason)


async def _refill(member: Member, tools: Tools, handle: EngineHandle, record: Recorder, rung: Rung) -> Refill:
    """By one rung; what lies in remote storage is brought into this slot's memory first. Raises as the engine's own."""
    assignment = member.assignment
    if rung.kind is not RungKind.STORAGE:
        share = assignment.spec.share_host_copies
        return await handle.refill(rung, assignment.content_revision, member.say, share=share)
    storage, checkpoints = assignment.spec.storage, tools.checkpoints
    if storage is None or checkpoints is None:
        raise LocalFault("no storage is named" if storage is None else "no memory is set aside for it on this slot")
    left = member.received_at + assignment.deadline_seconds - tools.clock.now()

    def say(done: int, total: int) -> None:
        member.say(f"{rung.kind}: {done >> 20} of {total >> 20} MiB")

    key = (assignment.model, assignment.content_revision)
    async with checkpoints.held(key, storage, max(left, 0.0) * FETCH_SHARE, say) as fetched:
        record.mark("fetch", fetched.told)
        refill = await handle.refill(rung, assignment.content_revision, member.say, checkpoint=fetched.directory)
    return replace(refill, detail=f"{fetched.told}; {refill.detail}")


def worked(tools: Tools, record: Recorder, filled: Filled, proof: Proof | None) -> None:
    """Notes the rung that led to a proven engine; without a proof it is the first of its content, and is trusted."""
    rung, refill = filled.rung, filled.refill
    proven = f"canary of {proof.tokens} tokens agrees" if proof else "its canary is the first of this content"
    said = f"{rung.reason}; {refill.detail}; {proven}"
    seconds = tools.clock.monotonic() - filled.begun
    source = rung.source.instance if rung.source else ""
    left = _left_aside(rung, record.rungs)
    filling = {helper.instance for helper in rung.helpers if helper.filling}
    record.rungs.append(
        RungResult(
            rung.kind, True, said, seconds, source, refill.bytes, left,
            brought=refill.brought,
            passed_on=sum(count for name, count in refill.brought.items() if name in filling),
            deal=_dealt(rung),
        )
    )  # fmt: skip


def _dealt(rung: Rung) -> str:
    return rung.deal.told if rung.deal else ""


def _failed(
    member: Member, tools: Tools, record: Recorder, rung: Rung, why: tuple[str, str], begun: float, moved: int
) -> None:
    reason, cause = why
    _log.warning("rung.failed", instance=member.instance, rung=rung.kind, reason=reason, cause=cause)
    record.mark("pull", f"{rung.kind} failed: {reason}")
    source = rung.source.instance if rung.source else ""
    seconds = tools.clock.monotonic() - begun
    record.rungs.append(RungResult(rung.kind, False, reason, seconds, source, moved, cause=cause, deal=_dealt(rung)))


def _disagrees(error: ProofFailed) -> str:
    return f"the canary disagrees: {error}"


def _explained(member: Member, rung: Rung, error: Exception) -> tuple[str, str]:
    """The reason in words, and its cause in one."""
    found = fault(error)
    if found is None:
        _log.exception("rung.defect", instance=member.instance, rung=rung.kind)
    return explain(error), found.code if found is not None else "defect"


def _left_aside(rung: Rung, failed: Sequence[RungResult]) -> str:
    """The faster paths to a peer that were expected instead, and what became of them."""
    tried = [f"{r.kind}: {r.reason}" for r in failed if r.kind.transport]
    return "; ".join([*tried, *filter(None, [rung.instead_of])])


async def _prove(handle: EngineHandle, rung: Rung) -> tuple[Proof | None, Phase, SourceOffer]:
    """Proves the engine, and meanwhile makes it a source; nobody hears of that offer unless the proof is good.

    A checkpoint brings no canary: whoever reads content first, by its digests alone, records one for all that follow.
    """
    first = rung.kind in (RungKind.DISK, RungKind.STORAGE)
    opening = asyncio.ensure_future(handle.open_source())
    try:
        proof, phase = await (handle.prove_or_record() if first else handle.prove())
    except BaseException:
        # A source that was opened for nothing is closed by `suspend`, which follows: it must not come after that.
        await asyncio.gather(opening, return_exceptions=True)
        raise
    return proof, phase, await opening


async def give_back(member: Member, tools: Tools, handle: EngineHandle) -> None:
    """The memory is free afterwards, whatever it takes."""
    try:
        async with asyncio.timeout(SUSPEND_DEADLINE):
            await handle.suspend()
    except Exception as error:  # noqa: BLE001 - an engine that cannot suspend is ended
        _log.warning("suspend.failed", instance=member.instance, reason=explain(error))
        await tools.end(member, END_GRACE)

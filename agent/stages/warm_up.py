"""Warm-up requests: what the model's engines are asked for most often, asked of a new one before anybody else does."""

from __future__ import annotations

import asyncio

from relight.agent.engines.base import EngineHandle
from relight.agent.member import Member
from relight.agent.stages.common import Recorder, explain
from relight.core import shapes
from relight.core.logs import get_logger
from relight.core.records import Mode

_log = get_logger("agent.warm-up")
NAME = "warm_up"
"""Of the phase."""
SECONDS = 2.0
"""What all of them together may take: requests may be waiting for this engine."""
WARMED = frozenset({Mode.LAZY, Mode.NORMAL})
"""A guardian that wakes has been through all this; a cold start is the engine's own."""


async def warm_up(member: Member, handle: EngineHandle, record: Recorder) -> None:
    """One phase, or none where nothing is known of the model's requests. What fails here fails nothing else."""
    assignment = member.assignment
    prompts = shapes.prompts(assignment.shapes, assignment.spec.warm_up_requests)
    if assignment.mode not in WARMED or not prompts:
        return
    answered, why = 0, ""
    try:
        async with asyncio.timeout(SECONDS):
            for tokens in prompts:
                await handle.warm_up(tokens)
                answered += 1
    except TimeoutError:
        why = f"; cut after {SECONDS:g} s"
    except Exception as error:  # noqa: BLE001 - it is proven already, and serves without
        why = f"; {explain(error)}"
        _log.warning("warm-up.failed", instance=member.instance, reason=explain(error))
    sizes = " and ".join(map(str, dict.fromkeys(prompts)))
    record.mark(NAME, f"{answered} of {len(prompts)} requests, prompts of up to {sizes} tokens{why}")

"""Warm-up requests of a start: which, when not, and that nothing else fails or waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from relight.agent.engines.base import EngineHandle
from relight.agent.member import Member
from relight.agent.stages import warm_up
from relight.agent.stages.common import Recorder
from relight.core.clock import SystemClock
from relight.core.errors import LocalFault
from relight.core.records import Desired, InstanceAssignment, Mode, ModelSpec, Shapes

SPEC = ModelSpec("default", "m", "/m", "r1", "stub")
WANTED = InstanceAssignment(
    "i-1", SPEC.key, SPEC, 0, 1, (), Desired.READY, mode=Mode.LAZY, shapes=Shapes(1.0, {}, {8: 20.0, 64: 30.0})
)


class Engine:
    def __init__(self, fault: str = "") -> None:
        self.fault, self.asked = fault, list[int]()

    async def warm_up(self, prompt_tokens: int) -> None:
        self.asked.append(prompt_tokens)
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.fault:
            raise LocalFault(self.fault)


async def _warmed(engine: Engine, wanted: InstanceAssignment = WANTED) -> list[str]:
    member = Member(wanted, Path(), Path(), SystemClock(), lambda _: None, lambda _: None, 1, 1, 0.0)
    record = Recorder(member, SystemClock(), wanted.mode, 0.0)
    await warm_up.warm_up(member, cast("EngineHandle", engine), record)
    assert {p.name for p in record.phases} <= {"warm_up"}
    return [p.detail for p in record.phases]


async def test_the_most_common_prompts_are_asked_and_told_as_a_phase() -> None:
    engine = Engine()
    assert await _warmed(engine) == ["2 of 2 requests, prompts of up to 64 and 8 tokens"]
    assert engine.asked == [64, 8]


@pytest.mark.parametrize(
    "wanted",
    [
        replace(WANTED, shapes=None),
        replace(WANTED, spec=replace(SPEC, warm_up_requests=0)),
        replace(WANTED, mode=Mode.COLD),
        replace(WANTED, mode=Mode.GUARDIAN),
    ],
    ids=["nothing is known", "it is switched off", "the start is cold", "a guardian wakes"],
)
async def test_nothing_is_asked_and_no_phase_is_told_where(wanted: InstanceAssignment) -> None:
    engine = Engine()
    assert await _warmed(engine, wanted) == []
    assert engine.asked == []


async def test_one_that_takes_too_long_is_cut_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "SECONDS", 0.0)
    assert await _warmed(Engine("hang")) == ["0 of 2 requests, prompts of up to 64 and 8 tokens; cut after 0 s"]


async def test_one_that_fails_is_told_and_ends_them() -> None:
    engine = Engine("no such size")
    assert await _warmed(engine) == ["0 of 2 requests, prompts of up to 64 and 8 tokens; no such size"]
    assert engine.asked == [64]

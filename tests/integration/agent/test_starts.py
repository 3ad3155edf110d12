"""Starts by mode: engines that come up empty, take their weights by the ladder, and finish warming up later."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from relight.core.records import Desired, InstanceAssignment, Mode, RungKind, Shapes
from relight.core.states import State
from support.agent import Slot, complete, rungs

PEER_THEN_DISK = (RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.DISK)


def _wanted(slot: Slot, *args: str, mode: Mode = Mode.NORMAL, desired: Desired = Desired.READY) -> InstanceAssignment:
    return slot.instance("i-a", desired, *args, mode=mode, rungs=rungs(*PEER_THEN_DISK))


@pytest.mark.parametrize("mode", [Mode.NORMAL, Mode.LAZY])
async def test_a_start_takes_its_weights_by_the_first_rung_and_says_so(slot: Slot, mode: Mode) -> None:
    slot.want(_wanted(slot, mode=mode))
    report = await slot.until("i-a", State.READY)
    assert report.start is not None
    assert report.start.mode is mode
    assert [(r.kind, r.ok) for r in report.start.rungs] == [(RungKind.PEER_SHM, True)]
    assert report.source is not None
    assert report.endpoint is not None
    assert (await complete(report.endpoint.url, report.endpoint.served_name)).status_code == 200


async def test_a_cold_start_ignores_the_ladder(slot: Slot) -> None:
    slot.want(_wanted(slot, mode=Mode.COLD))
    report = await slot.until("i-a", State.READY)
    assert report.start is not None
    assert report.start.rungs == ()


async def test_an_empty_engine_does_not_answer_before_a_rung_brought_weights(slot: Slot) -> None:
    slot.want(_wanted(slot, 'wake_errors={"peer_shm": "hang"}'))
    starting = await slot.until("i-a", State.STARTING, lambda i: i.pid)
    assert starting.endpoint is None
    assert not (slot.directory / "state" / "i" / "i-a" / "port").exists()


async def test_rungs_that_fail_leave_their_reasons_and_the_next_one_fills_the_engine(slot: Slot) -> None:
    slot.want(_wanted(slot, 'wake_errors={"peer_shm": "remote", "peer_tcp": "dirty"}'))
    report = await slot.until("i-a", State.READY)
    assert report.start is not None
    assert [(r.kind, r.ok) for r in report.start.rungs] == [
        (RungKind.PEER_SHM, False), (RungKind.PEER_TCP, False), (RungKind.DISK, True),
    ]  # fmt: skip
    assert "configured" in report.start.rungs[0].reason


async def test_weights_that_the_canary_refuses_are_given_back_and_the_next_rung_is_climbed(slot: Slot) -> None:
    slot.want(_wanted(slot, 'wake_errors={"peer_shm": "canary"}'))
    report = await slot.until("i-a", State.READY)
    assert report.start is not None
    assert [(r.kind, r.ok) for r in report.start.rungs] == [(RungKind.PEER_SHM, False), (RungKind.PEER_TCP, True)]
    assert "canary disagrees" in report.start.rungs[0].reason


async def test_a_start_whose_every_rung_fails_leaves_no_process(slot: Slot) -> None:
    faults = '{"peer_shm": "remote", "peer_tcp": "local", "disk": "local"}'
    slot.want(_wanted(slot, f"wake_errors={faults}"))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "no rung brought weights" in report.failure.reason
    assert slot.marked() == []


async def test_an_assignment_without_rungs_fails_a_start_that_needs_one(slot: Slot) -> None:
    slot.want(replace(_wanted(slot), rungs=()))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "the assignment allows no rung" in report.failure.reason


async def test_a_guardian_is_made_by_a_normal_start_that_falls_asleep(slot: Slot) -> None:
    slot.want(_wanted(slot, desired=Desired.DORMANT))
    report = await slot.until("i-a", State.DORMANT)
    assert report.source is None
    slot.change("i-a", Desired.READY)
    assert (await slot.until("i-a", State.READY)).endpoint is not None


async def test_a_lazy_replica_that_goes_to_sleep_finishes_what_it_put_off_first(slot: Slot) -> None:
    slot.want(_wanted(slot, "pieces=3", mode=Mode.LAZY))
    await slot.until("i-a", State.READY)
    slot.change("i-a", Desired.DORMANT)
    await slot.until("i-a", State.DORMANT)
    slot.change("i-a", Desired.READY)
    await slot.until("i-a", State.READY)


async def test_an_agent_that_dies_while_weights_are_brought_leaves_a_start_that_the_next_one_finishes(
    slot: Slot,
) -> None:
    slot.want(_wanted(slot, "wake_seconds=1.0"))
    starting = await slot.until("i-a", State.STARTING, lambda i: i.pid)
    await slot.kill()
    await slot.up()
    report = await slot.until("i-a", State.READY)
    assert report.pid == starting.pid
    assert report.endpoint is not None
    assert (await complete(report.endpoint.url, report.endpoint.served_name)).status_code == 200


async def test_a_start_answers_common_shapes_before_it_is_ready_and_tells_what_others_asked_when_it_sleeps(
    slot: Slot,
) -> None:
    slot.want(replace(_wanted(slot), shapes=Shapes(1.0, {1: 90.0}, {64: 30.0, 8: 20.0, 16: 1.0})))
    report = await slot.until("i-a", State.READY)
    assert report.start is not None
    assert report.endpoint is not None
    (phase,) = (p for p in report.start.phases if p.name == "warm_up")
    assert phase.detail == "2 of 2 requests, prompts of up to 64 and 8 tokens"
    async with httpx.AsyncClient(timeout=20.0) as client:
        counts = (await client.get(f"{report.endpoint.url}/stub/counts")).json()
    assert (counts["warm_ups"], counts["started"]) == ([64, 8], 0)
    for prompt in ("one", "one two three"):
        await complete(report.endpoint.url, report.endpoint.served_name, prompt)
    slot.change("i-a", Desired.DORMANT)
    asleep = await slot.until("i-a", State.DORMANT)
    assert asleep.shapes is not None
    # Some of it may have been told before, and faded for the moment since.
    assert asleep.shapes.steps == pytest.approx({1: 2.0}, rel=0.01)
    assert asleep.shapes.prompts == pytest.approx({1: 1.0, 4: 1.0}, rel=0.01)

"""Which doors a slot tries, how often, and what it tells of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from relight.agent.reach import DOUBTED, OLD, SPACING, Ways
from relight.core.clock import VirtualClock
from relight.core.errors import RemoteFault
from relight.core.records import Door, Neighbours, Verdict
from relight.transfer.transports.wire import Refused


class Slot:
    """The ways of one slot, whose every pause passes at once on a clock of its own."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.answers: dict[tuple[str, str], str | Exception] = {}
        self.tried: list[tuple[float, str, str]] = []
        self.told = 0
        self.ways = Ways("a", self._knock, self.clock, self._changed, self._sleep)

    def _changed(self) -> None:
        self.told += 1

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    async def _knock(self, door: Door) -> str:
        self.tried.append((self.clock.monotonic(), door.slot, door.transport))
        answer = self.answers.get((door.slot, door.transport), "it answered")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def go_on(self, seconds: float) -> None:
        """Lets the work go on for so long by its clock; nothing is due in between but what it does itself."""
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            task = asyncio.ensure_future(self.ways.keep())
            before = -1.0
            while before != self.clock.monotonic() and self.clock.monotonic() < end:
                before = self.clock.monotonic()
                for _ in range(5):
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self.clock.monotonic() < end:
                self.clock.advance(min(1.0, end - self.clock.monotonic()))

    def verdicts(self) -> dict[tuple[str, str], Verdict]:
        return {(r.slot, r.transport): r.verdict for r in self.ways.report()}


def doors(*slots: str, transports: tuple[str, ...] = ("tcp",), port: int = 1) -> tuple[Door, ...]:
    return tuple(Door(s, t, f"i-{s}", f"{t}:{s}:{port}", "grant") for s in slots for t in transports)


async def test_each_door_is_tried_once_soon_and_again_when_its_verdict_is_old() -> None:
    slot = Slot()
    slot.ways.hear(Neighbours(1, doors("b", "c", transports=("shm", "tcp"))))
    await slot.go_on(60)
    assert Counter((s, t) for _, s, t in slot.tried) == dict.fromkeys(
        [("b", "shm"), ("b", "tcp"), ("c", "shm"), ("c", "tcp")], 1
    )
    assert set(slot.verdicts().values()) == {Verdict.YES}
    await slot.go_on(OLD * 0.7)
    assert len(slot.tried) == 4
    await slot.go_on(OLD)
    assert 8 <= len(slot.tried) <= 12


async def test_however_many_there_are_a_slot_tries_about_twelve_a_minute() -> None:
    slot = Slot()
    slot.ways.hear(Neighbours(1, doors(*(f"s{n:03}" for n in range(200)))))
    await slot.go_on(120)
    assert len(slot.tried) <= 2 * 60 / SPACING * 1.5
    gaps = [b[0] - a[0] for a, b in zip(slot.tried, slot.tried[1:], strict=False)]
    assert min(gaps) >= SPACING * 0.5
    assert len({round(gap, 3) for gap in gaps}) > 1


async def test_a_way_counts_as_closed_after_the_second_failure_and_is_tried_again_before_long() -> None:
    slot = Slot()
    slot.answers["b", "tcp"] = RemoteFault("i-b at b: cannot connect: no route")
    slot.ways.hear(Neighbours(1, doors("b")))
    await slot.go_on(1)
    # Once may be an engine that has just ended: nobody plans by it.
    assert slot.verdicts() == {("b", "tcp"): Verdict.UNKNOWN}
    await slot.go_on(2 * SPACING)
    (said,) = slot.ways.report()
    assert (said.verdict, said.reason) == (Verdict.NO, "i-b at b: cannot connect: no route")
    slot.answers["b", "tcp"] = "it answered"
    await slot.go_on(DOUBTED * 1.3)
    assert slot.verdicts() == {("b", "tcp"): Verdict.YES}


async def test_one_that_is_there_and_refuses_says_nothing_about_the_way() -> None:
    slot = Slot()
    slot.ways.hear(Neighbours(1, doors("b")))
    await slot.go_on(10)
    slot.answers["b", "tcp"] = Refused("i-b refused this reader: generation 3 is over")
    slot.ways.hear(Neighbours(2, doors("b", port=2)))
    await slot.go_on(60)
    assert slot.verdicts() == {("b", "tcp"): Verdict.YES}


async def test_a_door_that_moved_is_tried_at_once_and_one_that_went_is_forgotten() -> None:
    slot = Slot()
    slot.ways.hear(Neighbours(1, doors("b", "c")))
    await slot.go_on(30)
    assert len(slot.tried) == 2
    slot.ways.hear(Neighbours(2, doors("b", port=2)))
    assert set(slot.verdicts()) == {("b", "tcp")}
    await slot.go_on(10)
    assert [s for _, s, _ in slot.tried[2:]] == ["b"]
    slot.ways.hear(Neighbours(2, ()))
    assert set(slot.verdicts()) == {("b", "tcp")}, "the same revision says the same"
    slot.ways.hear(Neighbours(3, ()))
    assert slot.ways.report() == ()


async def test_a_change_of_its_own_cards_has_the_ways_by_cards_tried_again() -> None:
    slot = Slot()
    slot.ways.hear(Neighbours(1, doors("b", transports=("rdma", "tcp"))))
    await slot.go_on(30)
    slot.answers["b", "rdma"] = RemoteFault("mlx5_0: no route")
    slot.ways.doubt("rdma")
    await slot.go_on(4 * SPACING)
    assert [t for _, _, t in slot.tried[2:]] == ["rdma", "rdma"]
    assert slot.verdicts() == {("b", "rdma"): Verdict.NO, ("b", "tcp"): Verdict.YES}


@pytest.mark.parametrize("error", [OSError("too many open files"), RemoteFault("x" * 10_000)])
async def test_whatever_goes_wrong_is_a_reason_of_bounded_length(error: Exception) -> None:
    slot = Slot()
    slot.answers["b", "tcp"] = error
    slot.ways.hear(Neighbours(1, doors("b")))
    await slot.go_on(30)
    (said,) = slot.ways.report()
    assert said.verdict is Verdict.NO
    assert 0 < len(said.reason) <= 2000

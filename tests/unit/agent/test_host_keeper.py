"""What a keeper of copies ends, and what it must not: without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relight.agent.hostcopy import calls
from relight.agent.hostcopy.calls import Said
from relight.agent.hostcopy.keeper import HostCopies, TierSettings
from relight.agent.supervisor.client import Running
from relight.core.clock import SystemClock
from relight.core.errors import LocalFault
from relight.core.records import HostContent, HostTier, HostWanted, SourceOffer

CONTENT = HostContent("default/m", "r1", "runtime", "1", "cpu")
OFFER = SourceOffer(1, "d", "c", "l", {"shm": "unix:/x"}, 100, grant_key="ab")


class Link:
    """Remembers what was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def end(self, instance: str, grace_seconds: float) -> None:
        self.ended.append(instance)


class Processes:
    """Copies that answer, or do not."""

    def __init__(self) -> None:
        self.silent, self.readers = False, 0

    async def describe(self, socket: Path) -> Said:
        if self.silent:
            raise LocalFault("the copy did not answer")
        return Said(7, f"host-{socket.parent.name}", "ready", "", CONTENT, 0, 0, 100, OFFER, self.readers)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(calls, "describe", made.describe)
    return made


def keeper(tmp_path: Path, budget: int = 1 << 20) -> tuple[HostCopies, Link]:
    link: Any = Link()
    made = HostCopies(TierSettings(tmp_path / "h", budget, "127.0.0.1"), link, SystemClock())
    assert made.take_over([Running("host-a", 7, 1), Running("i-a", 8, 1)]) == (Running("i-a", 8, 1),)
    return made, link


async def test_a_copy_that_the_controller_never_heard_of_is_not_ended_by_its_silence(processes, tmp_path) -> None:
    made, link = keeper(tmp_path)
    processes.silent = True
    await made.begin()
    made.report()
    made.hear(HostTier())
    processes.silent = False
    await made.look()
    assert link.ended == []
    report = made.report()
    assert report is not None
    assert [c.copy for c in report.copies] == ["host-a"]
    made.hear(HostTier())
    await made.look()
    assert link.ended == ["host-a"]


async def test_one_missed_answer_costs_no_copy_and_three_do(processes, tmp_path) -> None:
    made, link = keeper(tmp_path)
    await made.begin()
    processes.silent = True
    await made.look()
    await made.look()
    assert link.ended == []
    await made.look()
    assert link.ended == ["host-a"]


@pytest.mark.parametrize("budget", [0, 99])
async def test_a_budget_that_shrank_ends_what_was_taken_over(processes, tmp_path, budget) -> None:
    made, link = keeper(tmp_path, budget)
    await made.begin()
    await made.look()
    assert link.ended == ["host-a"]


async def test_a_copy_whose_pages_are_mapped_is_not_ended_before_its_last_reader_went(processes, tmp_path) -> None:
    made, link = keeper(tmp_path)
    processes.readers = 1
    await made.begin()
    made.report()
    made.hear(HostTier())
    await made.look()
    assert link.ended == []
    processes.readers = 0
    await made.look()
    assert link.ended == ["host-a"]


async def test_a_copy_that_becomes_wanted_while_the_others_are_asked_is_taken_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, _ = keeper(tmp_path)

    async def describe(socket: Path) -> Said:
        made.hear(HostTier((HostWanted("host-a", CONTENT, 100), HostWanted("host-b", CONTENT, 100))))
        return Said(7, "host-a", "ready", "", CONTENT, 0, 0, 100, OFFER, 0)

    monkeypatch.setattr(calls, "describe", describe)
    await made.look()
    report = made.report()
    assert report is not None
    assert [c.copy for c in report.copies] == ["host-a", "host-b"]

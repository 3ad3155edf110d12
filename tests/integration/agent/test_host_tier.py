"""Copies that a real agent keeps of a real source: over deaths of agents and supervisors, and within the budget."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relight.agent.hostcopy import calls
from relight.core.clock import SystemClock
from relight.core.hosting import room_for
from relight.core.records import (
    Desired,
    HostContent,
    HostCopyReport,
    HostState,
    HostTier,
    HostWanted,
    Prefetch,
    PrefetchReport,
    Rung,
    RungKind,
    SlotReport,
    SourceRef,
)
from relight.transfer import grants
from support.agent import Fleet, Slot
from support.weights import CANARY, SIZES, Engine

MakeSlot = Callable[..., Slot]
BUDGET = 64 << 20


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine("i-source", tmp_path / "source")
    yield engine
    engine.residency.close_source(0.0)


def wanted(source: Engine, name: str = "host-a", revision: str = "r1") -> HostWanted:
    shm, _, grant = source.offer()
    origin = SourceRef("i-source", "a", 1, source.residency.source.manifest_digest, "", shm, grant)
    content = HostContent("default/m", revision, "runtime", "1", "cpu")
    return HostWanted(name, content, sum(SIZES), (Rung(RungKind.PEER_SHM, "a test", origin),), "a test")


def tell(slot: Slot, *copies: HostWanted) -> None:
    slot.tier = HostTier(copies)
    slot.want(*slot.wanted.values())


async def copy_of(fleet: Fleet, name: str, state: HostState, since: int = 0) -> HostCopyReport:
    def found(report: SlotReport) -> HostCopyReport | None:
        copies = report.host_tier.copies if report.host_tier else ()
        return next((c for c in copies if c.copy == name and c.state is state), None)

    copy = found(await fleet.until(found, since))
    assert copy is not None
    return copy


def names(report: SlotReport) -> list[str]:
    return [c.copy for c in report.host_tier.copies] if report.host_tier else []


async def test_a_node_without_devices_or_engines_keeps_a_copy(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET}, devices=[], engines={})
    await slot.up()
    tell(slot, wanted(source))
    copy = await copy_of(fleet, "host-a", HostState.READY)
    assert copy.source is not None
    assert copy.source.weight_bytes == sum(SIZES)
    assert fleet.reports[-1].devices == ()


async def test_an_engine_wakes_from_the_copy_of_a_source_that_is_gone(make_slot, fleet, source, tmp_path) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    tell(slot, wanted(source))
    copy = await copy_of(fleet, "host-a", HostState.READY)
    before = bytes(source.segment.view)
    source.residency.close_source(0.0)
    offer = copy.source
    assert offer is not None
    assert copy.bytes <= BUDGET
    sleeper = Engine("i-b", tmp_path / "b")
    for kind in (RungKind.HOST_SHM, RungKind.HOST_TCP):
        sleeper.residency.sleep(2)
        claims = grants.Claims(
            "host-a", offer.generation, offer.manifest_digest, "i-b", SystemClock().now() + 60
        )  # fmt: skip
        address, grant = offer.addresses[kind.transport], grants.mint(offer.grant_key, claims)
        sleeper.wake(kind, address=address, grant=grant, name="host-a")
        sleeper.residency.resume()
        assert bytes(sleeper.segment.view) == before
        assert sleeper.residency.source.manifest.canary == CANARY


async def test_the_next_agent_takes_a_copy_over_and_keeps_it_without_its_source(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    asked = wanted(source)
    tell(slot, asked)
    first = await copy_of(fleet, "host-a", HostState.READY)
    slot.tier = HostTier((replace(asked, rungs=()),))
    slot.want(*slot.wanted.values())
    source.residency.close_source(0.0)
    await slot.kill()
    seen = len(fleet.reports)
    await slot.up()
    assert await copy_of(fleet, "host-a", HostState.READY, seen) == first


async def test_a_copy_of_before_is_in_the_next_agents_first_report(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    tell(slot, wanted(source))
    await copy_of(fleet, "host-a", HostState.READY)
    await slot.kill()
    seen = len(fleet.reports)
    await slot.up()
    first = await fleet.until(lambda report: True, seen)
    assert [(c.copy, c.state) for c in first.host_tier.copies] == [("host-a", HostState.READY)]


async def test_a_copy_holds_no_devices_memory(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET}, devices_seconds=0.1)
    await slot.up()
    tell(slot, wanted(source))
    await copy_of(fleet, "host-a", HostState.READY)
    # An instance comes up beside it, and with it a measurement.
    slot.want(slot.instance("i-a", Desired.READY))
    report = await fleet.until(lambda r: any(d.holders for d in r.devices))
    assert all(d.healthy for d in report.devices), report.devices


async def test_a_copy_outlives_its_supervisor(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    tell(slot, wanted(source))
    first = await copy_of(fleet, "host-a", HostState.READY)
    (supervisor,) = [pid for pid in _children() if "relight.agent.supervisor" in _command(pid) and _own(slot, pid)]
    os.kill(supervisor, signal.SIGKILL)
    seen = len(fleet.reports)
    tell(slot, wanted(source), wanted(source, "host-b"))
    await copy_of(fleet, "host-b", HostState.READY, seen)
    assert await copy_of(fleet, "host-a", HostState.READY, seen) == first


async def test_a_killed_copy_is_made_again(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    tell(slot, wanted(source))
    first = await copy_of(fleet, "host-a", HostState.READY)
    said = await calls.describe(slot.directory / "state" / "h" / "a" / "c")
    seen = len(fleet.reports)
    os.kill(said.pid, signal.SIGKILL)
    await copy_of(fleet, "host-a", HostState.FAILED, seen)
    again = await copy_of(fleet, "host-a", HostState.READY, seen)
    assert again.source is not None
    assert first.source is not None
    assert again.source.grant_key != first.source.grant_key


async def test_the_budget_holds_one_and_the_one_wanted_last_stays(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": room_for(sum(SIZES)) + (1 << 20)})
    await slot.up()
    older = wanted(source)
    newer = replace(older, copy="host-b")
    tell(slot, older)
    await copy_of(fleet, "host-a", HostState.READY)
    tell(slot, older, newer)
    gone = await copy_of(fleet, "host-a", HostState.FAILED)
    assert "are left" in gone.reason
    await copy_of(fleet, "host-b", HostState.READY)
    tiers = [r.host_tier for r in fleet.reports if r.host_tier is not None]
    assert all(sum(c.bytes for c in t.copies) <= t.budget_bytes for t in tiers)


async def test_what_is_not_wanted_any_more_goes_with_its_process(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    tell(slot, wanted(source))
    await copy_of(fleet, "host-a", HostState.READY)
    assert slot.marked()
    seen = len(fleet.reports)
    tell(slot)
    await fleet.until(lambda r: r.host_tier is not None and not names(r), seen)
    assert slot.marked() == []
    assert not (slot.directory / "state" / "h" / "a").exists()


async def test_a_slot_without_a_budget_keeps_nothing_and_reports_no_tier(make_slot, fleet, source) -> None:
    slot = make_slot()
    await slot.up()
    tell(slot, wanted(source))
    report = await fleet.until(lambda r: r.revision == slot.revision)
    assert report.host_tier is None
    assert slot.marked() == []


async def test_a_content_that_is_not_the_one_asked_for_is_refused_with_the_field(make_slot, fleet, source) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    tell(slot, wanted(source, revision="r2"))
    assert "content.revision" in (await copy_of(fleet, "host-a", HostState.FAILED)).reason


async def test_an_announced_checkpoint_is_read_ahead_and_told(make_slot, fleet, tmp_path) -> None:
    slot = make_slot(host_tier={"budget_bytes": BUDGET})
    await slot.up()
    (tmp_path / "model.safetensors").write_bytes(bytes(5_000_000))
    slot.tier = HostTier((), (Prefetch("default/m", "r1", str(tmp_path), "a test"),))
    slot.want()
    whole = PrefetchReport("default/m", "r1", 5_000_000, 5_000_000)
    await fleet.until(lambda r: r.host_tier is not None and r.host_tier.prefetches == (whole,))
    seen = len(fleet.reports)
    tell(slot)
    await fleet.until(lambda r: r.host_tier is not None and not r.host_tier.prefetches, seen)


def _children() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def _command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _own(slot: Slot, pid: int) -> bool:
    return str(slot.directory) in _command(pid)

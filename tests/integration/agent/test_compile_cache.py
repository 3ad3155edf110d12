"""Starts of one agent and the ring, with a scripted controller: whatever is missing, the start goes on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from relight.core.records import CacheReport, CacheRing, Desired, Mode, RingNode, RungKind
from relight.core.states import State
from relight.transfer.grants import Claims, mint
from support.agent import Fleet, Slot, rungs

CHECKOUT = {"PYTHONPATH": str(Path(__file__).resolve().parents[3] / "src")}


def _starting(slot: Slot, name: str, mode: Mode = Mode.NORMAL, *args: str, device: str = "cpu-0") -> None:
    made = slot.instance(name, Desired.READY, 'compiles="graph"', *args, mode=mode, rungs=rungs(RungKind.DISK))
    slot.want(*slot.wanted.values(), replace(made, spec=replace(made.spec, env=CHECKOUT), devices=(device,)))


def _ring_of(slot: Slot, report: CacheReport, revision: int = 1) -> CacheRing:
    grant = mint(report.grant_key, Claims(slot.config["slot"], 0, "", "a", 4e9))
    node = RingNode(slot.config["slot"], report.address, grant)
    return CacheRing(revision, 2, (node,), (report.signer,))


async def _tell(fleet: Fleet, slot: Slot) -> CacheReport:
    """Tells the slot of a ring that is its own node alone."""
    report = (await fleet.until(lambda r: r.cache)).cache
    slot.ring = _ring_of(slot, report)
    slot.want(*slot.wanted.values())
    return report


async def test_a_start_without_members_goes_on_and_says_that_no_node_answers(slot: Slot) -> None:
    _starting(slot, "i-1")
    found = await slot.until("i-1", State.READY, lambda i: i.start.cache)
    assert found.start.cache.verdict == "compiled"
    assert "no cache node answers" in found.start.cache.reason
    assert [p.name for p in found.start.phases][:2] == ["dispatch", "cache"]


async def test_where_the_cache_is_off_a_start_has_no_record_of_it(make_slot: Callable[..., Slot], fleet: Fleet) -> None:
    slot = make_slot(compile_cache={"enabled": False})
    await slot.up()
    _starting(slot, "i-1")
    found = await slot.until("i-1", State.READY)
    assert found.start.cache is None
    assert all(r.cache is None for r in fleet.reports)


async def test_a_cold_start_compiles_for_itself_into_its_own_empty_directory(fleet: Fleet, slot: Slot) -> None:
    await _tell(fleet, slot)
    left = slot.directory / "state" / "i" / "i-1" / "compile" / "left-behind"
    left.parent.mkdir(parents=True)
    left.write_text("of an earlier start")
    _starting(slot, "i-1", Mode.COLD)
    found = await slot.until("i-1", State.READY)
    assert "cache" not in [p.name for p in found.start.phases]
    assert not left.exists()
    assert list(left.parent.glob("vllm/torch_compile_cache/*/*/*/model"))


async def test_a_ring_that_comes_with_a_known_revision_is_heard_and_used(fleet: Fleet, slot: Slot) -> None:
    first = slot.want()
    report = (await fleet.until(lambda r: r.cache and r.revision == first.revision)).cache
    slot.ring = _ring_of(slot, report)
    fleet.send(replace(first, ring=slot.ring))
    _starting(slot, "i-1")
    await slot.until("i-1", State.READY, lambda i: i.start.cache and i.start.cache.published == ("a",))
    report = await fleet.until(lambda r: r.cache.bundles == 1 and r.cache.compiles == 1)
    assert report.cache.bytes > 0
    _starting(slot, "i-2", device="cpu-1")
    found = await slot.until("i-2", State.READY, lambda i: i.start.cache)
    assert found.start.cache.verdict == "hit", found.start.cache
    # The directory goes with the instance.
    slot.change("i-2", Desired.GONE)
    await slot.until("i-2", State.GONE)
    assert not (slot.directory / "state" / "i" / "i-2").exists()


async def test_a_ring_of_a_fenced_controller_is_not_heard(fleet: Fleet, slot: Slot) -> None:
    report = (await fleet.until(lambda r: r.cache)).cache
    slot.epoch = 5
    slot.want()
    await fleet.until(lambda r: r.epoch == 5)
    slot.epoch, slot.ring = 4, _ring_of(slot, report)
    slot.want()
    slot.epoch, slot.ring = 5, None
    _starting(slot, "i-1")
    found = await slot.until("i-1", State.READY, lambda i: i.start.cache)
    assert "no cache node answers" in found.start.cache.reason


async def test_a_start_that_outlives_its_agent_goes_on_without_what_was_prepared(fleet: Fleet, slot: Slot) -> None:
    await _tell(fleet, slot)
    _starting(slot, "i-1", Mode.NORMAL, "start_seconds=1.0")
    await slot.until("i-1", State.STARTING, lambda i: i.pid)
    await slot.kill(signal.SIGKILL)
    since = len(fleet.reports)
    await slot.up()
    found = await slot.until("i-1", State.READY, since=since)
    assert found.start.ok
    assert found.start.cache is None


async def test_a_start_that_fails_lets_the_next_one_compile(fleet: Fleet, slot: Slot) -> None:
    await _tell(fleet, slot)
    _starting(slot, "i-1", Mode.NORMAL, 'start_error="no memory"')
    await slot.until("i-1", State.FAILED)
    slot.change("i-1", Desired.GONE)
    await slot.until("i-1", State.GONE)
    slot.wanted.clear()
    _starting(slot, "i-2")
    found = await slot.until("i-2", State.READY, lambda i: i.start.cache)
    assert found.start.cache.published == ("a",), found.start.cache


async def test_a_start_that_waits_for_another_compile_is_stopped_at_once(fleet: Fleet, slot: Slot) -> None:
    await _tell(fleet, slot)
    _starting(slot, "i-1", Mode.NORMAL, "start_seconds=10.0")
    await slot.until("i-1", State.STARTING, lambda i: i.pid)
    _starting(slot, "i-2", device="cpu-1")
    waiting = await slot.until("i-2", State.STARTING, lambda i: "compiles the same" in i.progress)
    assert not waiting.pid
    slot.change("i-2", Desired.GONE)
    async with asyncio.timeout(6):
        await slot.until("i-2", State.GONE)
    assert not (slot.directory / "state" / "i" / "i-2").exists()


async def test_an_agent_whose_cache_cannot_be_opened_starts_engines_all_the_same(
    make_slot: Callable[..., Slot], tmp_path: Path, fleet: Fleet
) -> None:
    (tmp_path / "file").write_text("in the way")
    slot = make_slot(compile_cache={"directory": str(tmp_path / "file" / "cache")})
    await slot.up()
    _starting(slot, "i-1")
    assert (await slot.until("i-1", State.READY)).start.ok
    assert all(r.cache is None for r in fleet.reports)


async def test_what_the_ring_holds_survives_the_agent_and_its_keys_are_trusted_again(fleet: Fleet, slot: Slot) -> None:
    first = await _tell(fleet, slot)
    _starting(slot, "i-1")
    await slot.until("i-1", State.READY, lambda i: i.start.cache)
    await fleet.until(lambda r: r.cache.bundles == 1)
    await slot.kill(signal.SIGKILL)
    since = len(fleet.reports)
    await slot.up()
    again: Any = (await fleet.until(lambda r: r.cache and r.cache.bundles == 1, since)).cache
    assert again.signer == first.signer
    assert again.grant_key != first.grant_key

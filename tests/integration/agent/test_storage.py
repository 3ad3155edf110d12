"""Starts and wakes from remote storage, by a real agent: fetched ahead or at the rung, with the disk behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from relight.core.records import (
    Desired,
    HostTier,
    InstanceReport,
    Mode,
    Prefetch,
    PrefetchReport,
    Rung,
    RungKind,
    SlotReport,
    Storage,
)
from relight.core.states import State
from support.agent import Fleet, Slot, rungs
from support.storage import Bucket, refuse, safetensors

FILE = safetensors(("a", b"weights" * 1000))
LADDER: tuple[Rung, ...] = rungs(RungKind.STORAGE, RungKind.DISK)


def _tried(report: InstanceReport) -> list[tuple[RungKind, bool]]:
    assert report.start is not None
    return [(r.kind, r.ok) for r in report.start.rungs]


async def _again(slot: Slot) -> InstanceReport:
    """Puts the engine to sleep and wakes it."""
    slot.change("i-a", Desired.DORMANT)
    asleep = await slot.until("i-a", State.DORMANT, since=len(slot.fleet.reports))
    slot.change("i-a", Desired.READY, mode=Mode.GUARDIAN)
    return await slot.until("i-a", State.READY, lambda i: i.incarnation > asleep.incarnation)


async def test_an_engine_is_filled_from_storage_that_was_read_ahead_and_from_the_disk_when_storage_refuses(
    make_slot: Callable[..., Slot], fleet: Fleet
) -> None:
    slot = make_slot(host_tier={"budget_bytes": 64 << 20})
    await slot.up()
    with Bucket({"model.safetensors": FILE}) as bucket:
        storage = Storage(f"{bucket.uri}?sig=secret")
        wanted = slot.instance("i-a", Desired.READY, mode=Mode.NORMAL, rungs=LADDER)
        wanted = replace(wanted, spec=replace(wanted.spec, storage=storage))
        slot.tier = HostTier((), (Prefetch(wanted.model, "r1", "/models/tiny", "a test", storage),))
        slot.want()
        whole = PrefetchReport(wanted.model, "r1", len(FILE), len(FILE))
        await fleet.until(lambda r: r.host_tier is not None and r.host_tier.prefetches == (whole,))
        asked = len(bucket.seen)
        slot.want(wanted)
        report = await slot.until("i-a", State.READY)
        assert _tried(report) == [(RungKind.STORAGE, True)]
        assert len(bucket.seen) == asked
        assert report.start is not None
        assert f"read {len(FILE)} bytes of model.safetensors" in report.start.rungs[0].reason
        assert "fetch" in [p.name for p in report.start.phases]
        # Nothing is read ahead any more: what nobody reads is given up, and a wake fetches it for itself.
        slot.tier = HostTier()
        report = await _again(slot)
        assert _tried(report) == [(RungKind.STORAGE, True)]
        assert len(bucket.seen) > asked
        bucket.answer = lambda handler, name: refuse(handler, 403) is None
        report = await _again(slot)
        assert _tried(report) == [(RungKind.STORAGE, False), (RungKind.DISK, True)]
        assert report.start is not None
        assert report.start.rungs[0].reason == "model.safetensors: storage answers 403"

    def told(report: SlotReport) -> bool:
        return "secret" in repr(report)

    assert not any(map(told, fleet.reports))
    assert "secret" not in (slot.directory / "agent.log").read_text()

"""An agent makes assignments so, through failing rungs, deaths and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from relight.agent.procfs import Procfs
from relight.core.records import Assignment, Capability, Desired, RungKind, SlotReport, Verdict
from relight.core.states import State
from support.agent import TOKEN, Fleet, Slot, complete, rungs


async def _dormant(slot: Slot, *args: str, name: str = "i-a") -> Any:
    slot.want(slot.instance(name, Desired.DORMANT, *args))
    return await slot.until(name, State.DORMANT)


async def test_a_cold_start_ends_ready_with_an_endpoint_that_answers(slot: Slot, fleet: Fleet) -> None:
    slot.want(slot.instance("i-a", Desired.READY))
    report = await slot.until("i-a", State.READY)
    assert report.endpoint is not None
    assert report.source is not None
    answer = await complete(report.endpoint.url, report.endpoint.served_name)
    assert answer.status_code == 200
    assert fleet.identities == [f"Bearer {TOKEN}"]
    assert report.start is not None
    assert report.start.ok


async def test_a_guardian_gives_its_memory_back_and_says_how_much(slot: Slot) -> None:
    report = await _dormant(slot, "weight_bytes=67108864", "kv_bytes=33554432")
    assert report.endpoint is None
    assert report.source is None
    assert report.cause.startswith("asleep at level 2")
    assert report.memory.total_bytes < 64 << 20
    assert report.memory.residual_bytes == report.memory.total_bytes


async def test_a_sleeper_that_keeps_its_memory_is_named_not_guardian_safe(slot: Slot) -> None:
    report = await _dormant(slot, "weight_bytes=67108864", "sleep_keeps_bytes=50000000")
    assert report.cause.startswith("not guardian-safe")


async def test_what_a_sleep_showed_is_reported_and_outlives_the_agent(slot: Slot, fleet: Fleet) -> None:
    def guardian(report: SlotReport) -> Capability | None:
        return next((c for c in report.capabilities if c.name == "guardian" and c.ranks == 1), None)

    await _dormant(slot, "weight_bytes=67108864", "sleep_keeps_bytes=50000000")
    report = await fleet.until(guardian)
    found = guardian(report)
    assert found is not None
    assert (found.engine, found.verdict) == ("stub", Verdict.NO)
    assert "bytes left" in found.reason
    known = {c.name: c.verdict for c in report.capabilities}
    assert (known["sleep_2"], known["lazy"], known["graphs_kept"]) == (Verdict.YES, Verdict.YES, Verdict.UNKNOWN)
    await slot.kill()
    since = len(fleet.reports)
    await slot.up()
    assert guardian(await fleet.until(guardian, since)) == found


async def test_a_wake_climbs_to_the_first_rung_that_proves_itself(slot: Slot) -> None:
    faults = (
        '{"peer_shm": "remote", "peer_nvlink": "remote", "peer_nixl": "local", "peer_rdma": "local",'
        ' "peer_tcp": "canary", "host_copy": "dirty", "host_shm": "remote", "host_tcp": "local"}'
    )
    await _dormant(slot, f"wake_errors={faults}")
    slot.change("i-a", Desired.READY, rungs=rungs(*RungKind), operation="op-1")
    report = await slot.until("i-a", State.READY)
    start = report.start
    assert start is not None
    assert [(r.kind, r.ok) for r in start.rungs] == [(k, k is RungKind.DISK) for k in RungKind]
    remote, local = "transfer-remote-fault", "transfer-local-fault"
    assert [r.cause for r in start.rungs] == [
        remote, remote, local, local, "proof-failed", "transfer-model-dirty", remote, local, local, "",
    ]  # fmt: skip
    assert "stub.weight" in start.rungs[0].reason
    assert "token 0" in start.rungs[4].reason
    assert start.rungs[-1].instead_of.startswith("peer_shm: tensor stub.weight")
    assert all(f"{kind}: " in start.rungs[-1].instead_of for kind in RungKind if kind.transport)
    assert start.operation == "op-1"
    assert report.endpoint is not None
    assert (await complete(report.endpoint.url, report.endpoint.served_name)).status_code == 200


async def test_the_phases_of_a_wake_account_for_all_of_its_time(slot: Slot) -> None:
    await _dormant(slot)
    slot.change("i-a", Desired.READY, rungs=rungs(RungKind.PEER_SHM))
    start = (await slot.until("i-a", State.READY)).start
    assert start is not None
    assert [p.name for p in start.phases] == ["dispatch", "pull", "kv", "canary"]
    assert start.rungs[0].instead_of == ""
    assert start.phases[0].start == start.begun_at
    covered = sum(p.end - p.start for p in start.phases)
    assert covered >= 0.9 * (start.ended_at - start.begun_at)


async def test_a_wake_whose_every_rung_fails_gives_the_memory_back_and_says_why(slot: Slot) -> None:
    await _dormant(slot, "weight_bytes=67108864", 'wake_errors={"peer_shm": "canary", "disk": "local"}')
    slot.change("i-a", Desired.READY, rungs=rungs(RungKind.PEER_SHM, RungKind.DISK))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert report.failure.reason.startswith("disk: tensor stub.weight")
    assert report.failure.retry_after is not None
    assert report.source is None
    assert Procfs().pss(report.pid) < 64 << 20


async def test_a_failed_proof_alone_is_not_tried_again_by_itself(slot: Slot) -> None:
    await _dormant(slot, 'wake_errors={"peer_shm": "canary"}')
    slot.change("i-a", Desired.READY, rungs=rungs(RungKind.PEER_SHM))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert report.failure.retry_after is None


async def test_a_wake_that_hangs_fails_at_its_deadline(slot: Slot) -> None:
    await _dormant(slot, 'wake_errors={"disk": "hang"}')
    slot.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK), deadline_seconds=0.3)
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "0.3 s" in report.failure.reason


async def test_a_start_that_fails_leaves_no_process(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, 'start_error="no memory"', "exit_code=3"))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "status 3" in report.failure.reason
    assert slot.marked() == []


async def test_a_start_that_is_never_ready_is_cut_when_it_is_no_longer_wanted(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "never_ready=true"))
    await slot.until("i-a", State.STARTING, lambda i: i.pid)
    slot.change("i-a", Desired.GONE)
    await slot.until("i-a", State.GONE)
    assert slot.marked() == []


async def test_wrong_engine_arguments_fail_the_start_naming_the_argument(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "colour=1"))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "colour" in report.failure.reason
    assert report.failure.retry_after is None


async def test_a_drained_replica_finishes_its_requests_before_it_sleeps(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "token_delay=0.02"))
    report = await slot.until("i-a", State.READY)
    assert report.endpoint is not None
    request = asyncio.create_task(complete(report.endpoint.url, report.endpoint.served_name, max_tokens=30))
    await slot.until("i-a", State.READY, lambda i: i.requests_running == 1)
    slot.change("i-a", Desired.DRAINED)
    await slot.until("i-a", State.DRAINING)
    slot.change("i-a", Desired.DORMANT)
    await slot.until("i-a", State.DORMANT)
    assert (await request).status_code == 200


async def test_a_draining_replica_that_is_wanted_again_is_ready_again(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY))
    first = await slot.until("i-a", State.READY)
    slot.change("i-a", Desired.DRAINED)
    await slot.until("i-a", State.DRAINING)
    seen = len(slot.fleet.reports)
    slot.change("i-a", Desired.READY)
    again = await slot.until("i-a", State.READY, since=seen)
    assert again.incarnation == first.incarnation
    assert again.endpoint == first.endpoint


async def test_every_wake_is_a_new_incarnation(slot: Slot) -> None:
    first = await _dormant(slot)
    slot.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
    second = await slot.until("i-a", State.READY)
    assert second.incarnation > first.incarnation


async def test_two_transitions_on_one_device_follow_each_other(slot: Slot, fleet: Fleet) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "start_seconds=0.3"), slot.instance("i-b", Desired.DORMANT))
    await slot.until("i-a", State.READY)
    await slot.until("i-b", State.DORMANT)
    moving = {State.STARTING, State.WAKING, State.SLEEPING, State.STOPPING}
    assert all(sum(i.state in moving for i in r.instances) <= 1 for r in fleet.reports)


async def test_two_members_of_one_instance_start_on_their_own_slots(make_slot: Any) -> None:
    slots = [make_slot("a"), make_slot("b")]
    for rank, slot in enumerate(slots):
        await slot.up()
        slot.want(replace(slot.instance("i-pair", Desired.READY), rank=rank, members=2))
    reports = [
        await slot.until("i-pair", State.READY, lambda i, r=rank: i.rank == r) for rank, slot in enumerate(slots)
    ]
    assert [(r.rank, r.members) for r in reports] == [(0, 2), (1, 2)]


async def test_an_assignment_of_an_older_epoch_changes_nothing(slot: Slot, fleet: Fleet) -> None:
    slot.epoch = 5
    slot.want(slot.instance("i-a", Desired.READY))
    await slot.until("i-a", State.READY)
    seen = len(fleet.reports)
    fleet.send(Assignment("a", 4, 99, ()))
    report = await fleet.until(lambda r: True, since=seen)
    assert report.epoch == 5
    assert report.revision == 1
    assert [i.state for i in report.instances] == [State.READY]


async def test_an_emptied_store_of_the_same_epoch_stops_nothing(slot: Slot, fleet: Fleet) -> None:
    slot.want(slot.instance("i-a", Desired.READY))
    slot.want(slot.instance("i-a", Desired.READY))
    await slot.until("i-a", State.READY)
    fleet.send(Assignment("a", 1, 1, ()))
    slot.want(slot.instance("i-a", Desired.READY), slot.instance("i-b", Desired.DORMANT))
    await slot.until("i-b", State.DORMANT)
    states = [i.state for r in fleet.reports for i in r.instances if i.instance == "i-a"]
    assert not {State.DRAINING, State.STOPPING} & set(states)


async def test_an_instance_that_a_newer_assignment_does_not_name_is_stopped_and_forgotten(
    slot: Slot, fleet: Fleet
) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "child=true"))
    await slot.until("i-a", State.READY)
    slot.want()
    await fleet.until(lambda r: r.revision == 2 and not r.instances)
    assert slot.marked() == []


async def test_requests_go_on_while_the_agent_is_killed_and_the_next_one_adopts(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "token_delay=0.01"))
    first = await slot.until("i-a", State.READY)
    assert first.endpoint is not None
    request = asyncio.create_task(complete(first.endpoint.url, first.endpoint.served_name, max_tokens=60))
    await slot.kill()
    seen = len(slot.fleet.reports)
    await slot.up()
    again = await slot.until("i-a", State.READY, since=seen)
    assert (await request).status_code == 200
    assert (again.pid, again.incarnation, again.endpoint) == (first.pid, first.incarnation, first.endpoint)
    assert again.source == first.source


async def test_sigterm_of_the_agent_leaves_engines_running(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY))
    report = await slot.until("i-a", State.READY)
    await slot.kill(signal.SIGTERM)
    assert slot.process is not None
    assert slot.process.returncode == 0
    assert report.endpoint is not None
    assert (await complete(report.endpoint.url, report.endpoint.served_name)).status_code == 200


@pytest.mark.parametrize("failpoint", ["agent.apply.after-journal", "agent.wake.before-pull", "agent.wake.after-proof"])
async def test_a_wake_whose_agent_dies_at_any_point_ends_as_asked(make_slot: Any, failpoint: str) -> None:
    slot = make_slot()
    nth = 2 if failpoint == "agent.apply.after-journal" else 1
    await slot.up(RELIGHT_FAILPOINTS=f"{failpoint}={nth}*exit")
    await _dormant(slot)
    slot.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
    async with asyncio.timeout(20):
        await slot.process.wait()
    seen = len(slot.fleet.reports)
    await slot.up()
    report = await slot.until("i-a", State.READY, since=seen)
    assert (await complete(report.endpoint.url, report.endpoint.served_name)).status_code == 200


async def test_the_supervisor_killed_while_a_replica_serves_is_replaced_and_adopts(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "child=true"))
    first = await slot.until("i-a", State.READY)
    client = await slot.supervisor()
    os.kill(_supervisor_pid(slot), signal.SIGKILL)
    async with asyncio.timeout(20):
        await client.lost.wait()
    await client.close()
    slot.want(slot.instance("i-a", Desired.READY), slot.instance("i-b", Desired.DORMANT))
    await slot.until("i-b", State.DORMANT)
    assert first.endpoint is not None
    assert (await complete(first.endpoint.url, first.endpoint.served_name)).status_code == 200
    # The new supervisor ends what the old one started, its child included.
    slot.want()
    await slot.fleet.until(lambda r: r.revision == 3 and not r.instances)
    assert slot.marked() == []


async def test_a_main_that_died_while_no_supervisor_watched_leaves_no_child(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "child=true"))
    first = await slot.until("i-a", State.READY)
    os.kill(_supervisor_pid(slot), signal.SIGSTOP)
    stopped = _supervisor_pid(slot)
    os.kill(first.pid, signal.SIGKILL)
    os.kill(stopped, signal.SIGKILL)
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert slot.marked() == []


async def test_a_killed_main_takes_its_child_along_and_is_failed(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "child=true"))
    report = await slot.until("i-a", State.READY)
    assert len(slot.marked()) == 2
    os.kill(report.pid, signal.SIGKILL)
    failed = await slot.until("i-a", State.FAILED)
    assert failed.failure is not None
    assert "signal 9" in failed.failure.reason
    assert slot.marked() == []


async def test_an_engine_that_hangs_behind_an_open_port_is_failed(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, "hang_after=0", "stall_seconds=0.1"))
    report = await slot.until("i-a", State.READY)
    assert report.endpoint is not None
    request = asyncio.create_task(complete(report.endpoint.url, report.endpoint.served_name))
    failed = await slot.until("i-a", State.FAILED)
    assert failed.failure is not None
    assert "no token came" in failed.failure.reason
    assert slot.marked() == []
    with pytest.raises(httpx.HTTPError):
        await request


async def test_a_failed_instance_is_gone_when_the_controller_says_so(slot: Slot) -> None:
    slot.want(slot.instance("i-a", Desired.READY, 'start_error="x"'))
    await slot.until("i-a", State.FAILED)
    slot.change("i-a", Desired.GONE)
    await slot.until("i-a", State.GONE)


def _supervisor_pid(slot: Slot) -> int:
    wanted = str(slot.directory / "state" / "s" / "supervisor.sock")
    for stat in Procfs().processes():
        command = Path(f"/proc/{stat.pid}/cmdline").read_text().split("\0")
        if "relight.agent.supervisor" in command and wanted in command:
            return stat.pid
    raise AssertionError("no supervisor")


async def test_a_start_that_misses_its_deadline_says_so_and_leaves_no_process(slot: Slot) -> None:
    slot.want(replace(slot.instance("i-a", Desired.READY, "never_ready=true"), deadline_seconds=0.5))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "deadline" in report.failure.reason or "not ready after" in report.failure.reason
    assert slot.marked() == []

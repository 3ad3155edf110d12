"""SGLang through the agent: every state, deaths and restarts, against the double of its control API."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.conftest import calls

from relight.core.records import (
    Desired,
    Drain,
    Guardians,
    InstanceAssignment,
    InstanceReport,
    Mode,
    OnTimeout,
    RungKind,
)
from relight.core.states import State
from support.agent import Slot, complete, rungs

pytestmark = pytest.mark.engines
Model = Callable[..., Path]
CONTROL = {"/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/continue_generation",
           "/update_weights_from_disk"}  # fmt: skip


def wanted(
    slot: Slot, model: Path, desired: Desired, *args: str, level: int = 2, odd: Any = None, **spec: Any
) -> InstanceAssignment:
    """An assignment for the double; `odd` is what shall go wrong in it."""
    made = slot.instance("i-a", desired, *args, level=level)
    env = {"SGLANG_DOUBLE": json.dumps(odd or {})}
    changes = {"engine": "sglang", "uri": str(model), "env": env, "guardians": Guardians(level=level), **spec}
    return replace(made, spec=replace(made.spec, **changes))


async def guardian(slot: Slot, model: Path, **options: Any) -> InstanceReport:
    slot.want(wanted(slot, model, Desired.DORMANT, **options))
    return await slot.until("i-a", State.DORMANT)


def control(slot: Slot, since: int = 0) -> list[tuple[str, Any]]:
    """The calls that change something, in order."""
    return [(route, body) for _, route, body in calls(slot, "i-a")[since:] if route in CONTROL]


async def answer(report: InstanceReport, prompt: str = "hello") -> str:
    assert report.endpoint is not None
    got = await complete(report.endpoint.url, report.endpoint.served_name, prompt)
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


async def test_a_cold_start_ends_ready_and_says_why_it_was_not_forked(agent: Slot, model: Model) -> None:
    agent.want(wanted(agent, model(), Desired.READY))
    report = await agent.until("i-a", State.READY)
    assert report.start is not None
    assert report.start.ok
    assert "spawned" in report.start.process
    assert await answer(report)
    assert report.fingerprint is not None
    assert report.fingerprint.layout["engine"] == "sglang 0.5.23"


async def test_a_start_that_may_be_forked_is_spawned_with_the_engines_own_reason(agent: Slot, model: Model) -> None:
    agent.want(replace(wanted(agent, model(), Desired.READY), mode=Mode.NORMAL))
    report = await agent.until("i-a", State.READY)
    assert report.start is not None
    assert "sglang forces its processes to be spawned" in report.start.process


@pytest.mark.parametrize("level", [1, 2])
async def test_a_guardian_gives_its_memory_back_and_wakes_with_the_same_answers(
    agent: Slot, model: Model, level: int
) -> None:
    agent.want(wanted(agent, model(), Desired.READY, level=level))
    before = await answer(await agent.until("i-a", State.READY))
    agent.change("i-a", Desired.DRAINED)
    await agent.until("i-a", State.DRAINING)
    agent.change("i-a", Desired.DORMANT)
    asleep = await agent.until("i-a", State.DORMANT)
    assert asleep.cause.startswith(f"asleep at level {level}"), asleep.cause
    assert asleep.endpoint is None
    kinds = [RungKind.HOST_COPY] if level == 1 else [RungKind.DISK]
    seen = len(agent.fleet.reports)
    agent.change("i-a", Desired.READY, rungs=rungs(*kinds))
    awake = await agent.until("i-a", State.READY, since=seen)
    assert awake.start is not None
    assert [(r.kind, r.ok) for r in awake.start.rungs] == [(kinds[0], True)]
    assert [p.name for p in awake.start.phases] == ["dispatch", "map", "pull", "verify", "kv", "canary"]
    assert await answer(awake) == before


async def test_a_wake_makes_its_calls_in_the_one_order_that_sglang_survives(agent: Slot, model: Model) -> None:
    await guardian(agent, model())
    slept = control(agent)
    assert slept == [
        ("/pause_generation", {"mode": "retract"}),
        ("/release_memory_occupation", {"tags": ["cuda_graph", "weights", "kv_cache"]}),
    ]
    since = len(calls(agent, "i-a"))
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
    await agent.until("i-a", State.READY)
    woken = control(agent, since)
    assert [route for route, _ in woken] == [
        "/resume_memory_occupation", "/update_weights_from_disk", "/resume_memory_occupation", "/continue_generation",
    ]  # fmt: skip
    back = [body["tags"] for route, body in woken if route.startswith("/resume")]
    assert back == [["weights"], ["cuda_graph", "kv_cache"]]


async def test_many_cycles_bring_nothing_back_twice(agent: Slot, model: Model) -> None:
    first = await guardian(agent, model())
    for _ in range(3):
        agent.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
        await agent.until("i-a", State.READY)
        seen = len(agent.fleet.reports)
        agent.change("i-a", Desired.DORMANT)
        last = await agent.until("i-a", State.DORMANT, since=seen)
    assert last.pid == first.pid
    assert "not guardian-safe" not in last.cause


async def test_weights_of_another_revision_are_loaded_into_a_sleeper_and_recorded(agent: Slot, model: Model) -> None:
    await guardian(agent, model(1))
    other = replace(agent.wanted["i-a"].spec, uri=str(model(2)), revision="r2")
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK), spec=other, content_revision="r2")
    second = await agent.until("i-a", State.READY)
    assert second.fingerprint is not None
    assert second.fingerprint.content["revision"] == "r2"
    seen = len(agent.fleet.reports)
    agent.change("i-a", Desired.DORMANT)
    await agent.until("i-a", State.DORMANT, since=seen)
    seen = len(agent.fleet.reports)
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
    again = await agent.until("i-a", State.READY, since=seen)
    assert again.start is not None
    assert "agrees" in again.start.rungs[0].reason


async def test_a_drained_replica_finishes_its_requests_before_it_sleeps(agent: Slot, model: Model) -> None:
    agent.want(wanted(agent, model(), Desired.READY, odd={"token_seconds": 0.02}))
    report = await agent.until("i-a", State.READY)
    assert report.endpoint is not None
    request = asyncio.create_task(complete(report.endpoint.url, report.endpoint.served_name, max_tokens=40))
    await agent.until("i-a", State.READY, lambda i: i.requests_running == 1)
    agent.change("i-a", Desired.DRAINED)
    await agent.until("i-a", State.DRAINING)
    agent.change("i-a", Desired.DORMANT)
    await agent.until("i-a", State.DORMANT)
    got = (await request).json()["choices"][0]
    assert got["finish_reason"] == "length"
    assert len(got["text"].split()) == 40


async def test_requests_that_outlive_the_drain_are_cut_and_the_engine_sleeps(agent: Slot, model: Model) -> None:
    drain = Drain(timeout_seconds=0.3, on_timeout=OnTimeout.ABORT)
    agent.want(wanted(agent, model(), Desired.READY, odd={"token_seconds": 0.02}, drain=drain))
    report = await agent.until("i-a", State.READY)
    assert report.endpoint is not None
    request = asyncio.create_task(complete(report.endpoint.url, report.endpoint.served_name, max_tokens=100_000))
    await agent.until("i-a", State.READY, lambda i: i.requests_running == 1)
    agent.change("i-a", Desired.DRAINED)
    await agent.until("i-a", State.DRAINING)
    agent.change("i-a", Desired.DORMANT)
    await agent.until("i-a", State.DORMANT)
    assert (await request).json()["choices"][0]["finish_reason"] == "abort"
    modes = [body["mode"] for route, body in control(agent) if route == "/pause_generation"]
    assert modes == ["abort", "retract"]


async def test_a_reload_that_is_refused_leaves_its_reason_and_nothing_is_served(agent: Slot, model: Model) -> None:
    await guardian(agent, model(), odd={"refuses_reload": 1})
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
    report = await agent.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "configured" in report.failure.reason
    assert report.failure.retry_after is not None
    assert report.endpoint is None


async def test_a_host_copy_that_came_back_changed_is_found_by_its_digests_and_the_disk_is_read(
    agent: Slot, model: Model
) -> None:
    await guardian(agent, model(), level=1, odd={"backup_flips": True})
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.HOST_COPY, RungKind.DISK))
    report = await agent.until("i-a", State.READY)
    assert report.start is not None
    assert [(r.kind, r.ok) for r in report.start.rungs] == [(RungKind.HOST_COPY, False), (RungKind.DISK, True)]
    assert "model.layers.0.weight" in report.start.rungs[0].reason


async def test_a_peer_is_refused_with_the_reason_and_the_disk_is_read(agent: Slot, model: Model) -> None:
    await guardian(agent, model())
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.PEER_TCP, RungKind.DISK))
    report = await agent.until("i-a", State.READY)
    assert report.start is not None
    assert "takes no key" in report.start.rungs[0].reason
    assert report.source is not None
    assert report.source.addresses == {}
    assert "takes no key" in report.source.closed["tcp"]


async def test_an_engine_that_dies_of_a_call_is_failed_and_its_whole_tree_is_gone(agent: Slot, model: Model) -> None:
    agent.want(wanted(agent, model(), Desired.DORMANT, odd={"dies_in": "/release_memory_occupation"}))
    report = await agent.until("i-a", State.FAILED)
    assert report.failure is not None
    assert report.failure.retry_after is not None
    assert agent.marked() == []


async def test_a_sleeper_that_keeps_its_memory_is_named_not_guardian_safe(agent: Slot, model: Model) -> None:
    report = await guardian(agent, model(), odd={"no_saver": True})
    assert report.cause.startswith("not guardian-safe")


async def test_a_start_that_fails_says_why_and_leaves_no_process(agent: Slot, model: Model) -> None:
    agent.want(wanted(agent, model(), Desired.READY, odd={"start_error": "no kernel image is available"}))
    report = await agent.until("i-a", State.FAILED)
    assert report.failure is not None
    assert report.failure.retry_after is not None
    assert agent.marked() == []


async def test_a_start_that_is_never_ready_is_cut_when_it_is_no_longer_wanted(agent: Slot, model: Model) -> None:
    agent.want(wanted(agent, model(), Desired.READY, odd={"never_ready": True}))
    await agent.until("i-a", State.STARTING, lambda i: i.pid)
    agent.change("i-a", Desired.GONE)
    await agent.until("i-a", State.GONE)
    assert agent.marked() == []


async def test_a_level_that_the_process_was_not_started_for_fails_the_sleep_and_a_new_one_has_it(
    agent: Slot, model: Model
) -> None:
    agent.want(wanted(agent, model(), Desired.READY, level=2))
    await agent.until("i-a", State.READY)
    agent.change("i-a", Desired.DORMANT, level=1)
    report = await agent.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "cannot sleep at level 1" in report.failure.reason


async def test_a_killed_engine_is_failed_and_its_children_with_it(agent: Slot, model: Model) -> None:
    agent.want(wanted(agent, model(), Desired.READY))
    report = await agent.until("i-a", State.READY)
    os.kill(report.pid, signal.SIGKILL)
    await agent.until("i-a", State.FAILED)
    assert agent.marked() == []


async def test_a_stopped_engine_leaves_no_process_and_no_key(agent: Slot, model: Model) -> None:
    agent.want(wanted(agent, model(), Desired.READY))
    await agent.until("i-a", State.READY)
    agent.change("i-a", Desired.GONE)
    await agent.until("i-a", State.GONE)
    assert agent.marked() == []
    assert not (agent.directory / "state" / "i" / "i-a").exists()


async def test_an_agent_that_was_killed_wakes_what_its_predecessor_put_to_sleep(agent: Slot, model: Model) -> None:
    first = await guardian(agent, model())
    await agent.kill()
    await agent.up()
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
    report = await agent.until("i-a", State.READY)
    assert report.pid == first.pid
    assert await answer(report)
    assert "agrees" in (report.start.rungs[0].reason if report.start else "")


async def test_an_agent_killed_in_the_middle_of_a_wake_begins_again_and_brings_nothing_back_twice(
    agent: Slot, model: Model
) -> None:
    first = await guardian(agent, model())
    await agent.kill(signal.SIGTERM)
    await agent.up(RELIGHT_FAILPOINTS="agent.wake.after-proof=exit")
    agent.change("i-a", Desired.READY, rungs=rungs(RungKind.DISK))
    assert agent.process is not None
    await agent.process.wait()
    await agent.up()
    report = await agent.until("i-a", State.READY)
    assert report.pid == first.pid
    assert await answer(report)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--load-format=remote_instance",), "no --load-format"),
        (("--remote-instance-weight-loader-backend", "nccl"), "takes no key"),
        (("--admin-api-key=mine",), "Relight sets it"),
        (("--enable-mem",), "Relight sets it"),
        (("--enable-lora",), "no adapters"),
    ],
)
async def test_arguments_that_would_undo_a_sleep_or_open_the_engine_are_refused_by_name(
    agent: Slot, model: Model, args: tuple[str, ...], expected: str
) -> None:
    agent.want(wanted(agent, model(), Desired.READY, *args))
    report = await agent.until("i-a", State.FAILED)
    assert report.failure is not None
    assert expected in report.failure.reason
    assert report.failure.retry_after is None

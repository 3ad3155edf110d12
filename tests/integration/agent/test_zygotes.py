"""Engines are forked from a zygote; whatever is wrong with it, they start all the same and say why."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from relight.agent.engines.base import EngineCommand
from relight.agent.procfs import Procfs
from relight.agent.zygotes import calls
from relight.core.errors import Unavailable
from relight.core.records import Desired, InstanceAssignment, InstanceReport, Mode, RungKind
from relight.core.states import State
from support.agent import DEADLINE, Slot, complete, rungs

MakeSlot = Callable[..., Slot]
SOURCE = {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
"""The zygote belongs to the engine's own environment; a stub's has nothing but this tree."""


async def _up(make_slot: MakeSlot, **env: str) -> Slot:
    slot = make_slot(engines={"stub": {"zygote": {**SOURCE, **env}}})
    await slot.up()
    return slot


def _wanted(
    slot: Slot, *args: str, name: str = "i-a", device: str = "cpu-0", mode: Mode = Mode.NORMAL, **env: str
) -> InstanceAssignment:
    disk = rungs(RungKind.DISK)
    instance = replace(slot.instance(name, Desired.READY, *args, mode=mode, rungs=disk), devices=(device,))
    return replace(instance, spec=replace(instance.spec, env={**SOURCE, **env}))


async def _start(slot: Slot, mode: Mode = Mode.NORMAL) -> InstanceReport:
    slot.want(_wanted(slot, mode=mode))
    report = await slot.until("i-a", State.READY)
    assert report.start is not None
    assert report.start.ok
    assert report.start.mode is mode
    assert report.endpoint is not None
    answer = await complete(report.endpoint.url, report.endpoint.served_name)
    assert answer.status_code == 200
    return report


def _process(report: InstanceReport) -> str:
    assert report.start is not None
    return report.start.process


async def _zygote(slot: Slot, other_than: int = 0) -> int:
    """The pid of a zygote that can be forked from."""
    path = slot.directory / "state" / "zygotes" / "stub" / "s"
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                described = await calls.describe(path)
            except calls.Stale:
                described = None
            if described is not None and described.pid != other_than:
                return described.pid
            # Another process's state: there is no event to wait for.
            await asyncio.sleep(0.02)


async def test_an_engine_is_forked_and_shows_its_own_command_line_marks_and_session(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    report = await _start(slot)
    assert _process(report).startswith("forked from a zygote")
    procfs = Procfs()
    stat = procfs.stat(report.pid)
    assert stat is not None
    assert stat.session == report.pid
    assert procfs.environ(report.pid)["RELIGHT_INSTANCE"] == "i-a"
    assert _command_line(report.pid)[:3] == [sys.executable.encode(), b"-m", b"relight.agent.engines.stub_server"]
    assert re.search(r"it shares [1-9]\d* MiB with what it forked", _process(report))


async def test_a_cold_start_is_spawned_although_a_zygote_stands_by(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    await _zygote(slot)
    assert _process(await _start(slot, mode=Mode.COLD)).startswith("spawned, as the mode is cold")


async def test_two_engines_of_one_zygote_live_apart_and_outlive_it(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    first = await _start(slot)
    slot.want(slot.wanted["i-a"], _wanted(slot, name="i-b", device="cpu-1"))
    second = await slot.until("i-b", State.READY)
    zygote = await _zygote(slot)
    os.kill(zygote, signal.SIGKILL)
    await _zygote(slot, other_than=zygote)
    os.kill(second.pid, signal.SIGKILL)
    failed = await slot.until("i-b", State.FAILED)
    assert failed.failure is not None
    assert "signal 9" in failed.failure.reason
    assert first.endpoint is not None
    assert (await complete(first.endpoint.url, first.endpoint.served_name)).status_code == 200


async def test_a_forked_engine_that_exits_is_reported_with_its_status(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    slot.want(_wanted(slot, 'start_error="no luck"', "exit_code=7"))
    report = await slot.until("i-a", State.FAILED)
    assert report.failure is not None
    assert "status 7" in report.failure.reason


async def test_a_zygote_that_dies_in_the_middle_of_a_fork_costs_only_the_fork(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    zygote = await _zygote(slot)
    # Stopped, it has the request and does not answer: then it dies with it.
    os.kill(zygote, signal.SIGSTOP)
    slot.want(_wanted(slot))
    await slot.until("i-a", State.STARTING)
    await _asked(slot)
    os.kill(zygote, signal.SIGKILL)
    report = await slot.until("i-a", State.READY)
    assert _process(report).startswith("spawned: the zygote")
    await _zygote(slot, other_than=zygote)


async def _asked(slot: Slot) -> None:
    """Returns when somebody is connected to the zygote's socket and was not accepted yet."""
    path = str(slot.directory / "state" / "zygotes" / "stub" / "s.new")
    await _until(lambda: any(path in line and " 02 " in line for line in _sockets()))


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            if holds():
                return
            # Other processes' state: there is no event to wait for.
            await asyncio.sleep(0.02)


def _sockets() -> list[str]:
    return Path("/proc/net/unix").read_text().splitlines()


def _command_line(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _gone(pid: int) -> bool:
    stat = Procfs().stat(pid)
    return stat is None or stat.dead


async def test_a_thread_that_appears_in_the_zygote_is_named_and_another_zygote_takes_its_place(
    make_slot: MakeSlot,
) -> None:
    slot = await _up(make_slot)
    zygote = await _zygote(slot)
    os.kill(zygote, signal.SIGUSR1)
    report = await _start(slot)
    assert "2 threads" in _process(report)
    await _zygote(slot, other_than=zygote)
    slot.want(_wanted(slot, name="i-b", device="cpu-1"), slot.wanted["i-a"])
    assert _process(await slot.until("i-b", State.READY)).startswith("forked from a zygote")


@pytest.mark.parametrize("fault", ["thread", "import"])
async def test_an_import_that_leaves_no_process_to_fork_from_is_told_as_the_reason(
    make_slot: MakeSlot, fault: str
) -> None:
    slot = await _up(make_slot, STUB_ZYGOTE=fault)
    said = _process(await _start(slot))
    assert said.startswith("spawned: the zygote did not come up: the engine exited with status")


async def test_a_changed_environment_is_noticed_before_the_next_fork(make_slot: MakeSlot) -> None:
    slot = make_slot()
    packages = slot.directory / "packages"
    packages.mkdir()
    path = f"{SOURCE['PYTHONPATH']}:{packages}"
    slot.config["engines"] = {"stub": {"zygote": {"PYTHONPATH": path}}}
    await slot.up()
    zygote = await _zygote(slot)
    (packages / "engine-2.0.dist-info").mkdir()
    slot.want(_wanted(slot, PYTHONPATH=path))
    report = await slot.until("i-a", State.READY)
    assert "environment was changed" in _process(report)
    await _zygote(slot, other_than=zygote)


async def test_a_model_whose_environment_is_read_at_import_is_spawned_and_the_variable_named(
    make_slot: MakeSlot,
) -> None:
    slot = await _up(make_slot)
    slot.want(_wanted(slot, OMP_PROC_BIND="true"))
    assert "OMP_PROC_BIND" in _process(await slot.until("i-a", State.READY))


async def test_the_next_agent_takes_the_zygote_over(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    zygote = await _zygote(slot)
    await slot.kill()
    await slot.up()
    assert f"(pid {zygote}," in _process(await _start(slot))


async def _prepared(slot: Slot) -> None:
    path = slot.directory / "state" / "zygotes" / "stub" / "s"
    async with asyncio.timeout(DEADLINE):
        while True:
            if (await calls.describe(path)).models:
                return
            await asyncio.sleep(0.02)


async def test_the_second_engine_of_a_model_is_forked_from_one_that_has_read_it(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    assert _process(await _start(slot)).startswith("forked from a zygote (")
    await _prepared(slot)
    slot.want(slot.wanted["i-a"], _wanted(slot, name="i-b", device="cpu-1"))
    report = await slot.until("i-b", State.READY)
    assert _process(report).startswith("forked from a zygote of its model")
    assert Procfs().environ(report.pid)["RELIGHT_INSTANCE"] == "i-b"


async def test_a_models_fork_that_died_is_forked_around(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    await _start(slot)
    await _prepared(slot)
    zygote = await _zygote(slot)
    model = next(s.pid for s in Procfs().processes() if s.parent == zygote)
    os.kill(model, signal.SIGKILL)
    slot.want(slot.wanted["i-a"], _wanted(slot, name="i-b", device="cpu-1"))
    assert _process(await slot.until("i-b", State.READY)).startswith("forked from a zygote (")


async def test_a_models_fork_ends_with_its_zygote(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    await _start(slot)
    await _prepared(slot)
    zygote = await _zygote(slot)
    model = next(s.pid for s in Procfs().processes() if s.parent == zygote)
    os.kill(zygote, signal.SIGKILL)
    await _until(lambda: _gone(model))


async def test_a_child_that_nobody_answers_for_ends_by_itself(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    await _zygote(slot)
    path = slot.directory / "state" / "zygotes" / "stub" / "s"
    argv = (sys.executable, "-m", "relight.agent.engines.stub_server", "--directory", str(slot.directory))
    command = EngineCommand(argv, {}, slot.directory)
    seen: list[int] = []

    async def refuse(pid: int) -> None:
        seen.append(pid)
        raise Unavailable("the supervisor went away")

    with pytest.raises(Unavailable):
        await calls.fork(path, command, slot.directory / "child.log", refuse)
    await _until(lambda: _gone(seen[0]))


async def test_bad_requests_are_refused_and_the_zygote_lives_on(make_slot: MakeSlot) -> None:
    slot = await _up(make_slot)
    zygote = await _zygote(slot)
    path = str(slot.directory / "state" / "zygotes" / "stub" / "s")
    for line in (
        b"", b"nonsense\n", b"[]\n", b'{"fork": {}}\n', b'{"fork": {"argv": [], "env": {}, "cwd": "/", "log": "/x"}}\n',
        b'{"fork": {"argv": ["p", "-m", "m"], "env": {"A": 1}, "cwd": "/", "log": "/x"}}\n', b'{"else": 1}\n',
    ):  # fmt: skip
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DEADLINE)
            sock.connect(path)
            sock.sendall(line)
            sock.shutdown(socket.SHUT_WR)
            answer = await asyncio.to_thread(sock.recv, 65536)
        assert b"refused" in answer, line
        assert b"expected" in answer or b"Expecting" in answer, line
    assert await _zygote(slot) == zygote

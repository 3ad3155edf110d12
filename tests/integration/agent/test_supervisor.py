"""The supervisor alone: whole trees end, wrong requests change nothing, nothing is left after a shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relight.agent.procfs import Procfs
from relight.agent.supervisor.client import Exit, SupervisorClient, launch
from relight.core.errors import Conflict, InvalidInput, NotFound, Unavailable

SLEEPER = (sys.executable, "-c", "import signal; signal.pause()")
STUBBORN = (
    sys.executable,
    "-c",
    "import os, signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "print('up', flush=True)\n"
    "signal.pause()",
)


class Desk:
    """A supervisor process and one client."""

    def __init__(self, root: Path) -> None:
        self.root, self.socket = root, root / "s" / "x.sock"
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.client = SupervisorClient(self.exits.put_nowait)
        self.process: Any = None

    async def up(self) -> None:
        self.process = launch(self.socket, self.root / "journal", self.root / "log")
        self.client = SupervisorClient(self.exits.put_nowait)
        async with asyncio.timeout(20):
            while True:
                try:
                    await self.client.connect(self.socket)
                    return
                except Unavailable:
                    await asyncio.sleep(0.01)

    async def spawn(self, name: str, argv: tuple[str, ...] = SLEEPER) -> Any:
        return await self.client.spawn(name, argv, {}, self.root, self.root / f"{name}.log")

    async def printed(self, name: str, lines: int) -> None:
        async with asyncio.timeout(20):
            while True:
                if (self.root / f"{name}.log").read_text().count("\n") >= lines:
                    return
                await asyncio.sleep(0.01)

    def marked(self) -> list[int]:
        return [s.pid for s, _ in Procfs().marked(self.client.owner)]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="rl-") as root:
        desk = Desk(Path(root))
        await desk.up()
        yield desk
        if not desk.client.lost.is_set():
            await desk.client.shutdown(0)
        await desk.client.close()
        desk.process.wait(20)
        assert desk.marked() == []


async def test_an_exit_is_told_with_its_status(desk: Desk) -> None:
    running = await desk.spawn("i-a", (sys.executable, "-c", "raise SystemExit(7)"))
    exit_ = await desk.exits.get()
    assert (exit_.instance, exit_.pid, exit_.code) == ("i-a", running.pid, 7)
    assert await desk.client.list() == ()


async def test_a_tree_that_ignores_sigterm_is_killed_whole_after_the_grace(desk: Desk) -> None:
    await desk.spawn("i-a", STUBBORN)
    await desk.printed("i-a", 2)
    assert len(desk.marked()) == 2
    await desk.client.end("i-a", 0.05)
    assert desk.marked() == []
    exit_ = await desk.exits.get()
    assert exit_.code == -signal.SIGKILL
    assert len(exit_.killed) == 1


async def test_a_second_process_of_one_instance_is_a_conflict(desk: Desk) -> None:
    await desk.spawn("i-a")
    with pytest.raises(Conflict):
        await desk.spawn("i-a")
    assert len(await desk.client.list()) == 1


async def test_a_program_that_is_not_there_is_refused_by_name(desk: Desk) -> None:
    with pytest.raises(InvalidInput, match="/not/there"):
        await desk.spawn("i-a", ("/not/there",))
    assert await desk.client.list() == ()


async def test_ending_what_does_not_run_is_done_already(desk: Desk) -> None:
    await desk.client.end("i-none", 1.0)
    with pytest.raises(NotFound):
        await desk.client._call("signal", instance="i-none", signal=15)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"op": "dance"}, "op"),
        ({"op": "spawn", "instance": 1, "argv": ["x"], "env": {}, "cwd": "/", "log": "/l"}, "instance"),
        ({"op": "spawn", "instance": "i", "argv": [], "env": {}, "cwd": "/", "log": "/l"}, "argv"),
        ({"op": "spawn", "instance": "i", "argv": ["x"], "env": {"A": 1}, "cwd": "/", "log": "/l"}, "env"),
        ({"op": "end", "instance": "i", "grace_seconds": -1}, "grace_seconds"),
        ({"op": "end", "instance": "i", "grace_seconds": 1, "force": True}, "force"),
        ({"op": "list", "id": 4, "all": 1}, "all"),
    ],
)
async def test_a_wrong_request_is_refused_naming_the_field(desk: Desk, request_: dict[str, Any], field: str) -> None:
    reader, writer = await asyncio.open_unix_connection(str(desk.socket))
    writer.write(b'{"hello": "relight-supervisor", "version": 1}\n' + json.dumps(request_).encode() + b"\n")
    await reader.readline()
    reply = json.loads(await reader.readline())
    writer.close()
    assert reply["ok"] is False
    assert field in reply["error"]
    assert await desk.client.list() == ()


@pytest.mark.parametrize("line", [b'{"hello": "relight-supervisor", "version": 2}', b"garbage", b'{"op": "list"}'])
async def test_a_peer_of_another_version_is_refused_and_cut_off(desk: Desk, line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(desk.socket))
    writer.write(line + b"\n")
    await reader.readline()
    assert json.loads(await reader.readline())["ok"] is False
    assert await reader.read() == b""
    writer.close()


async def test_a_second_supervisor_on_one_journal_ends_at_once(desk: Desk) -> None:
    second = launch(desk.root / "s" / "y.sock", desk.root / "journal", desk.root / "log2")
    assert await asyncio.to_thread(second.wait, 20) == 2
    assert "another supervisor" in (desk.root / "log2").read_text()


async def test_the_next_supervisor_adopts_by_pid_and_start_time_and_kills_strays(desk: Desk) -> None:
    kept = await desk.spawn("i-a")
    lost = await desk.spawn("i-b")
    end = os.pidfd_open(lost.pid)
    os.kill(desk.process.pid, signal.SIGKILL)
    await asyncio.to_thread(desk.process.wait, 20)
    await desk.client.close()
    # As if the supervisor had died between starting i-b and writing it down.
    journal = desk.root / "journal"
    journal.write_bytes(b"\n".join(line for line in journal.read_bytes().split(b"\n") if b'"i-b"' not in line))
    await desk.up()
    assert await desk.client.list() == (kept,)
    # Killed, and gone as soon as the kernel is done with it.
    assert await asyncio.to_thread(select.select, [end], [], [], 20) == ([end], [], [])
    os.close(end)
    await desk.client.end("i-a", 5.0)
    assert (await desk.exits.get()).code is None

"""Who killed an engine is told apart, by real cgroups: the kernel for want of memory, or an end of the container."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.agent.conftest import fleet, make_slot  # noqa: F401 - fixtures

from relight.core.records import Desired
from relight.core.states import State
from support.agent import Slot

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(90)]

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 96 << 20


@contextlib.contextmanager
def cgroup(parent: Path) -> Iterator[Path]:
    """A cgroup of this test's own below a hierarchy's root. Where none may be made, the run says so and goes on."""
    made = parent / f"relight-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {parent}: {error.strerror}")
    try:
        yield made
    finally:
        made.rmdir()


def memory_root() -> Path:
    """Where memory is limited: the one hierarchy of v2, or v1's own."""
    v2 = CGROUPS / "cgroup.controllers"
    return CGROUPS if v2.exists() and "memory" in v2.read_text().split() else CGROUPS / "memory"


def kill_root() -> Path:
    found = [p for p in (CGROUPS, CGROUPS / "unified") if (p / "cgroup.controllers").exists()]
    return found[0] if found else CGROUPS / "unified"


@contextlib.asynccontextmanager
async def supervisor(slot: Slot, group: Path) -> AsyncIterator[Callable[[], asyncio.subprocess.Process]]:
    """The first process of a container: a supervisor in this cgroup, started again when it ends."""
    state = slot.directory / "state"
    (state / "s").mkdir(parents=True, exist_ok=True)
    line = (
        f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m relight.agent.supervisor"
        f" --socket {state}/s/supervisor.sock --journal {state}/supervisor.journal"
    )
    running: list[asyncio.subprocess.Process] = []
    over = asyncio.Event()

    async def tend() -> None:
        while not over.is_set():
            with (slot.directory / "supervisor.log").open("ab") as log:
                running.append(await asyncio.create_subprocess_exec("sh", "-c", line, stdout=log, stderr=log))
            await running[-1].wait()

    tending = asyncio.create_task(tend())
    try:
        yield lambda: running[-1]
    finally:
        over.set()
        with contextlib.suppress(ProcessLookupError):
            running[-1].terminate()
        await tending


async def test_an_engine_that_the_kernel_killed_for_want_of_memory_is_told_as_that(
    make_slot: Callable[..., Slot],  # noqa: F811
) -> None:
    slot = make_slot(supervisor_beside=True)
    with cgroup(memory_root()) as group:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(LIMIT_BYTES))
        async with supervisor(slot, group):
            await slot.up()
            slot.want(slot.instance("i-a", Desired.READY, f"weight_bytes={4 * LIMIT_BYTES}"))
            failed = await slot.until("i-a", State.FAILED)
            assert failed.failure is not None
            assert "out of memory" in failed.failure.reason
            slot.want(slot.instance("i-b", Desired.READY, "run_for=0.1"))
            other = await slot.until("i-b", State.FAILED)
            assert other.failure is not None
            assert "out of memory" not in other.failure.reason
            slot.want()


async def test_an_engine_whose_container_was_killed_is_told_as_that(
    make_slot: Callable[..., Slot],  # noqa: F811
) -> None:
    slot = make_slot(supervisor_beside=True, health_seconds=5.0)
    with cgroup(kill_root()) as group:
        async with supervisor(slot, group) as first:
            await slot.up()
            slot.want(slot.instance("i-a", Desired.READY))
            await slot.until("i-a", State.READY)
            before = first()
            (group / "cgroup.kill").write_text("1")
            await before.wait()
            failed = await slot.until("i-a", State.FAILED)
            assert failed.failure is not None
            assert "container was killed" in failed.failure.reason
            slot.want()

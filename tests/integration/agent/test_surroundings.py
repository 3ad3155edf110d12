"""What an agent learns of where its engines run, asked through a real supervisor."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relight.agent.engines.base import EngineCommand
from relight.agent.link import SupervisorLink
from relight.agent.supervisor.client import Exit, SupervisorClient
from relight.agent.surroundings import Surroundings
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput

SOURCES = Path(__file__).parents[3] / "src"


@dataclass
class Side:
    """An agent's part of it: its link to a supervisor, and what it knows of the engines' side."""

    root: Path
    link: SupervisorLink
    around: Surroundings


@pytest.fixture
async def side(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Side]:
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
    monkeypatch.setenv("RELIGHT_SECRET", "of the agent's")
    # Short: the kernel allows 107 bytes for a socket's path.
    with tempfile.TemporaryDirectory(prefix="rs-") as name:
        root = Path(name)
        found: list[Surroundings] = []

        def on_exit(exit_: Exit) -> None:
            assert all(s.on_exit(exit_) for s in found)

        link = SupervisorLink(root / "s" / "x.sock", root / "journal", root / "log", SystemClock(), on_exit)
        await link.open()
        found.append(Surroundings(link, root / "asks", here=False))
        await found[0].learn()
        yield Side(root, link, found[0])
        client = SupervisorClient(lambda _: None)
        await client.connect(root / "s" / "x.sock")
        await client.shutdown(0)
        await client.close()
        await link.close()


async def test_an_interpreter_answers_with_the_variables_that_engines_have(side: Side) -> None:
    seen = await side.around.ask(sys.executable, {"environment": True})
    assert seen["versions"]["python"] == sys.version.split()[0]
    assert seen["missing"] == {}
    assert not list((side.root / "asks").iterdir())


async def test_of_a_container_all_variables_are_inherited_but_relights_own(side: Side) -> None:
    assert side.around.variables["LD_LIBRARY_PATH"] == "/usr/local/cuda/lib64"
    assert "RELIGHT_SECRET" not in side.around.variables


async def test_on_a_host_engines_inherit_how_to_find_their_tools_and_nothing_else(side: Side) -> None:
    around = Surroundings(side.link, side.root / "asks", here=True)
    await around.learn()
    assert around.variables["PATH"] == os.environ["PATH"]
    assert "LD_LIBRARY_PATH" not in around.variables


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false", "/bin/echo"])
async def test_what_cannot_answer_is_named_and_leaves_nothing(side: Side, python: str) -> None:
    with pytest.raises(InvalidInput):
        await side.around.ask(python, {"environment": True})
    client = SupervisorClient(lambda _: None)
    await client.connect(side.root / "s" / "x.sock")
    assert await client.list() == ()
    await client.close()


async def test_what_an_earlier_agent_asked_is_ended_and_other_processes_are_not(side: Side) -> None:
    sleeper = (sys.executable, "-c", "import signal; signal.pause()")
    for name in ("ask-7", "i-1"):
        await side.link.spawn(name, EngineCommand(sleeper, {}, side.root), side.root / f"{name}.log")
    client = SupervisorClient(lambda _: None)
    await client.connect(side.root / "s" / "x.sock")
    left = await side.around.take_over(await client.list())
    assert [r.instance for r in left] == ["i-1"]
    assert [r.instance for r in await client.list()] == ["i-1"]
    await client.end("i-1", 0)
    await client.close()

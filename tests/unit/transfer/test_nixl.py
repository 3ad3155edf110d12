"""What the nixl transport does about NIXL's traps, over a stand-in for it; `make test-nixl` has the real one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from relight.core.clock import VirtualClock
from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.transfer.extents import Extent, Extents
from relight.transfer.segment import HOST
from relight.transfer.transports import nixl, nixl_agent
from relight.transfer.transports.base import Question
from relight.transfer.transports.nixl_agent import Agent
from tests.unit.transfer import fake_nixl
from tests.unit.transfer.conftest import Rig, bring


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nixl_agent, "_api", lambda: fake_nixl.api)
    yield
    fake_nixl.FakeAgent.stuck = False


class HastyClock(VirtualClock):
    """A second passes at each look: deadlines come without waiting."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_the_card_is_pinned_for_the_moment_in_which_the_agent_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, str | None]] = []

    class Looking(fake_nixl.FakeAgent):
        def __init__(self, *arguments: object) -> None:
            seen.append((os.environ.get("UCX_NET_DEVICES"), os.environ.get("UCX_TLS")))
            super().__init__(*arguments)

    monkeypatch.setattr(fake_nixl.api, "nixl_agent", Looking)
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    monkeypatch.delenv("UCX_TLS", raising=False)
    Agent("mlx5_3:1").metadata()
    assert seen == [("mlx5_3:1", "ib,cuda,self")]
    assert os.environ["UCX_NET_DEVICES"] == "all"
    assert "UCX_TLS" not in os.environ


def test_a_refill_and_the_next_one_share_one_agent(rig: Rig) -> None:
    listener = nixl.NixlListener(Agent("fake0:1"), "127.0.0.1")
    landing = nixl.Landing(Agent("fake0:1"), rig.target)
    before = len(fake_nixl.opened)
    try:
        address = listener.register(rig.source)
        for _ in range(2):
            bring(rig, lambda: nixl.NixlReader(address, rig.grant(), "i-source", 5.0, landing))
    finally:
        listener.release()
    assert len(fake_nixl.opened) == before + 2


def test_a_read_that_does_not_end_costs_the_agent_and_the_next_reader_gets_another(rig: Rig) -> None:
    listener = nixl.NixlListener(Agent("fake0:1"), "127.0.0.1")
    address = listener.register(rig.source)
    landing = nixl.Landing(Agent("fake0:1"), rig.target)
    try:
        reader = nixl.NixlReader(address, rig.grant(), "i-source", 5.0, landing, HastyClock())
        other = nixl.NixlReader(address, rig.grant(), "i-source", 5.0, landing)
        fake_nixl.FakeAgent.stuck = True
        reader.ask(Question(0, 1, 0, 4096), rig.target.view[:4096])
        with pytest.raises(RemoteFault, match="stalled on fake0:1"):
            reader.fill(4096)
        before = len(fake_nixl.opened)
        reader.close()
        fake_nixl.FakeAgent.stuck = False
        other.ask(Question(0, 1, 0, 4096), rig.target.view[:4096])
        with pytest.raises(RemoteFault, match="the agent on fake0:1 was given up"):
            other.fill(4096)
        assert not any(rig.target.view[:4096]), "nothing lands after it was given up"
        got = bring(rig, lambda: nixl.NixlReader(address, rig.grant(), "i-source", 5.0, landing))
        assert got.bytes == rig.source.manifest.weight_bytes
        assert len(fake_nixl.opened) == before + 1
        other.close()
    finally:
        listener.release()


def test_a_peer_that_takes_the_name_of_another_is_refused() -> None:
    ours, theirs = Agent("fake0:1"), Agent("fake1:1")
    _, region = theirs.register(Extents([Extent(0, 1 << 40, 4096)]), HOST)
    metadata = theirs.metadata()
    met = ours.meet(region.agent, metadata)
    with pytest.raises(InvalidInput, match="another agent's"):
        ours.meet("relight-somebody", metadata)
    with pytest.raises(InvalidInput, match="differs from what is in use"):
        ours.meet(region.agent, theirs.metadata())
    ours.part(met)
    with pytest.raises(InvalidInput, match="another agent's"):
        ours.meet("relight-somebody", metadata)
    assert ours.meet(region.agent, theirs.metadata()) >= 0


def test_metadata_that_is_none_is_the_peers_fault() -> None:
    with pytest.raises(InvalidInput, match="does not take its metadata"):
        Agent("fake0:1").meet("relight-x", b"\x80\x04.")


def test_what_was_registered_is_read_no_more_after_its_source_sleeps(rig: Rig) -> None:
    listener = nixl.NixlListener(Agent("fake0:1"), "127.0.0.1")
    address = listener.register(rig.source)
    landing = nixl.Landing(Agent("fake0:1"), rig.target)
    reader = nixl.NixlReader(address, rig.grant(), "i-source", 5.0, landing)
    allowed = threading.Event()
    rig.source.pace.wait = lambda count: allowed.set()  # the source's pace comes after its permission
    reader.ask(Question(0, 1, 0, 4096), rig.target.view[:4096])
    assert allowed.wait(5)
    listener.release()
    with pytest.raises(RemoteFault, match="failed: ERR"):
        reader.fill(4096)
    reader.close()


def test_without_a_wheel_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(nixl_agent, "WHEELS", ("nixl_of_nobody",))
    nixl_agent._api.cache_clear()
    assert not nixl_agent.installed()
    with pytest.raises(LocalFault, match="needs the wheel nixl-cu12 or nixl-cu13: nixl_of_nobody"):
        Agent("fake0:1").metadata()

"""A copy of the host tier: reads a real source, serves what it proved, and outlives the source; by real transports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.agent.hostcopy.copy import HostCopy, Place
from relight.agent.hostcopy.orders import Fill, dump, named, parse
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput
from relight.core.records import HostContent, Rung, RungKind, SourceRef
from relight.plugin.orders import Order, Restored
from relight.transfer import grants
from support.hostcopies import ask, until
from support.weights import CANARY, SIZES, Engine

CONTENT = HostContent("default/m", "r1", "as it is started", "1", "cpu")
ROOM = 1 << 30
PATIENCE = 30.0


class Copy:
    """A copy in this process, and the moment at which its fill ended."""

    def __init__(self, directory: Path, name: str = "host-a", rate: int | None = None) -> None:
        directory.mkdir(mode=0o700)
        self.ended = threading.Event()
        self.made = HostCopy(Place(name, directory / "s", "127.0.0.1", None, rate), SystemClock(), self.ended.set)

    def fill(self, *rungs: Rung, room: int = ROOM, revision: str = "r1") -> dict[str, Any]:
        self.ended.clear()
        content = HostContent(CONTENT.model, revision, CONTENT.runtime, "1", "cpu")
        self.made.fill(Fill(content, room, rungs))
        assert self.ended.wait(PATIENCE)
        return self.made.describe()


def reference(said: dict[str, Any], transport: str, receiver: str = "i-b") -> SourceRef:
    """A reader's reference to a copy that described itself so."""
    offer = said["source"]
    claims = grants.Claims(
        said["copy"], offer["generation"], offer["manifest_digest"], receiver, SystemClock().now() + 60
    )
    return SourceRef(
        said["copy"], "a", offer["generation"], offer["manifest_digest"], "", offer["addresses"][transport],
        grants.mint(offer["grant_key"], claims),
    )  # fmt: skip


def rung(kind: RungKind, *sources: SourceRef) -> Rung:
    return Rung(kind, "a test", sources[0], sources[1:])


def of_engine(engine: Engine, kind: RungKind = RungKind.PEER_SHM) -> Rung:
    shm, tcp, grant = engine.offer()
    address = shm if kind.transport == "shm" else tcp
    return rung(kind, SourceRef("i-a", "a", 1, engine.residency.source.manifest_digest, "", address, grant))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine("i-a", tmp_path / "a")
    yield engine
    engine.residency.close_source(0.0)


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Callable[..., Copy]]:
    made: list[Copy] = []

    def make(name: str = "host-a", **more: Any) -> Copy:
        made.append(Copy(tmp_path / name, name, **more))
        return made[-1]

    yield make
    for copy in made:
        copy.made.close()


@pytest.mark.parametrize("kind", [RungKind.HOST_SHM, RungKind.HOST_TCP])
def test_an_engine_wakes_from_a_copy_whose_source_has_died_byte_for_byte(source, copies, tmp_path, kind) -> None:
    before = bytes(source.segment.view)
    said = copies().fill(of_engine(source))
    source.residency.close_source(0.0)
    sleeper = Engine("i-b", tmp_path / "b")
    sleeper.residency.sleep(2)
    ref = reference(said, kind.transport)
    detail = sleeper.wake(kind, address=ref.address, grant=ref.grant, name=ref.instance)
    sleeper.residency.resume()
    assert bytes(sleeper.segment.view) == before
    assert sleeper.residency.source.manifest.canary == CANARY
    assert (said["state"], said["reason"], str(kind) in detail) == ("ready", "", True)


def test_a_copy_is_made_of_another_copy_by_tcp(source, copies) -> None:
    first = copies("host-a").fill(of_engine(source))
    second = copies("host-b").fill(rung(RungKind.HOST_TCP, reference(first, "tcp")))
    assert second["state"] == "ready"
    assert second["source"]["content_digest"] == first["source"]["content_digest"]


def test_a_bitten_byte_at_the_source_never_becomes_a_copy(source, copies) -> None:
    asked = of_engine(source)
    source.segment.view[12_345] = source.segment.view[12_345] ^ 1
    said = copies().fill(asked)
    assert said["state"] == "failed"
    assert "digest" in said["reason"]
    assert said["source"] is None


def test_a_failed_rung_is_followed_by_the_next_and_a_failed_copy_may_be_asked_again(source, copies) -> None:
    copy = copies()
    gone = rung(RungKind.PEER_SHM, SourceRef("i-gone", "a", 1, "", "", "unix:/nowhere/s", "x"))
    assert copy.fill(gone)["state"] == "failed"
    assert copy.fill(gone, of_engine(source, RungKind.PEER_TCP))["state"] == "ready"


def test_what_does_not_fit_into_the_budget_is_refused_before_a_byte_is_read(source, copies) -> None:
    said = copies().fill(of_engine(source), room=1 << 20)
    assert "left of the budget" in said["reason"]


def test_another_revision_than_asked_for_is_refused_by_its_field(source, copies) -> None:
    assert "content.revision" in copies().fill(of_engine(source), revision="r2")["reason"]


def test_a_grant_of_somebody_else_reads_nothing(source, copies) -> None:
    shm, _, _ = source.offer()
    said = copies().fill(rung(RungKind.PEER_SHM, SourceRef("i-a", "a", 1, "", "", shm, "forged")))
    assert said["state"] == "failed"


@pytest.mark.parametrize("broken", [
    None, [], {}, {"content": {}, "most_bytes": 1, "rungs": []}, "most_bytes", "kind", "no source", "disk", "number",
])  # fmt: skip
def test_a_bad_order_is_refused_field_by_field(broken: object) -> None:
    good = dump(Fill(CONTENT, ROOM, (rung(RungKind.PEER_TCP, SourceRef("i", "a", 1, "", "", "tcp:h:1", "g")),)))
    assert parse(good).content == CONTENT
    match broken:
        case "most_bytes":
            good["most_bytes"] = True
        case "kind":
            good["rungs"][0]["kind"] = "peer_rdma"
        case "no source":
            good["rungs"][0]["sources"] = []
        case "disk":
            good["rungs"][0]["kind"] = "disk"
        case "number":
            good["rungs"][0]["sources"][0]["generation"] = "1"
        case _:
            good = broken  # type: ignore[assignment]
    with pytest.raises(InvalidInput) as refused:
        parse(good)
    assert refused.value.errors


@pytest.mark.parametrize("name", ["i-a", "host-/../x", "host-A", ""])
def test_a_copy_has_a_name_of_its_own_kind(name: str) -> None:
    with pytest.raises(InvalidInput):
        named(name)


def test_the_process_answers_refuses_and_ends_without_a_trace(source, tmp_path) -> None:
    directory = tmp_path / "p"
    directory.mkdir(mode=0o700)
    argv = [sys.executable, "-m", "relight.agent.hostcopy", "--name", "host-p", "--directory", str(directory)]
    process = subprocess.Popen([*argv, "--host", "127.0.0.1"], env={**os.environ, "PYTHONPATH": "src:."})
    try:
        assert ask(directory / "c", {"describe": {}}, PATIENCE)["state"] == "empty"
        for line in (b"{", b"[]", json.dumps({"fill": {}}).encode(), b'{"describe": {}, "fill": {}}'):
            assert ask(directory / "c", line, PATIENCE)["code"] == "invalid-input"
        ask(directory / "c", {"fill": dump(Fill(CONTENT, ROOM, (of_engine(source),)))}, PATIENCE)
        said = until(lambda: ask(directory / "c", {"describe": {}}, PATIENCE), lambda s: s["state"] == "ready")
        assert said["content"] == dump(Fill(CONTENT, ROOM, ()))["content"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert not (directory / "s").exists()


def _share(sleeper: Engine, said: dict[str, Any]) -> Restored:
    order = Order(RungKind.HOST_SHM, "r1", (reference(said, "shm"),), share=True)
    return sleeper.residency.refill(order, lambda progress: None)


def test_an_engine_that_shares_a_copy_wakes_without_a_byte_of_its_own_and_gives_it_back_asleep(
    source, copies, tmp_path
) -> None:  # fmt: skip
    before = bytes(source.segment.view)
    copy = copies()
    said = copy.fill(of_engine(source))
    sleeper = Engine("i-b", tmp_path / "b")
    sleeper.residency.sleep(2)
    got = _share(sleeper, said)
    assert (got.bytes, [p.name for p in got.phases]) == (0, ["map"])
    assert got.detail == "host_shm: host-a's own pages, proven by it and frozen"
    sleeper.residency.resume()
    assert bytes(sleeper.segment.view) == before
    assert sleeper.segment.resident_bytes() == 0
    assert sleeper.residency.source.manifest.canary == CANARY
    assert copy.made.describe()["readers"] == 1
    # Others copy from it as from any engine, and it copies from others after a sleep.
    reader = Engine("i-c", tmp_path / "c")
    reader.residency.sleep(2)
    shm, _, grant = sleeper.offer()
    reader.wake(RungKind.PEER_SHM, address=shm, grant=grant, name="i-b")
    assert bytes(reader.segment.view) == before
    sleeper.residency.close_source(5.0)
    sleeper.residency.sleep(2)
    until(lambda: copy.made.describe()["readers"], lambda readers: readers == 0)
    ref = reference(said, "tcp")
    sleeper.wake(RungKind.HOST_TCP, address=ref.address, grant=ref.grant, name=ref.instance)
    assert bytes(sleeper.segment.view) == before
    assert sleeper.segment.resident_bytes() >= sum(SIZES)


def test_a_copy_that_cannot_be_shared_is_copied_and_the_reason_told(source, copies, tmp_path) -> None:
    said = copies().fill(of_engine(source))
    sleeper = Engine("i-b", tmp_path / "b", cards=1)
    sleeper.residency.sleep(2)
    got = _share(sleeper, said)
    assert got.bytes == sum(SIZES)
    assert got.detail.endswith("; not shared: to register them with an RDMA card would copy every page")


def test_a_shared_refill_that_comes_to_nothing_leaves_the_copy_without_a_reader(source, copies, tmp_path) -> None:
    copy = copies()
    sleeper = Engine("i-b", tmp_path / "b")
    sleeper.residency.sleep(2)
    _share(sleeper, copy.fill(of_engine(source)))
    sleeper.residency.suspend()
    until(lambda: copy.made.describe()["readers"], lambda readers: readers == 0)
    assert sleeper.segment.resident_bytes() == 0

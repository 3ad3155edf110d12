"""Several receivers of a host use one frozen copy of the weights: nobody can change it, nobody hurts another."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relight.core.errors import LocalFault, RemoteFault
from relight.core.records import SourceRef
from relight.transfer.plan import HUGE
from relight.transfer.request import Wanted
from relight.transfer.segment import Segment
from relight.transfer.sharing import Loan, borrow
from relight.transfer.source import Source
from relight.transfer.transports.shm import ShmListener
from tests.support.live import ROOT
from tests.unit.transfer.conftest import LAYOUT, SIZES, Rig, make_manifest


@pytest.fixture
def frozen(rig: Rig, tmp_path: Path) -> Iterator[tuple[Rig, SourceRef]]:
    """A rig whose source is frozen, and where it is read."""
    segment = Segment("frozen", rig.source.segment.bytes, freezes=True)
    segment.populate(0, segment.bytes)
    rig.source = Source("i-source", segment, make_manifest(segment), rig.clock)
    rig.source.open(1, rig.key)
    segment.freeze()
    listener = ShmListener(tmp_path / "s")
    peer = SourceRef("i-source", "a", 1, "", "", listener.register(rig.source), rig.grant())
    yield rig, peer
    listener.release()
    segment.close()


def _borrow(rig: Rig, peer: SourceRef, target: Segment | None = None, **changes: object) -> Loan:
    return borrow(target or rig.target, replace(Wanted(LAYOUT, rig.table, "r1"), **changes), peer)


def test_the_pages_lie_in_the_receiver_and_the_copy_has_a_reader_until_they_are_given_back(frozen) -> None:
    rig, peer = frozen
    loan = _borrow(rig, peer)
    assert bytes(rig.target.view) == bytes(rig.source.segment.view)
    assert rig.target.resident_bytes() == 0
    assert rig.source.readers == 1
    rig.target.drop()
    loan.end()
    assert rig.source.close(5.0) == 0
    assert bytes(rig.target.view[: SIZES[0]]) == bytes(SIZES[0])
    rig.target.populate(0, HUGE)
    rig.target.view[:3] = b"own"
    assert rig.target.resident_bytes() >= HUGE


def test_what_one_receiver_writes_is_its_own(frozen) -> None:
    rig, peer = frozen
    before = bytes(rig.source.segment.view)
    other = Segment("other", rig.target.bytes)
    loans = _borrow(rig, peer), _borrow(rig, peer, other)
    rig.target.view[:5] = b"stray"
    assert bytes(other.view) == bytes(rig.source.segment.view) == before
    for segment, loan in zip((rig.target, other), loans, strict=True):
        segment.drop()
        loan.end()
    other.close()


def test_a_frozen_segment_is_changed_by_nobody(frozen) -> None:
    segment = frozen[0].source.segment
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", 0)
    with pytest.raises(LocalFault):
        segment.drop()


def test_a_receiver_that_shares_is_read_by_others_as_its_source_is(frozen) -> None:
    rig, peer = frozen
    loan = _borrow(rig, peer)
    descriptor = rig.target.readonly_fd()
    assert os.pread(descriptor, 100, 0) == bytes(rig.source.segment.view[:100])
    os.close(descriptor)
    rig.target.drop()
    loan.end()


@pytest.mark.parametrize("case", ["not frozen", "size", "places", "layout", "manifest", "grant"])
def test_what_cannot_be_shared_is_refused_by_name_and_nothing_is_left_of_it(frozen, tmp_path, case) -> None:
    rig, peer = frozen
    changes: dict[str, object] = {}
    target, kind, said = rig.target, RemoteFault, case
    if case == "not frozen":
        loose = Segment("loose", rig.target.bytes)
        loose.populate(0, loose.bytes)
        rig.source = Source("i-source", loose, make_manifest(loose), rig.clock)
        rig.source.open(1, rig.key)
        listener = ShmListener(tmp_path / "l")
        peer, kind = replace(peer, address=listener.register(rig.source), grant=rig.grant()), LocalFault
    elif case == "size":
        target, kind = Segment("larger", rig.target.bytes + HUGE), LocalFault
        said = f"this one {target.bytes}"
    elif case == "places":
        moved = {name: replace(t, offset=t.offset + 256) for name, t in rig.table.items()}
        changes, kind, said = {"tensors": moved}, LocalFault, "t0 lies at 0 in i-source, and at 256 here"
    elif case == "layout":
        changes = {"layout": {**LAYOUT, "dtype": "float32"}}
    elif case == "manifest":
        peer, said = replace(peer, manifest_digest="0" * 32), "other weights than it offered"
    else:
        peer, said = replace(peer, grant="forged"), "refused"
    with pytest.raises(kind, match=said):
        _borrow(rig, peer, target, **changes)
    assert target.resident_bytes() == 0
    assert bytes(target.view[:100]) == bytes(100)
    assert rig.source.close(5.0) == 0


def _mapped(pid: int, field: str) -> int:
    """Bytes of the frozen segment that a process maps, by a field of its smaps."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = "/memfd:relight-frozen" in line
        elif inside and line.startswith(f"{field}:"):
            found += int(line.split()[1]) << 10
    return found


def test_processes_that_share_hold_one_copy_of_the_pages_together(frozen) -> None:
    rig, peer = frozen
    told = json.dumps({"address": peer.address, "grant": peer.grant, "bytes": rig.target.bytes})
    argv = [sys.executable, "-m", "tests.support.borrower", told]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    processes = [
        subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        whole = rig.source.segment.bytes
        digest = hashlib.sha256(rig.source.segment.view).hexdigest()
        for process in processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"digest": digest}
        pids = [os.getpid(), *(p.pid for p in processes)]
        assert [_mapped(pid, "Rss") for pid in pids] == [whole] * 3
        assert sum(_mapped(pid, "Pss") for pid in pids) == pytest.approx(whole, abs=64 << 10)
        assert sum(_mapped(pid, "Private_Dirty") for pid in pids) == 0
        assert rig.source.readers == 2
    finally:
        for process in processes:
            process.communicate(timeout=20)

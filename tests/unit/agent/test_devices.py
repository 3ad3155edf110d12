"""Who holds a device is read from processes, and an unexplained holder keeps the device out of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.agent.devices.base import Device
from relight.agent.devices.cpu import CpuDevices
from relight.agent.ledger import Claim, Ledger
from relight.agent.procfs import Procfs
from relight.core.errors import InvalidInput

OWNER = "me"
DEVICES = [Device("cpu-0", "cpu", "cpu-0", 1 << 30), Device("cpu-1", "cpu", "cpu-1", 1 << 30)]


class Proc:
    """A proc tree made of files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, pid: int, parent: int, session: int, kib: int, start: int = 5, state: str = "S", **env: str) -> None:
        folder = self.root / str(pid)
        folder.mkdir()
        fields = [state, parent, session, session, *[0] * 15, start, *[0] * 10]
        (folder / "stat").write_text(f"{pid} (a (b) c) " + " ".join(map(str, fields)))
        (folder / "environ").write_text("".join(f"{k}={v}\0" for k, v in env.items()))
        (folder / "smaps_rollup").write_text(
            f"55-77 ---p 0 0 0 [rollup]\nRss: 9 kB\nPss:    {kib} kB\nPss_Dirty: 1 kB\n"
        )


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def _ledger(proc: Proc) -> Ledger:
    procfs = Procfs(proc.root)
    return Ledger(CpuDevices(DEVICES, procfs), OWNER, procfs)


def test_a_tree_is_found_by_ancestry_session_and_mark(proc: Proc) -> None:
    marks = {"RELIGHT_INSTANCE": "i-a", "RELIGHT_OWNER": OWNER}
    proc.add(100, 1, 100, 10, **marks)
    proc.add(101, 100, 101, 10)
    proc.add(102, 1, 100, 10)
    proc.add(103, 1, 103, 10, **marks)
    proc.add(104, 1, 104, 10)
    proc.add(105, 100, 100, 10, state="Z")
    proc.add(106, 1, 106, 10, RELIGHT_INSTANCE="i-a", RELIGHT_OWNER="other")
    found = {s.pid for s in Procfs(proc.root).tree("i-a", 100, OWNER)}
    assert found == {100, 101, 102, 103}


def test_memory_is_counted_per_device_with_segments_that_nobody_maps(proc: Proc) -> None:
    proc.add(100, 1, 100, 10)
    proc.add(101, 100, 100, 6)
    one, two = _ledger(proc).measure([Claim("i-a", 100, ("cpu-0", "cpu-1"), 4096)])
    assert one.used_bytes == two.used_bytes == (16 * 1024 + 4096) // 2
    assert [h.instance for h in one.holders] == ["i-a"]
    assert one.healthy


def test_a_holder_of_an_instance_that_does_not_run_here_is_named_and_the_device_not_offered(proc: Proc) -> None:
    marks = {"RELIGHT_INSTANCE": "i-dead", "RELIGHT_OWNER": OWNER, "RELIGHT_DEVICES": "cpu-1"}
    proc.add(200, 1, 200, 104, **marks)
    one, two = _ledger(proc).measure([])
    assert one.healthy
    assert not two.healthy
    assert "200" in two.reason
    assert "i-dead" in two.reason
    assert [(h.pid, h.instance, h.bytes) for h in two.holders] == [(200, "", 104 * 1024)]


def test_a_reused_pid_is_another_process(proc: Proc) -> None:
    proc.add(100, 1, 100, 10, start=77)
    assert Procfs(proc.root).alive(100, 77)
    assert not Procfs(proc.root).alive(100, 76)


def test_wrong_devices_are_refused_naming_the_field() -> None:
    with pytest.raises(InvalidInput) as caught:
        CpuDevices([Device("x", "cpu", "x", 1, cores=(9999,)), Device("x", "cpu", "x", 0)])
    assert [e.field for e in caught.value.errors] == ["devices.0.cores", "devices.1.id", "devices.1.memory_bytes"]

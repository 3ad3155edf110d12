"""What nvlink refuses, and what it leaves behind: nothing. Descriptors are real, the devices' memory is the host's."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from relight.core.errors import LocalFault, ModelDirty, RemoteFault
from relight.transfer.device_segment import DeviceSegment
from relight.transfer.extents import lay_out
from relight.transfer.segment import Segment
from relight.transfer.transports import cuda, wire
from relight.transfer.transports.nvlink import AT_ONCE, NvlinkListener, NvlinkReader, Pair
from relight.transfer.transports.shm import ShmListener
from tests.unit.transfer.conftest import Rig, bring, onto_devices
from tests.unit.transfer.fake_cuda import FakeCuda, FakeMemory


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def served(rig: Rig, tmp_path: Path) -> Iterator[Callable[[Pair], NvlinkReader]]:
    """A source of two devices' rig: pair -> reader."""
    onto_devices(rig)
    listener = NvlinkListener(tmp_path / "n.sock")
    address = listener.register(rig.source)
    yield lambda pair: NvlinkReader(address, rig.grant(), "i-source", 5.0, pair)
    listener.release()


def test_what_was_mapped_is_given_back_with_the_last_reader(rig: Rig, served: Callable[[Pair], NvlinkReader]) -> None:
    pair = Pair(rig.target.cuda)
    first, second = served(pair), served(pair)
    mapped = len(rig.target.cuda.mapped)
    assert mapped == 1, "once for both readers"
    first.close()
    assert len(rig.target.cuda.mapped) == mapped
    second.close()
    assert not rig.target.cuda.mapped


def test_no_descriptor_is_left_behind(rig: Rig, served: Callable[[Pair], NvlinkReader]) -> None:
    bring(rig, lambda: served(Pair(rig.target.cuda)), streams=1)
    before = open_descriptors()
    for _ in range(3):
        served(Pair(rig.target.cuda)).close()
    assert rig.source.close(5.0) == 0
    # The first refill's connection may still have been closing when it was counted.
    assert open_descriptors() <= before


def test_more_allocations_than_one_message_carries_are_all_passed(rig: Rig, tmp_path: Path) -> None:
    host = rig.source.segment
    count = 3 * AT_ONCE + 1
    extents = lay_out((host.address + 8192 * n, 4096, True) for n in range(count))
    rig.source.segment = DeviceSegment(FakeCuda(0, FakeMemory(host)), extents)
    listener = NvlinkListener(tmp_path / "n.sock")
    address = listener.register(rig.source)
    pair = Pair(FakeCuda(1))
    reader = NvlinkReader(address, rig.grant(), "i-source", 5.0, pair)
    try:
        assert reader.most == extents.bytes
        assert len(pair.cuda.mapped) == count
    finally:
        reader.close()
        listener.release()


def test_a_copy_that_fails_leaves_the_source_with_the_devices_reason(
    rig: Rig, served: Callable[[Pair], NvlinkReader]
) -> None:
    rig.target.cuda.broken = True
    with pytest.raises(ModelDirty, match=r"a read on device 1 failed: copying.*ECC"):
        bring(rig, lambda: served(Pair(rig.target.cuda)), streams=1)


def test_memory_of_the_host_is_not_served(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="memory of the host"):
        NvlinkListener(tmp_path / "n.sock").register(rig.source)


def test_memory_that_cannot_be_passed_on_is_refused_before_anybody_asks(rig: Rig, tmp_path: Path) -> None:
    host = rig.source.segment
    memory = FakeMemory(host, exportable=False)
    rig.source.segment = DeviceSegment(FakeCuda(0, memory), lay_out([(host.address, host.bytes, True)]))
    with pytest.raises(LocalFault, match="made it without handles"):
        NvlinkListener(tmp_path / "n.sock").register(rig.source)
    assert not (tmp_path / "n.sock").exists()


def test_pages_of_the_host_are_not_passed_on_where_there_are_none(rig: Rig, tmp_path: Path) -> None:
    onto_devices(rig)
    with pytest.raises(LocalFault, match="memory of device 0, and not in pages of this host"):
        ShmListener(tmp_path / "s.sock").register(rig.source)


def test_a_machine_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda._library.cache_clear()
    with pytest.raises(LocalFault, match=r"no driver of NVIDIA: libcuda\.so\.1"):
        cuda.Cuda(0)


@contextmanager
def hostile(path: Path, told: object, descriptors: list[int]) -> Iterator[str]:
    """A source that admits anybody and passes what it likes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            wire.receive_frame(sock)
            sock.sendall(wire.OK)
            wire.send_frame(sock, json.dumps(told).encode())
            with suppress(BrokenPipeError):
                # Who refused what it was told has gone already.
                socket.send_fds(sock, [wire.OK], descriptors)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"nvlink:{path}"
    thread.join()


PIECE = {"kind": "fd", "skip": 0, "bytes": 1 << 21, "handle": "", "at": 0}


@pytest.mark.parametrize(
    ("told", "passed", "why"),
    [
        ([], 1, "expected 1 to 4096 pieces"),
        ([PIECE], 0, "expected 1 descriptors, got 0"),
        ([PIECE], 2, "expected 1 descriptors, got 2"),
        ([PIECE], 1, "what it passed is no memory"),
        ([PIECE | {"bytes": 1 << 60}], 1, "expected bytes of a piece"),
        ({"kind": "fd"}, 1, "expected 1 to 4096 pieces"),
    ],
)
def test_a_source_that_passes_something_else_is_left_and_its_descriptors_closed(
    tmp_path: Path, told: object, passed: int, why: str
) -> None:
    before = open_descriptors()
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(passed)]
    try:
        with hostile(tmp_path / "h.sock", told, files) as address, pytest.raises(RemoteFault, match=why):
            NvlinkReader(address, "grant", "i-hostile", 5.0, Pair(FakeCuda(1)))
    finally:
        for descriptor in files:
            os.close(descriptor)
    assert open_descriptors() == before


def test_an_allocation_shorter_than_was_said_is_the_sources_fault(tmp_path: Path) -> None:
    small = Segment("small", 1 << 21)
    told = [PIECE | {"bytes": 1 << 30}]
    with hostile(tmp_path / "h.sock", told, [small.fd]) as address, pytest.raises(RemoteFault, match="INVALID_VALUE"):
        NvlinkReader(address, "grant", "i-hostile", 5.0, Pair(FakeCuda(1)))
    small.close()

"""Memory of a device: allocations far apart, what lies between them, and the way through buffers of the host."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from relight.core import failpoints
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput, LocalFault, ModelDirty
from relight.transfer import grants
from relight.transfer.bounce import ROOM_BYTES, ROOMS, Bounce, read_all, write_all
from relight.transfer.device_segment import DeviceSegment
from relight.transfer.extents import APART, Extents, lay_out
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.request import Holder, Received, Wanted
from relight.transfer.segment import Pieces, Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports import rdma
from relight.transfer.transports.base import Question
from relight.transfer.transports.memory import MemoryReader
from relight.transfer.transports.nvlink import NvlinkListener, NvlinkReader, Pair
from relight.transfer.transports.tcp import TcpListener, TcpReader
from relight.transfer.verify import BLOCK_BYTES
from tests.unit.transfer.conftest import LAYOUT, make_manifest
from tests.unit.transfer.fake_cuda import FakeCuda, FakeMemory
from tests.unit.transfer.fake_verbs import FakeDevice

CLOCK = SystemClock()
TENSORS = (1_500_000, 17, 512, 700_001, 4096, 3_000_000)
PADDED = [-(-size // 512) * 512 for size in TENSORS]
SPLITS = ((0, 2), (2, 3), (3, 6))
"""Which tensors lie in which allocation: an allocation may be full to its last byte."""
STRANGER = 0xA5


@dataclass
class Memory:
    """One engine's memory: allocations in an order of its own, with holes and somebody else's bytes between them."""

    host: Segment
    segment: DeviceSegment
    table: dict[str, TensorEntry]

    def bytes_of(self, name: str) -> bytes:
        tensor = self.table[name]
        at = self.segment.at(tensor.offset, tensor.offset + tensor.bytes)
        return read_all(self.segment.cuda, [(at, tensor.bytes)])[0]

    @property
    def strangers(self) -> bytes:
        """What lies in no tensor and in no padding of one."""
        kept = bytearray(self.host.view)
        for tensor, padded in zip(self.table.values(), PADDED, strict=True):
            at = self.segment.at(tensor.offset, tensor.offset + tensor.bytes) - self.host.address
            kept[at : at + padded] = bytes(padded)
        return bytes(kept)


def memory(device: int, order: tuple[int, ...], holes: tuple[int, ...] = (0, 0, 0, 0, 0, 0)) -> Memory:
    """`order` says how the allocations lie; `holes` are bytes in front of each tensor in its allocation."""
    host = Segment(f"device-{device}", 16 << 20)
    host.populate(0, host.bytes)
    host.view[:] = bytes([STRANGER]) * host.bytes
    ranges, at = dict[int, tuple[int, int]](), 0
    for number in order:
        first, last = SPLITS[number]
        size = sum(PADDED[n] + holes[n] for n in range(first, last))
        ranges[number] = at, size
        at += size + (1 << 20)
    extents = lay_out((host.address + at, size, True) for at, size in ranges.values())
    segment = DeviceSegment(FakeCuda(device, FakeMemory(host)), extents)
    table = {}
    for number, (first, last) in enumerate(SPLITS):
        address = host.address + ranges[number][0]
        for n in range(first, last):
            address += holes[n]
            offset = next(e.offset + address - e.address for e in extents if 0 <= address - e.address < e.bytes)
            table[f"t{n}"] = TensorEntry(f"t{n}", "uint8", (TENSORS[n],), (1,), offset, TENSORS[n])
            address += PADDED[n]
    return Memory(host, segment, table)


@pytest.fixture
def ends() -> Iterator[tuple[Memory, WeightManifest, Memory]]:
    """(source, its manifest, target) of one content: both have holes, of the same widths here and of others there."""
    source, target = (
        memory(0, (2, 0, 1), (0, 512, 0, 1024, 8192, 512)),
        memory(1, (0, 1, 2), (0, 512, 0, 1024, 8192, 0)),
    )
    plain = Segment("plain", 16 << 20)
    first = make_manifest(plain, TENSORS)
    tensors = []
    for tensor in first.tensors:
        place = source.table[tensor.name]
        at = source.segment.at(place.offset, place.offset + tensor.bytes)
        write_all(source.segment.cuda, [(at, bytes(plain.view[tensor.offset : tensor.offset + tensor.bytes]))])
        tensors.append(replace(tensor, offset=place.offset))
    plain.close()
    yield source, replace(first, segment_bytes=source.segment.bytes, tensors=tuple(tensors)), target
    source.host.close()
    target.host.close()


@pytest.fixture(params=["nvlink", "tcp", "rdma", "memory"])
def holder(request, ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    source, manifest, target = ends
    monkeypatch.setattr(rdma, "Device", FakeDevice)
    held = source.segment
    if request.param == "memory":
        # A copy of each allocation in the host's memory, as an engine that sleeps at level 1 keeps it.
        held = Pieces(source.segment.extents)
    served = Source("i-source", held, manifest, CLOCK)
    served.open(1, key := grants.new_key())
    claims = grants.Claims("i-source", 1, served.manifest_digest, "i-target", CLOCK.now() + 60)
    grant = grants.mint(key, claims)
    if request.param == "memory":
        yield Holder("i-source", lambda: MemoryReader(served, grant), connections=2)
        return
    pair, landing = Pair(target.segment.cuda), rdma.Landing("fake0", target.segment)
    listener, reader = {
        "nvlink": (NvlinkListener(tmp_path / "n.sock"), lambda *told: NvlinkReader(*told, pair)),
        "tcp": (TcpListener("127.0.0.1"), TcpReader),
        "rdma": (rdma.RdmaListener("fake0", "127.0.0.1"), lambda *told: rdma.RdmaReader(*told, landing)),
    }[request.param]
    address = listener.register(served)
    yield Holder("i-source", lambda: reader(address, grant, "i-source", 5.0), connections=2)
    listener.release()


def bring(target: Memory, holder: Holder) -> Received:
    return refill(target.segment, Wanted(LAYOUT, target.table, "r1"), [holder], streams=2, clock=CLOCK)


def test_tensors_land_in_their_own_allocations_and_what_lies_between_stays_as_it_was(ends, holder: Holder) -> None:
    source, manifest, target = ends
    before = target.strangers
    assert bring(target, holder).bytes == manifest.weight_bytes
    assert all(target.bytes_of(name) == source.bytes_of(name) for name in source.table)
    assert target.strangers == before
    left = {**source.segment.cuda.pins, **target.segment.cuda.pins}
    assert not left, "no pinned memory is left behind"


@pytest.mark.parametrize("holder", ["tcp", "memory"], indirect=True)
def test_a_bit_that_turned_on_its_way_through_the_host_is_found_there(
    ends, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("transfer.receive=3*corrupt"))
    with pytest.raises(ModelDirty, match=r"tensor t\d from i-source: digest"):
        bring(ends[2], holder)


def test_a_device_that_fails_while_it_is_written_is_this_sides_fault(ends, holder: Holder) -> None:
    target = ends[2]
    target.segment.cuda.broken = True
    with pytest.raises(ModelDirty, match="ECC"):
        bring(target, holder)
    assert not target.segment.cuda.pins


def test_what_is_read_ahead_comes_in_order_and_buffers_are_used_again() -> None:
    host = Segment("ahead", 4 << 20)
    host.populate(0, host.bytes)
    for n in range(4 * ROOMS):
        host.view[n * 100] = n + 1
    cuda = FakeCuda(0, FakeMemory(host))
    bounce = Bounce(cuda)
    got = [part[0] for part in bounce.fetch((host.address + n * 100, 100) for n in range(4 * ROOMS))]
    assert got == [n + 1 for n in range(4 * ROOMS)]
    begun = bounce.fetch((host.address + n * 100, 100) for n in range(4 * ROOMS))
    next(begun)
    begun.close()
    bounce.close()
    assert not cuda.pins
    host.close()


@pytest.mark.parametrize("length", [0, ROOM_BYTES + 1])
def test_what_no_buffer_holds_is_refused(length: int) -> None:
    bounce = Bounce(FakeCuda(0))
    with pytest.raises(InvalidInput, match=f"1 to {ROOM_BYTES} bytes"):
        bounce.room(length)
    bounce.close()


def test_places_of_allocations_are_in_the_order_of_addresses_and_never_adjacent() -> None:
    extents = lay_out([(3 << 21, 4096, True), (1 << 21, 1 << 21, True), (2 << 21, 512, False)])
    assert [(e.offset, e.address, e.whole) for e in extents] == [
        (0, 1 << 21, True), ((1 << 21) + APART, 2 << 21, False), ((1 << 21) + 512 + 2 * APART, 3 << 21, True)
    ]  # fmt: skip
    for wrong in ([], [(0, 0, True)], [(0, 10, True), (9, 2, True)]):
        with pytest.raises(InvalidInput, match="pieces of memory"):
            lay_out(wrong)


def test_a_read_over_the_edge_of_an_allocation_is_refused() -> None:
    segment = DeviceSegment(FakeCuda(0), lay_out([(1 << 21, 4096, True), (1 << 22, 4096, True)]))
    for start, stop in ((0, 4097), (4096 + APART - 1, 4096 + APART + 1), (5000, 5001), (1 << 40, (1 << 40) + 1)):
        with pytest.raises(LocalFault, match="does not lie in one piece"):
            segment.at(start, stop)


@pytest.mark.parametrize(
    "raw", [None, [], [[0, 1]], [[0, 1, -1]], [[0, 1, 0]], [[9, 1, 1], [0, 1, 1]], [[0, 1, 9], [5, 1, 1]]]
)
def test_pieces_that_a_peer_tells_are_taken_whole_or_refused(raw: object) -> None:
    with pytest.raises(InvalidInput, match=r"pieces? of memory|piece of memory as"):
        Extents.parse(raw)


def test_digests_are_taken_block_by_block_by_way_of_the_host(ends) -> None:
    source, manifest, _ = ends
    for tensor in manifest.tensors:
        assert source.segment.digests(tensor.offset, tensor.offset + tensor.bytes) == tensor.blocks
    assert manifest.tensors[0].bytes > BLOCK_BYTES


def test_a_source_that_stops_serving_returns_when_nothing_copies_from_its_device_any_more(ends) -> None:
    source, manifest, _ = ends
    served = Source("i-source", source.segment, manifest, CLOCK)
    served.open(1, key := grants.new_key())
    listener = TcpListener("127.0.0.1")
    address = listener.register(served)
    claims = grants.Claims("i-source", 1, served.manifest_digest, "i-target", CLOCK.now() + 60)
    reader = TcpReader(address, grants.mint(key, claims), "i-source", 5.0)
    copying, go_on, order = threading.Event(), threading.Event(), list[str]()
    usual = Bounce.fetch

    def slow(self: Bounce, parts: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        copying.set()
        go_on.wait(5)
        try:
            yield from usual(self, parts)
        finally:
            order.append("copied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bounce, "fetch", slow)
        first = manifest.tensors[0]
        reader.ask(Question(0, 1, first.offset, 4096), memoryview(bytearray(4096)))
        assert copying.wait(5)
        cut = threading.Thread(target=lambda: (listener.release(), order.append("released")))
        cut.start()
        go_on.set()
        cut.join(10)
    assert order == ["copied", "released"]
    assert not source.segment.cuda.pins
    reader.close()

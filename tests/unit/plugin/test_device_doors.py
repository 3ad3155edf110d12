"""Who reads weights that lie on a device, and by what: doors over stand-ins for the driver, the cards and NIXL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.core.clock import SystemClock
from relight.core.errors import LocalFault
from relight.core.records import RungKind, SourceRef
from relight.plugin import doors
from relight.plugin.doors import Doors
from relight.plugin.settings import Card, Settings
from relight.transfer import grants
from relight.transfer.request import Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports import nixl_agent, rdma
from relight.transfer.transports.registered import DMA_BUF, PEER_MEMORY, Registered, reaches
from tests.unit.transfer import fake_nixl
from tests.unit.transfer.conftest import LAYOUT, SIZES, FakeDeviceSegment, make_manifest
from tests.unit.transfer.fake_verbs import FakeDevice, FakeMemory

CLOCK = SystemClock()


class Member:
    """One engine's weights on a device, and its doors."""

    def __init__(self, name: str, directory: Path, cards: int = 0) -> None:
        directory.mkdir()
        self.name, self.host = name, Segment(name, sum(SIZES) + 256 * len(SIZES))
        self.host.populate(0, self.host.bytes)
        self.segment = FakeDeviceSegment(0, self.host)
        here = tuple(Card(f"mlx5_{n}", "127.0.0.1") for n in range(cards))
        self.doors = Doors(Settings(name, directory, "127.0.0.1", "r1", 2, cards=here), 0, self.segment)

    def open(self) -> tuple[dict[str, str], dict[str, str], str]:
        """(addresses, what is closed, a grant) of it as a source."""
        self.manifest = make_manifest(self.host)
        source = Source(self.name, self.segment, self.manifest, CLOCK)
        source.open(1, key := grants.new_key())
        claims = grants.Claims(self.name, 1, source.manifest_digest, "i-b", CLOCK.now() + 60)
        return *self.doors.open(source), grants.mint(key, claims)

    def refill(self, kind: RungKind, address: str, grant: str, table: dict) -> str:
        source = SourceRef("i-a", "a", 1, "", "", address, grant)
        holders = self.doors.holders(kind, [source], 2)
        got = refill(self.segment, Wanted(LAYOUT, table, "r1"), holders, streams=2, clock=CLOCK)
        return ", ".join(name for name, count in got.holders.items() if count)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards, and a wheel of NIXL."""
    monkeypatch.setattr(rdma, "Device", FakeDevice)
    monkeypatch.setattr(nixl_agent, "_api", lambda: fake_nixl.api)
    monkeypatch.setattr(nixl_agent, "installed", lambda: True)


@pytest.fixture
def pair(tmp_path: Path, near: None) -> Iterator[tuple[Member, Member]]:
    source, sleeper = Member("i-a", tmp_path / "a", cards=2), Member("i-b", tmp_path / "b", cards=2)
    yield source, sleeper
    source.doors.close()
    for member in (source, sleeper):
        member.host.close()


@pytest.mark.parametrize("kind", [RungKind.PEER_NVLINK, RungKind.PEER_NIXL, RungKind.PEER_RDMA, RungKind.PEER_TCP])
def test_a_device_is_filled_from_another_by_each_way(pair, kind: RungKind) -> None:
    source, sleeper = pair
    addresses, closed, grant = source.open()
    assert set(addresses) == {"nvlink", "nixl", "rdma", "tcp"}
    assert closed == {"shm": "its weights lie in memory of device 0"}
    told = sleeper.refill(kind, addresses[kind.transport], grant, {t.name: t for t in source.manifest.tensors})
    assert told.startswith("i-a")
    for tensor in source.manifest.tensors:
        place = slice(tensor.offset, tensor.offset + tensor.bytes)
        assert sleeper.host.view[place] == source.host.view[place]


def test_a_card_that_does_not_reach_the_device_is_told_with_each_way_and_its_bytes_go_through_the_host(
    tmp_path: Path, near: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(self: FakeDevice, address: int, length: int, *, writable: bool) -> FakeMemory:
        raise LocalFault(f"registering {length} bytes with {self.name}: EFAULT")

    monkeypatch.setattr(FakeDevice, "register", register)
    monkeypatch.setattr(nixl_agent, "installed", lambda: False)
    source = Member("i-a", tmp_path / "a", cards=1)
    addresses, closed, _ = source.open()
    assert set(addresses) == {"nvlink", "tcp"}
    assert closed["rdma"].startswith(
        "mlx5_0: mlx5_0 does not reach memory of device 0: dma-buf: a DMA buffer of device"
    )
    assert "peer memory: registering" in closed["rdma"]
    assert closed["nixl"] == doors.NO_WHEEL
    source.doors.close()


@pytest.mark.parametrize(("buffers", "way"), [(True, DMA_BUF), (False, PEER_MEMORY)])
def test_a_dma_buffer_is_tried_before_the_drivers_module(
    tmp_path: Path, near: None, *, buffers: bool, way: str
) -> None:
    member = Member("i-a", tmp_path / "a")
    member.segment.cuda.dma_bufs = buffers
    assert reaches(FakeDevice("mlx5_0"), member.segment.cuda, member.segment.extents[0]) == way
    registered = Registered(FakeDevice("mlx5_0"), member.segment, writable=False)
    assert registered.way == way
    assert [(r.at, r.bytes) for r in registered.regions] == [(0, member.segment.bytes)]
    registered.close()


def test_weights_of_the_host_are_not_read_by_nvlink(tmp_path: Path) -> None:
    segment = Segment("host", 1 << 21)
    own = Doors(Settings("i-b", tmp_path, "127.0.0.1", "r1", 2), 0, segment)
    with pytest.raises(LocalFault, match="memory of the host, which nvlink does not reach"):
        own.holders(RungKind.PEER_NVLINK, [SourceRef("i-a", "a", 1, "", "", "nvlink:/x", "g")], 2)
    segment.close()

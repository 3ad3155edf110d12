"""A small source with real segments, and each transport as a pair of listener and reader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from relight.controller.cli import pki
from relight.core.clock import SystemClock, VirtualClock
from relight.core.fingerprint import Fingerprint
from relight.core.tls import TlsFiles
from relight.transfer import grants
from relight.transfer.device_segment import DeviceSegment
from relight.transfer.extents import Extent, Extents
from relight.transfer.manifest import Canary, TensorEntry, WeightManifest
from relight.transfer.request import Holder, Options, Received, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports import nixl, nixl_agent, rdma
from relight.transfer.transports.base import Reader
from relight.transfer.transports.memory import MemoryReader
from relight.transfer.transports.nvlink import NvlinkListener, NvlinkReader, Pair
from relight.transfer.transports.shm import ShmListener, ShmReader
from relight.transfer.transports.tcp import TcpListener, TcpReader
from relight.transfer.verify import Digest, blocks_of
from tests.unit.transfer import fake_nixl
from tests.unit.transfer.fake_cuda import FakeCuda, FakeMemory
from tests.unit.transfer.fake_verbs import FakeDevice

LAYOUT = {"engine": "test 1", "dtype": "bfloat16"}
SIZES = (5_000_000, 17, 256, 1_048_576, 3_000_001, 1)


def make_manifest(segment: Segment, sizes: tuple[int, ...] = SIZES, revision: str = "r1") -> WeightManifest:
    """Fills `segment` with seeded bytes and describes them as uint8 tensors with padding in between."""
    entries, offset = [], 0
    for n, size in enumerate(sizes):
        segment.view[offset : offset + size] = random.Random(n).randbytes(size)
        blocks = blocks_of(segment.view[offset : offset + size], segment.digest)
        entries.append(TensorEntry(f"t{n}", "uint8", (size,), (1,), offset, size, (), blocks))
        offset += -(-size // 256) * 256
    prints = Fingerprint(LAYOUT, {"revision": revision}, {})
    canary = Canary((1, 2), (3, 4), (-0.1, -0.2))
    return WeightManifest(prints, 0, segment.bytes, tuple(entries), {"layer.k_scale": 0.5}, canary, segment.digest)


@dataclass
class Rig:
    """One open source and what is needed to read it."""

    clock: VirtualClock
    source: Source
    key: str
    target: Segment

    @property
    def table(self) -> dict[str, TensorEntry]:
        return {t.name: t for t in self.source.manifest.tensors}

    def grant(self, **changes: object) -> str:
        claims = grants.Claims(
            self.source.instance, self.source.manifest.generation, self.source.manifest_digest, "i-receiver",
            self.clock.now() + 60,
        )  # fmt: skip
        return grants.mint(self.key, replace(claims, **changes))


@pytest.fixture
def digest() -> Digest:
    """What proves blocks on both sides; tests that are held to both name it among their parameters."""
    return Digest.XXH3


@pytest.fixture
def rig(digest: Digest) -> Iterator[Rig]:
    segment = Segment("test-source", sum(SIZES) + 256 * len(SIZES), digest=digest)
    segment.populate(0, segment.bytes)
    source = Source("i-source", segment, make_manifest(segment), clock := VirtualClock())
    source.open(1, key := grants.new_key())
    target = Segment("test-target", segment.bytes, digest=digest)
    yield Rig(clock, source, key, target)
    target.close()
    segment.close()


def bring(
    rig: Rig, connect: Callable[[], Reader], *, layout=LAYOUT, table=None, revision="r1", streams=2,
    manifest_digest="", **options: object,
) -> Received:  # fmt: skip
    """One refill of the rig's target from its one source."""
    wanted = Wanted(layout, rig.table if table is None else table, revision)
    holders = [Holder("i-source", connect, connections=streams, manifest_digest=manifest_digest)]
    return refill(rig.target, wanted, holders, streams=streams, clock=SystemClock(), options=Options(**options))


class FakeDeviceSegment(DeviceSegment):
    """A device's memory that a test may look at: it is a host's."""

    def __init__(self, number: int, host: Segment) -> None:
        extents = Extents([Extent(0, host.address, host.bytes)])
        super().__init__(FakeCuda(number, FakeMemory(host)), extents, host.digest)
        self.view = host.view
        self.populate, self.drop, self.resident_bytes = host.populate, host.drop, host.resident_bytes


def onto_devices(rig: Rig) -> None:
    """From here on the rig's source and target count as memory of two devices."""
    if isinstance(rig.source.segment, Segment):
        rig.source.segment = FakeDeviceSegment(0, rig.source.segment)
    target_on_device(rig)


def target_on_device(rig: Rig) -> None:
    if isinstance(rig.target, Segment):
        rig.target = FakeDeviceSegment(1, rig.target)


Connector = Callable[[Rig, str], Callable[[], Reader]]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TlsFiles]:
    """name -> the files of that end; `stranger` has an authority of its own."""
    made = tmp_path_factory.mktemp("tls")
    pki.make(made / "fleet", ("source", "receiver"), SystemClock())
    pki.make(made / "other", ("stranger",), SystemClock())

    def files(name: str) -> TlsFiles:
        home = made / ("other" if name == "stranger" else "fleet")
        return TlsFiles(home / f"{name}.pem", home / f"{name}.key", home / "ca.pem")

    return files


TRANSPORTS = (
    "memory",
    "shm",
    "tcp",
    "tls",
    "rdma",
    "nixl",
    "nvlink",
    "shm to device",
    "tcp to device",
    "tls to device",
)


@pytest.fixture(params=TRANSPORTS)
def connector(
    request: pytest.FixtureRequest, tmp_path: Path, certificates: Callable[[str], TlsFiles],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Connector]:  # fmt: skip
    """(rig, grant) -> connect: the same source over each transport."""
    with ExitStack() as stack:

        def make(rig: Rig, grant: str) -> Callable[[], Reader]:
            transport, _, device = request.param.partition(" to ")
            if device and transport == "shm":
                target_on_device(rig)
            elif device:
                onto_devices(rig)
            if transport == "memory":
                return lambda: MemoryReader(rig.source, grant)
            if transport == "shm":
                listener: ShmListener | TcpListener = ShmListener(tmp_path / "s.sock")
                address = listener.register(rig.source)
                stack.callback(listener.release)
                return lambda: ShmReader(address, grant, "i-source", 5.0)
            if transport == "rdma":
                monkeypatch.setattr(rdma, "Device", FakeDevice)
                card = rdma.RdmaListener("fake0", "127.0.0.1")
                address = card.register(rig.source)
                stack.callback(card.release)
                landing = rdma.Landing("fake0", rig.target)
                return lambda: rdma.RdmaReader(address, grant, "i-source", 5.0, landing)
            if transport == "nixl":
                monkeypatch.setattr(nixl_agent, "_api", lambda: fake_nixl.api)
                served = nixl.NixlListener(nixl_agent.Agent("fake0:1"), "127.0.0.1")
                address = served.register(rig.source)
                stack.callback(served.release)
                there = nixl.Landing(nixl_agent.Agent("fake0:1"), rig.target)
                return lambda: nixl.NixlReader(address, grant, "i-source", 5.0, there)
            if transport == "nvlink":
                onto_devices(rig)
                device = NvlinkListener(tmp_path / "n.sock")
                address = device.register(rig.source)
                stack.callback(device.release)
                pair = Pair(rig.target.cuda)
                return lambda: NvlinkReader(address, grant, "i-source", 5.0, pair)
            ours, theirs = (certificates(n) if transport == "tls" else None for n in ("receiver", "source"))
            listener = TcpListener("127.0.0.1", tls=theirs)
            address = listener.register(rig.source)
            stack.callback(listener.release)
            return lambda: TcpReader(address, grant, "i-source", 5.0, ours)

        yield make

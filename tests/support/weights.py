"""A member with real weights, sources and refills, and no model in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.unit.transfer.conftest import LAYOUT, make_manifest

from relight.core.clock import SystemClock
from relight.core.errors import LocalFault
from relight.core.records import Mode, RungKind, SourceRef
from relight.plugin.orders import ModelMemory, Order
from relight.plugin.pages import HostPages
from relight.plugin.residency import Residency
from relight.plugin.settings import Card, Settings
from relight.transfer import grants
from relight.transfer.manifest import Canary, WeightManifest
from relight.transfer.segment import Segment
from relight.transfer.verify import blocks_of

CANARY = Canary((1, 2), (3,), (-0.5,))
SIZES = (2_000_000, 300, 70_001)


class Engine:
    """A member with real segments and sources and a checkpoint file, without a model in it."""

    def __init__(
        self, name: str, directory: Path, layout: Mapping[str, str] = LAYOUT, cards: int = 0, mode: Mode = Mode.COLD
    ) -> None:
        directory.mkdir(mode=0o700)
        self.checkpoint = directory / "checkpoint"
        self.segment = Segment(name, sum(SIZES) + 1024)
        self.segment.populate(0, self.segment.bytes)
        first = make_manifest(self.segment, SIZES)
        self.checkpoint.write_bytes(self.segment.view)
        self.scalars: Mapping[str, float] = {"layer.k_scale": 0.5}
        self.dropped = self.rebuilt = 0
        self.layout = layout
        self._first = first
        memory = ModelMemory(
            HostPages(name, self.segment, self._drop, SystemClock()), {t.name: t for t in first.tensors}, layout,
            self._describe, self._reload, self._restore, self._rebuild,
        )  # fmt: skip
        here = tuple(Card(f"mlx5_{n}", "127.0.0.1") for n in range(cards))
        settings = Settings(name, directory, "127.0.0.1", "r1", 2, cards=here, mode=mode)
        if settings.awaits:
            self.segment.view[:] = bytes(self.segment.bytes)
        self.residency = Residency(settings, 0, memory, SystemClock())
        if not settings.awaits:
            self.residency.set_canary(CANARY)

    def _describe(self, revision: str) -> WeightManifest:
        tensors = tuple(
            replace(t, blocks=blocks_of(self.segment.view[t.offset : t.offset + t.bytes])) for t in self._first.tensors
        )
        prints = replace(self._first.fingerprint, layout=self.layout, content={"revision": revision})
        return replace(self._first, fingerprint=prints, tensors=tensors, canary=None)

    def _reload(self, path: str) -> None:
        self.segment.view[:] = Path(path).read_bytes()

    def _restore(self, scalars: Mapping[str, float]) -> None:
        if set(scalars) != set(self.scalars):
            raise LocalFault("host scalar x exists on one side only")
        self.scalars = dict(scalars)

    def _drop(self) -> None:
        self.dropped += 1

    def _rebuild(self) -> None:
        self.rebuilt += 1

    def offers(self) -> tuple[Mapping[str, str], str]:
        """(addresses by transport, grant) of this engine as a source."""
        key = grants.new_key()
        opened = self.residency.open_source(key)
        claims = grants.Claims(
            self.residency.source.instance, int(str(opened["generation"])), "", "i-b", SystemClock().now() + 60
        )
        addresses = opened["addresses"]
        assert isinstance(addresses, dict)
        return addresses, grants.mint(key, claims)

    def offer(self) -> tuple[str, str, str]:
        """(shm address, tcp address, grant) of this engine as a source."""
        addresses, grant = self.offers()
        return addresses["shm"], addresses["tcp"], grant

    def stand_by(self) -> tuple[Mapping[str, str], str]:
        """(addresses by transport, grant) of this sleeper for those that are filled at the same time."""
        key = grants.new_key()
        opened = self.residency.open_relay(key)
        claims = grants.Claims(
            self.residency.source.instance, int(str(opened["generation"])), "", "i-b", SystemClock().now() + 60
        )
        addresses = opened["addresses"]
        assert isinstance(addresses, dict)
        return addresses, grants.mint(key, claims)

    def wake(
        self,
        kind: RungKind,
        *,
        address: str = "",
        grant: str = "",
        revision: str = "r1",
        path: str = "",
        name: str = "i-a",
    ) -> str:
        sources = (SourceRef(name, "a", 1, "", "", address, grant),) if address else ()
        order = Order(kind, revision, sources, path or str(self.checkpoint))
        return self.residency.refill(order, lambda progress: None).detail

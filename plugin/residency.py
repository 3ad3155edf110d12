"""Which of an engine member's memory is resident, and what may happen next: the engine's own safety catch.

    awake -> asleep(level) -> refilled -> awake         asleep, refilled -> asleep (suspend)

An engine that was put to sleep at any level resumes only after a complete and verified refill, whatever it is
asked: a wake without a refill is refused, so garbage can never be served. Engine-agnostic: it knows how memory comes
and goes (pages.py), a manifest and a way to reload from disk.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from enum import StrEnum

from relight.core.clock import Clock
from relight.core.errors import Conflict, InvalidInput, LocalFault, ModelDirty, RemoteFault, TransferError
from relight.core.fingerprint import Fingerprint
from relight.core.records import Phase, RungKind
from relight.plugin.doors import TRANSPORTS, Doors
from relight.plugin.orders import ModelMemory, Order, Restored
from relight.plugin.settings import Settings
from relight.transfer import grants
from relight.transfer.breaker import Breaker
from relight.transfer.manifest import Canary, WeightManifest
from relight.transfer.pace import Pace
from relight.transfer.request import Cancel, Holder, Kept, OnProgress, Options, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.sharing import Loan, borrow
from relight.transfer.source import Source
from relight.transfer.transports.base import Connect
from relight.transfer.transports.memory import MemoryReader

HOST_COPY_GRANT_SECONDS = 3600.0


class Residence(StrEnum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    REFILLED = "refilled"


class Residency:
    """One member's weights, awake or asleep, and its source. Thread-safe; one transition at a time."""

    def __init__(self, settings: Settings, rank: int, memory: ModelMemory, clock: Clock) -> None:
        """`settings` name the instance, its revision and where it listens; `rank` tells its sockets apart.

        One that awaits its weights begins asleep, describes nothing, and is `filled` and settled before it serves.
        """
        self._memory, self._instance, self._streams, self._clock = memory, settings.instance, settings.streams, clock
        self._doors = Doors(settings, rank, memory.segment)
        self._lock = threading.RLock()
        self.state = Residence.AWAKE
        self.level = 0
        self._loan: Loan | None = None
        self._cards = bool(settings.cards)
        self._kept, self._cancel, self._breaker = Kept(), Cancel(), Breaker(clock)
        self._served: tuple[dict[str, str], dict[str, str]] | None = None
        self._revision = settings.revision
        # Contents that were proven in this process, by revision: what the disk rung is checked against.
        self._known: dict[str, WeightManifest] = {}
        self._filled = threading.Event()
        if settings.awaits:
            self.state, self.level = Residence.ASLEEP, 2
            manifest = WeightManifest(
                Fingerprint(memory.layout, {}, {}), 0, memory.segment.bytes, (), digests=memory.segment.digest
            )
        else:
            manifest = self._known[self._revision] = memory.describe(self._revision)
        self._pace = Pace(settings.source_rate, clock)
        self.source = Source(settings.instance, memory.segment, manifest, clock, self._pace)
        self.relay: Source | None = None
        """What it passes on while it is filled, and until its readers have all of it."""
        self._relays = 0

    # ------------------------------------------------------------------ a start that awaits its weights

    def fill(self, seconds: float) -> None:
        """Returns once a rung has brought weights. Raises LocalFault when none has within `seconds`."""
        if not self._filled.wait(seconds):
            raise LocalFault(f"no weights were brought within {seconds:g} s")
        self.resume()

    def settle(self) -> None:
        """Describes the filled engine now that all of it exists. Raises LocalFault when a tensor was changed since it
        was proven: whatever was compiled or warmed up wrote into the weights."""
        brought = self.source.manifest
        manifest = self._memory.describe(self._revision)
        expected = {t.name: t.digest for t in brought.tensors}
        for tensor in manifest.tensors:
            if tensor.digest != expected.get(tensor.name):
                raise LocalFault(f"tensor {tensor.name} was changed by the start itself")
        self._adopt(replace(manifest, canary=brought.canary), self._revision)

    # ------------------------------------------------------------------ source

    def set_canary(self, canary: Canary) -> None:
        """Keeps what the engine generated on its present content, for receivers and for later disk rungs."""
        self.source.set_canary(canary)
        self._known[self._revision] = self.source.manifest

    def open_source(self, key: str) -> dict[str, object]:
        """Serves readers under a new generation; returns it with the addresses by transport, and why one is closed.

        Grants of earlier generations are void from here on. Raises Conflict unless awake.
        """
        with self._lock:
            if self.state is not Residence.AWAKE:
                raise Conflict(f"a member that is {self.state} cannot be a source")
            generation = self.source.manifest.generation + 1
            self.source.open(generation, key)
            if self._served is None:
                unfit = self._memory.unfit
                self._served = ({}, dict.fromkeys(TRANSPORTS, unfit)) if unfit else self._doors.open(self.source)
            addresses, closed = self._served
            return {"generation": generation, "addresses": addresses, "closed": closed}

    def open_relay(self, key: str) -> dict[str, object]:
        """Says where a sleeper will be read while it is filled, and lets those wait there who come before; as
        `open_source` otherwise. It serves nothing that is not proven. Raises Conflict unless asleep.
        """
        with self._lock:
            if self.state is not Residence.ASLEEP:
                raise Conflict(f"a member that is {self.state} is not filled")
            self._end_relay()
            self._relays += 1
            relay = Source(self._instance, self._memory.segment, None, self._clock, self._pace)
            relay.open(self._relays, key)
            addresses, closed = self._doors.open_relay(relay)
            self.relay = relay
            return {"generation": self._relays, "addresses": addresses, "closed": closed}

    def _end_relay(self) -> None:
        """Cuts whoever reads what was filled: the memory is about to change."""
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.close(0.0)
            self._doors.close_relay()

    def close_source(self, deadline_seconds: float) -> int:
        """Drains readers and stops serving; returns how many were cut."""
        began, relay = self._clock.monotonic(), self.relay
        cut = self.source.close(deadline_seconds)
        if relay is not None:
            cut += relay.close(max(deadline_seconds - (self._clock.monotonic() - began), 0.0))
        with self._lock:
            self._doors.close()
            self._end_relay()
            self._served = None
        return cut

    def digests(self) -> dict[str, str]:
        """Of every tensor, hashed now, by name; host scalars as they are. Raises Conflict unless awake."""
        with self._lock:
            if self.state is not Residence.AWAKE:
                raise Conflict(f"a member that is {self.state} holds nothing to compare")
            held = self._memory.describe(self._revision)
        return {t.name: t.digest for t in held.tensors} | {name: repr(v) for name, v in held.scalars.items()}

    # ------------------------------------------------------------------ sleep

    def sleep(self, level: int) -> None:
        """Releases weights and KV cache; level 1 keeps a host copy. Raises InvalidInput, Conflict, LocalFault."""
        if level not in (1, 2):
            raise InvalidInput(f"sleep level 1 or 2, got {level}")
        with self._lock:
            if self.state is Residence.ASLEEP and self.level == level:
                return
            if self.state is not Residence.AWAKE:
                raise Conflict(f"a member that is {self.state} cannot go to sleep at level {level}")
            if self.source.readers or (self.relay is not None and self.relay.readers):
                raise Conflict("the source still has readers: close it first")
            if self._memory.unfit:
                raise LocalFault(self._memory.unfit)
            if self._served is not None:
                # Nobody may come while memory goes, and no card may know what is not there any more.
                self.source.close(0.0)
                self._doors.close()
                self._served = None
            pages = self._memory.pages
            pages.keep(level, self.source.manifest)
            self._asleep(level)
            pages.release(level)

    def _asleep(self, level: int) -> None:
        # Before anything is released: should that fail half-way, nothing may resume on what is left.
        self.state, self.level = Residence.ASLEEP, level
        self._end_relay()
        self._kept.clear()
        self._end_loan()

    def suspend(self) -> None:
        """Back to sleep from a refill that came to nothing (dirty, or a failed proof): memory is given back.

        One that still runs is cancelled.
        """
        self._cancel.set()
        with self._lock:
            pages = self._memory.pages
            self._asleep(2 if pages.copy is None else self.level)
            pages.give_back()

    # ------------------------------------------------------------------ wake

    def refill(self, order: Order, progress: OnProgress) -> Restored:
        """Fills the segment by one rung and proves every tensor. Raises RemoteFault, LocalFault, ModelDirty."""
        with self._lock:
            if self.state is Residence.AWAKE:
                raise Conflict("the member is awake: a refill would overwrite what it serves from")
            self.state = Residence.ASLEEP
            self._end_loan()
            mapped = self._bring_back()
            begun = self._clock.now()
            if order.kind in (RungKind.STORAGE, RungKind.DISK):
                # What an earlier rung brought was good to pass on, and is written over.
                self._end_relay()
                restored = self._from_files(order, begun)
            else:
                shared = self._from_copy(order, begun) if order.share else ""
                if isinstance(shared, Restored):
                    restored = shared
                else:
                    copied = self._from_holders(order, self._holders(order), progress)
                    restored = replace(copied, detail=copied.detail + shared)
            self.state = Residence.REFILLED
            self._filled.set()
            return replace(restored, phases=(*mapped, *restored.phases))

    def _bring_back(self) -> tuple[Phase, ...]:
        begun = self._clock.now()
        said = self._memory.pages.bring_back()
        return (Phase("map", begun, self._clock.now(), said),) if said else ()

    def _holders(self, order: Order) -> list[Holder]:
        if order.kind is RungKind.HOST_COPY:
            return [Holder("own host copy", self._own_copy(), connections=self._streams)]
        return self._doors.holders(order.kind, order.sources, self._streams)

    def _own_copy(self) -> Connect:
        host = self._memory.pages.copy
        if host is None:
            raise LocalFault("no host copy is kept: the member slept at level 2")
        generation = host.manifest.generation + 1
        key = grants.new_key()
        host.open(generation, key)
        claims = grants.Claims(
            host.instance, generation, host.manifest_digest, self._instance, self._clock.now() + HOST_COPY_GRANT_SECONDS
        )
        own = grants.mint(key, claims)
        return lambda: MemoryReader(host, own)

    def _from_holders(self, order: Order, holders: list[Holder], progress: OnProgress) -> Restored:
        self._cancel = Cancel()
        options = Options(
            kept=self._kept, cancel=self._cancel, breaker=self._breaker, on_progress=progress, relay=self.relay
        )  # fmt: skip
        if (deal := order.deal) is not None and deal.parts:
            turn = deal.turn / deal.receivers
            options = replace(options, planned_seconds=deal.seconds, parts=deal.parts, turn=turn)
        got = refill(
            self._memory.segment,
            Wanted(self._memory.layout, self._memory.table, order.revision),
            holders,
            streams=self._streams,
            clock=self._clock,
            options=options,
        )
        # Complete, and now the engine's to work on: what it leaves of the bytes is proven again before it counts.
        self._kept.clear()
        names = ", ".join(name for name, count in got.holders.items() if count)
        self._take_in(got.manifest, order.revision, names)
        lost = "".join(f"; lost {reason}" for reason in got.lost.values())
        brought = Counter[str]()
        for holder in holders:
            brought[holder.peer or holder.name] += got.holders.get(holder.name, 0)
        detail = f"{order.kind} from {names}, {self._streams} streams{lost}"
        return Restored(got.bytes, got.phases, detail, {name: count for name, count in brought.items() if count})

    def _take_in(self, manifest: WeightManifest, revision: str, names: str) -> None:
        try:
            self._memory.restore_scalars(manifest.scalars)
            self._memory.rebuild_derived()
        except LocalFault as error:
            raise ModelDirty(str(error), cause=RemoteFault(f"{names}: {error}")) from error
        self._adopt(manifest, revision)

    def _from_copy(self, order: Order, begun: float) -> Restored | str:
        """By mapping the pages of a copy on this host; a string says why they have to be copied."""
        if order.kind is not RungKind.HOST_SHM or not order.sources:
            return ""
        if self._cards:
            return "; not shared: to register them with an RDMA card would copy every page"
        peer, memory, segment = order.sources[0], self._memory, self._memory.segment
        if not isinstance(segment, Segment):
            return "; not shared: a device has memory of its own"
        self._end_relay()
        self._kept.clear()
        try:
            self._loan = borrow(segment, Wanted(memory.layout, memory.table, order.revision), peer)
        except TransferError as error:
            return f"; not shared: {error}"
        manifest = self._loan.manifest
        self._take_in(manifest, order.revision, peer.instance)
        phase = Phase("map", begun, self._clock.now(), f"{manifest.weight_bytes} bytes shared with {peer.instance}")
        return Restored(0, (phase,), f"{order.kind}: {peer.instance}'s own pages, proven by it and frozen")

    def _end_loan(self) -> None:
        if self._loan is not None:
            self._memory.segment.drop()
            self._loan.end()
            self._loan = None

    def _from_files(self, order: Order, begun: float) -> Restored:
        segment, path, revision = self._memory.segment, order.path, order.revision
        self._kept.clear()
        try:
            segment.populate(0, segment.bytes)
            paged = self._clock.now()
            self._memory.reload(path)
            pulled = self._clock.now()
            manifest = self._memory.describe(revision)
        except Exception as error:  # the checkpoint reader's errors are the engine's own, of any type
            fault = (
                error if isinstance(error, TransferError) else LocalFault(f"{path}: {type(error).__name__}: {error}")
            )
            raise ModelDirty(str(fault), cause=fault) from error
        self._compare(manifest, revision, path)
        self._adopt(
            replace(manifest, canary=self._known[revision].canary) if revision in self._known else manifest, revision
        )
        verified = self._clock.now()
        phases = (
            Phase("pages", begun, paged, "all pages"),
            Phase("pull", paged, pulled, f"{manifest.weight_bytes} bytes read and packed from {path}"),
            Phase("verify", pulled, verified, f"{segment.digest} of every tensor"),
        )
        return Restored(manifest.weight_bytes, phases, f"{order.kind} from {path}")

    def _compare(self, manifest: WeightManifest, revision: str, path: str) -> None:
        known = self._known.get(revision)
        if known is None:
            return
        expected = {t.name: t.digest for t in known.tensors}
        for tensor in manifest.tensors:
            if tensor.digest != expected.get(tensor.name):
                fault = RemoteFault(
                    f"tensor {tensor.name} read from {path}: digest {tensor.digest}, "
                    f"revision {revision!r} had {expected.get(tensor.name)}"
                )
                raise ModelDirty(str(fault), cause=fault)

    def _adopt(self, manifest: WeightManifest, revision: str) -> None:
        ours = replace(manifest, generation=self.source.manifest.generation)
        self.source.set_manifest(ours)
        self._known[revision] = ours
        self._revision = revision

    def may_resume(self) -> None:
        """Raises Conflict unless a verified refill came before."""
        with self._lock:
            if self.state is Residence.ASLEEP:
                raise Conflict("weights are not resident: a refill must precede the wake")

    def resume(self) -> None:
        """The engine goes on. Raises Conflict unless a verified refill came before."""
        with self._lock:
            self.may_resume()
            if self.state is Residence.REFILLED:
                self.state, self.level = Residence.AWAKE, 0
                self._memory.pages.awake()

    # ------------------------------------------------------------------ reading

    @property
    def host_copy_bytes(self) -> int:
        """Bytes of the host copy, 0 without one."""
        return self._memory.pages.copy_bytes

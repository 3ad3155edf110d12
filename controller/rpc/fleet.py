"""Fleet.Attach: one stream per slot; reports come in, the slot's whole assignment goes out at each change."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace

import grpc

from relight.controller.apply.changes import epoch_of
from relight.controller.loop import Reconciler
from relight.controller.observe import hosts
from relight.controller.observe.ring import period, renewed_in, told
from relight.controller.rpc.guard import AdmitAgent, SlotCheck, authorization, refuse
from relight.controller.state.catalog import Catalog
from relight.core.clock import Clock
from relight.core.errors import Denied, FieldError, InvalidInput, RelightError, Unavailable
from relight.core.hosting import copy_name
from relight.core.ids import is_name
from relight.core.logs import get_logger
from relight.core.records import Assignment, CacheReport, CacheRing, HostReport, HostTier, Neighbours, SlotReport
from relight.core.states import State
from relight.core.tenants import tenant
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc

log = get_logger("controller.rpc.fleet")

Context = grpc.aio.ServicerContext[fleet_pb2.SlotReport, fleet_pb2.Assignment]


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Lets agents attach. A newer stream of the same slot ends the older one."""

    def __init__(
        self, reconciler: Reconciler, catalog: Catalog, admit: AdmitAgent, caller: Callable[[str], str], clock: Clock
    ) -> None:  # fmt: skip
        self._reconciler, self._catalog, self._clock = reconciler, catalog, clock
        self._admit, self._caller = admit, caller
        self._streams: dict[str, set[asyncio.Event]] = {}
        catalog.listen(self._stored)
        reconciler.rings.listen(self._poke_all)
        reconciler.hosts.listen(self._poke_all)
        reconciler.neighbours.listen(self._poke_all)

    def _poke_all(self) -> None:
        for slot in self._streams:
            self._poke(slot)

    def _stored(self, keys: frozenset[str]) -> None:
        for key in keys:
            kind, _, slot = key.partition("/")
            if kind == "assignments":
                self._poke(slot)

    def _poke(self, slot: str) -> None:
        for event in self._streams.get(slot, ()):
            event.set()

    async def Attach(  # noqa: N802 - the name is the protocol's
        self, request_iterator: AsyncIterator[fleet_pb2.SlotReport], context: Context
    ) -> AsyncIterator[fleet_pb2.Assignment]:
        stream = None
        try:
            stream = _Stream(self, request_iterator, await self._admit(authorization(context)))
            async for assignment in stream.assignments():
                yield to_proto(assignment, fleet_pb2.Assignment)
        except (InvalidInput, Denied, Unavailable) as error:
            log.warning("slot.refused", peer=context.peer(), reason=str(error))
            await refuse(context, error)
        finally:
            if stream is not None:
                await stream.close()


class _Stream:
    def __init__(
        self, service: FleetService, reports: AsyncIterator[fleet_pb2.SlotReport], check_slot: SlotCheck
    ) -> None:  # fmt: skip
        self._service, self._check_slot = service, check_slot
        self._fleet = service._reconciler.fleet
        self._session = self._fleet.new_session()
        self._slot = ""
        self._event = asyncio.Event()
        self._told: tuple[tuple[int, int], CacheRing] | None = None
        self._told_tier: tuple[tuple[int, int], HostTier | None] | None = None
        self._told_neighbours: Neighbours | None = None
        self._reader = asyncio.create_task(self._read(reports))
        self._reader.add_done_callback(lambda _: self._event.set())

    async def _read(self, reports: AsyncIterator[fleet_pb2.SlotReport]) -> None:
        async for message in reports:
            report = from_proto(message, SlotReport)
            _check(report, self._slot)
            if not self._slot:
                self._check_slot(report.slot)
                self._slot = report.slot
                self._service._streams.setdefault(report.slot, set()).add(self._event)
                log.info("slot.attached", slot=report.slot, agent=report.agent, host=report.host)
            self._fleet.report(report, self._session)
            self._service._poke(report.slot)

    async def assignments(self) -> AsyncIterator[Assignment]:
        """Each assignment that the agent should have and was not sent on this stream; ends with the stream.

        Ring, host tier and neighbours travel with it, and send it again when they are others or their grants are due.
        """
        sent: tuple[int, int, CacheRing | None, HostTier | None, Neighbours | None] = (-1, -1, None, None, None)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), renewed_in(self._service._clock.now()) + 1.0)
            self._event.clear()
            if self._reader.done():
                await self._reader
                return
            if not self._slot:
                continue
            seen = self._fleet.seen.get(self._slot)
            if seen is None or seen.session > self._session:
                return
            assignment = self._wanted(seen.report)
            if assignment is None:
                continue
            ring, tier, neighbours = self._ring(), self._tier(), self._neighbours()
            newest = (assignment.epoch, assignment.revision, ring, tier, neighbours)
            if newest != sent:
                sent = newest
                caller = self._service._caller(self._slot)
                yield replace(assignment, ring=ring, host_tier=tier, neighbours=neighbours, caller=caller)

    def _neighbours(self) -> Neighbours | None:
        known = self._service._reconciler.neighbours
        if known.present is None:
            return None
        if self._told_neighbours is None or self._told_neighbours.revision != known.present.revision:
            self._told_neighbours = known.told(self._slot)
        return self._told_neighbours

    def _tier(self) -> HostTier | None:
        present, now = self._service._reconciler.hosts.present, self._service._clock.now()
        if present is None:
            return None
        made_for = (present.revision, period(now))
        if self._told_tier is None or self._told_tier[0] != made_for:
            self._told_tier = made_for, hosts.told(present, self._slot, now)
        return self._told_tier[1]

    def _ring(self) -> CacheRing | None:
        reconciler, now = self._service._reconciler, self._service._clock.now()
        members = reconciler.rings.of(tenant(reconciler.places.of(self._slot).pool))
        if members is None:
            return None
        # Signing for every node takes longer than a report may: it is done once per ring and period.
        made_for = (members.revision, period(now))
        if self._told is None or self._told[0] != made_for:
            self._told = made_for, told(members, self._slot, now)
        return self._told[1]

    def _wanted(self, report: SlotReport) -> Assignment | None:
        epoch = self._service._reconciler.lease.epoch
        stored = self._service._catalog.assignments.get(self._slot)
        if stored is not None:
            # An agent ahead of the store is adopted first: an older assignment would end what it runs.
            behind = stored.record.revision < report.revision
            return None if behind or epoch < report.epoch else epoch_of(stored.record, epoch)
        if any(instance.state is not State.GONE for instance in report.instances):
            return None
        return Assignment(self._slot, epoch, report.revision)

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError, RelightError, grpc.RpcError):
            await self._reader
        if self._slot:
            self._service._streams[self._slot].discard(self._event)
            self._fleet.detach(self._slot, self._session)


def _check(report: SlotReport, slot: str) -> None:
    wrong = []
    if not is_name(report.slot):
        wrong.append(FieldError("slot", "a name of lower-case letters, digits, '-' and '.'", repr(report.slot)))
    elif slot and report.slot != slot:
        wrong.append(FieldError("slot", f"{slot!r}, the slot of this stream", repr(report.slot)))
    if not report.agent:
        wrong.append(FieldError("agent", "the incarnation of the agent process", repr(report.agent)))
    owned = {device.id for device in report.devices}
    if len(owned) != len(report.devices):
        wrong.append(FieldError("devices", "every id once", ", ".join(d.id for d in report.devices)[:80]))
    for n, instance in enumerate(report.instances):
        if not is_name(instance.instance):
            wrong.append(FieldError(f"instances.{n}.instance", "an instance id", repr(instance.instance)[:80]))
        if not 0 <= instance.rank < max(1, instance.members):
            wrong.append(FieldError(f"instances.{n}.rank", f"0 to {instance.members - 1}", str(instance.rank)))
    wrong += _check_cache(report.cache) + _check_host_tier(report.slot, report.host_tier)
    if len(report.reach) > MOST_REACH:
        wrong.append(FieldError("reach", f"at most {MOST_REACH} ways", str(len(report.reach))))
    for n, way in enumerate(report.reach[:MOST_REACH]):
        if not is_name(way.slot) or len(way.transport) > 16 or len(way.reason) > 4096:
            wrong.append(FieldError(f"reach.{n}", "the name of a slot, a transport, a reason", repr(way)[:80]))
    if wrong:
        raise InvalidInput("not a valid SlotReport", wrong)


MOST_REACH = 64
_KEY = re.compile("[0-9a-f]{64}")
_ADDRESS = re.compile(r"(tcp|tls):\S{1,255}:\d{1,5}")


def _check_cache(cache: CacheReport | None) -> list[FieldError]:
    """Others act on these: a node that names itself wrongly must not spoil the ring for them."""
    if cache is None:
        return []
    wrong = []
    if not _ADDRESS.fullmatch(cache.address):
        wrong.append(FieldError("cache.address", "tcp:host:port or tls:host:port", repr(cache.address)[:80]))
    if not _KEY.fullmatch(cache.signer):
        wrong.append(FieldError("cache.signer", "64 hexadecimal digits", repr(cache.signer)[:80]))
    if not _KEY.fullmatch(cache.grant_key):
        wrong.append(FieldError("cache.grant_key", "64 hexadecimal digits", "something else"))
    return wrong


def _check_host_tier(slot: str, tier: HostReport | None) -> list[FieldError]:
    """A copy that took an engine's name, or another slot's copy's, would be read in its stead."""
    if tier is None:
        return []
    wrong = []
    if tier.budget_bytes < 0:
        wrong.append(FieldError("host_tier.budget_bytes", "at least 0", str(tier.budget_bytes)))
    for n, copy in enumerate(tier.copies):
        where = f"host_tier.copies.{n}"
        if copy.copy != (name := copy_name(slot, copy.content)):
            wrong.append(FieldError(f"{where}.copy", f"{name}, as such a copy is called here", repr(copy.copy)[:80]))
        if copy.bytes < 0:
            wrong.append(FieldError(f"{where}.bytes", "at least 0", str(copy.bytes)))
        if copy.source is not None and not _KEY.fullmatch(copy.source.grant_key):
            wrong.append(FieldError(f"{where}.source.grant_key", "64 hexadecimal digits", "something else"))
    return wrong

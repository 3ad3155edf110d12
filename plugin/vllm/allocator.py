"""vLLM's sleep-mode allocator as a residency uses it: what a sleep takes away and a wake brings back, by tag.

vLLM's own sleep and wake are called, once each, in their order; between them are the weights' pages alone, which a
refill maps, and which one that came to nothing gives back. What a sleep discards and no checkpoint holds, buffers,
computed attributes and memory that belongs to no tensor of the model, is kept in the host's memory meanwhile. vLLM's
copy of level 1 is taken out of its hands before it wakes, so that it is there until the wake is proven, and its bytes
are held to the manifest like a peer's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from relight.core.clock import Clock
from relight.core.errors import LocalFault
from relight.core.logs import get_logger
from relight.plugin.vllm.device_weights import DeviceWeights, Range
from relight.transfer.bounce import read_all, write_all
from relight.transfer.device_segment import DeviceSegment
from relight.transfer.extents import Extent, Extents
from relight.transfer.manifest import WeightManifest
from relight.transfer.segment import Pieces
from relight.transfer.source import Source

WEIGHTS, CACHE = "weights", "kv_cache"
KEPT_BY_VLLM = ("runtime", "cudagraph")
"""Tags that its sleep mode copies to the host at every level."""
log = get_logger("plugin.vllm.allocator")


@dataclass(frozen=True, slots=True)
class Calls:
    """vLLM's own: `sleep(level)` of all memory, `wake()` of the weights' tag, and `enter()`, which makes the worker's
    device that of the calling thread and returns when the engine computes nothing there."""

    sleep: Callable[[int], None]
    wake: Callable[[], None]
    enter: Callable[[], None]


class Allocator:
    """What is read of the allocator: its allocations, by tag."""

    def __init__(self, own: Any) -> None:
        """`own` is vLLM's CuMemAllocator."""
        self.own = own

    def of(self, tag: str) -> Mapping[int, Any]:
        """Allocations by address: `handle[1]` is their bytes, `is_asleep`, `cpu_backup_tensor`."""
        return {address: data for address, data in self.own.pointer_to_data.items() if data.tag == tag}

    def ranges(self, tag: str) -> list[Range]:
        """Where they lie, awake or asleep."""
        return [(address, int(data.handle[1])) for address, data in sorted(self.of(tag).items())]

    def resident(self, tag: str) -> int:
        """Bytes that are mapped now."""
        return sum(int(data.handle[1]) for data in self.of(tag).values() if not data.is_asleep)

    def live(self, tag: str) -> list[Range]:
        """What is in use of a tag's allocations."""
        known, found = self.of(tag), list[Range]()
        for pool, *_ in self.own.allocator_and_pools.get(tag, ()):
            for segment in pool.snapshot():
                if segment["address"] in known:
                    found += _in_use(segment)
        return sorted(found)


def _in_use(segment: Mapping[str, Any]) -> Iterator[Range]:
    """Of one segment of a pool, as torch shows it: its blocks lie one behind the other."""
    address = int(segment["address"])
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            yield address, min(int(block.get("requested_size") or block["size"]), int(block["size"]))
        address += int(block["size"])


class AllocatorPages:
    """One rank's memory on its device."""

    def __init__(self, instance: str, weights: DeviceWeights, allocator: Allocator, calls: Calls, clock: Clock) -> None:
        self._instance, self._weights, self._allocator = instance, weights, allocator
        self._calls, self._clock = calls, clock
        self._aside: list[tuple[int, bytes]] = []
        """What is to be put back, by address."""
        self._beside: list[tuple[Extent, Any]] = []
        """For a copy: what lies in none of the allocations."""
        self._backups: dict[int, torch.Tensor] = {}
        self._manifest: WeightManifest | None = None
        self.copy: Source | None = None

    @property
    def segment(self) -> DeviceSegment:
        return self._weights.segment

    @property
    def copy_bytes(self) -> int:
        return sum(backup.numel() * backup.element_size() for backup in self._held_backups().values())

    def _held_backups(self) -> dict[int, torch.Tensor]:
        held = {a: d.cpu_backup_tensor for a, d in self._allocator.of(WEIGHTS).items()}
        return self._backups | {address: backup for address, backup in held.items() if backup is not None}

    # ------------------------------------------------------------------ to sleep

    def keep(self, level: int, manifest: WeightManifest) -> None:
        # What it has begun may still write to buffers, and copies here wait for none of it.
        self._calls.enter()
        aside = self._weights.aside(self._allocator.live(WEIGHTS))
        self._aside = self._read(aside)
        log.info("allocator.aside", instance=self._instance, ranges=len(aside), bytes=sum(n for _, n in aside))
        self._manifest = manifest
        if level == 1:
            beside = [e for e in self.segment.extents if not e.whole]
            data = [held for _, held in self._read([(e.address, e.bytes) for e in beside])]
            self._beside = [
                (e, ctypes.create_string_buffer(held, len(held))) for e, held in zip(beside, data, strict=True)
            ]

    def _read(self, ranges: list[Range]) -> list[tuple[int, bytes]]:
        found = read_all(self.segment.cuda, ranges)
        return [(address, data) for (address, _), data in zip(ranges, found, strict=True)]

    def release(self, level: int) -> None:
        try:
            self._calls.sleep(level)
        except AssertionError as error:
            # It compares what the whole device has free, after all is released: a neighbour that took some is no fault.
            if self._allocator.resident(WEIGHTS) or self._allocator.resident(CACHE):
                raise LocalFault(f"vllm's sleep failed: {error}") from error
            log.warning("allocator.neighbour", instance=self._instance, reason=str(error))
        except Exception as error:  # vLLM's and the driver's own, of any type
            raise LocalFault(f"vllm's sleep failed: {type(error).__name__}: {error}") from error
        self._offer_copy(level)

    def _offer_copy(self, level: int) -> None:
        """vLLM's copy of level 1, as a source that a refill of this process reads."""
        manifest, backups = self._manifest, self._held_backups()
        if level != 1 or manifest is None:
            return
        whole = [extent for extent in self.segment.extents if extent.whole]
        if missing := [extent for extent in whole if extent.address not in backups]:
            log.warning("allocator.no-copy", instance=self._instance, allocations=len(missing))
            return
        pieces = [Extent(e.offset, backups[e.address].data_ptr(), e.bytes) for e in whole]
        pieces += [Extent(e.offset, ctypes.addressof(held), e.bytes) for e, held in self._beside]
        self.copy = Source(f"{self._instance} host copy", Pieces(Extents(pieces)), manifest, self._clock)

    # ------------------------------------------------------------------ and back

    def bring_back(self) -> str:
        self._calls.enter()
        for address, data in self._allocator.of(WEIGHTS).items():
            if data.cpu_backup_tensor is not None:
                # Otherwise it would copy all of it back unproven, and let go of it.
                self._backups[address], data.cpu_backup_tensor = data.cpu_backup_tensor, None
        if self._asleep():
            try:
                self._calls.wake()
            except Exception as error:  # vLLM's and the driver's own, of any type
                why = f"{type(error).__name__}: {error}"
                raise LocalFault(f"vllm did not bring the weights' memory back: {why}") from error
            self.restore()
        return f"{self._allocator.resident(WEIGHTS)} bytes of the weights' tag are mapped"

    def restore(self) -> None:
        """Puts back what no checkpoint holds, as it was before the sleep. Raises LocalFault."""
        write_all(self.segment.cuda, self._aside)

    def _asleep(self) -> bool:
        return any(data.is_asleep for data in self._allocator.of(WEIGHTS).values())

    def give_back(self) -> None:
        self._calls.enter()
        try:
            # The allocator's own: vLLM's worker would read buffers first, and not all of them need be mapped now.
            self._allocator.own.sleep(KEPT_BY_VLLM)
        except Exception as error:  # vLLM's and the driver's own, of any type
            raise LocalFault(f"vllm did not give memory back: {type(error).__name__}: {error}") from error

    def awake(self) -> None:
        if self.copy is not None:
            self.copy.close(0)
        self.copy, self._manifest = None, None
        self._backups, self._beside, self._aside = {}, [], []

"""A model's tensors where vLLM put them in a device's memory, described by a manifest; none of them is moved.

They lie in allocations of the sleep mode's allocator with the tag of weights, which a sleep takes away, and some beside
them, which stay: both are part of the segment, so that content of another revision replaces all of it. What changes as
the engine runs is no weight, and is left out. What lies in memory of the host is described as scalars while it is few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import nn

from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.logs import get_logger
from relight.plugin.vllm.weights import Group, groups_of, scalar_places, tensors_of
from relight.transfer.device_segment import DeviceSegment
from relight.transfer.extents import lay_out
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.transports.cuda import Cuda
from relight.transfer.verify import Digest

HOST = "cpu"
MOST_HOST_ELEMENTS = 64
"""Of a tensor in the host's memory that is described as scalars: scales of a layer, say."""
HASHERS = 4
"""Threads that read and hash the device's memory at once."""
log = get_logger("plugin.vllm.weights")
Range = tuple[int, int]
"""(address, bytes) of a device's memory."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor was when it was described, kept so that it stays there."""

    tensor: torch.Tensor
    address: int

    def takes(self, other: torch.Tensor) -> bool:
        """Whether what is in `other` can be put here."""
        return (self.tensor.shape, self.tensor.dtype) == (other.shape, other.dtype)


class DeviceWeights:
    """The tensors of one rank. `unfit` says why they cannot be described; empty when they are."""

    def __init__(
        self, models: Mapping[str, nn.Module], cuda: Cuda, device: str, digest: Digest = Digest.XXH3
    ) -> None:  # fmt: skip
        """`models` by what their names begin with; `device` is the type of their device, as torch names it.

        Made when they are loaded; `settle` ends it, when the engine has run.
        """
        self._models, self._cuda, self._device, self._digest = models, cuda, device, digest
        self.unfit = next(filter(None, (self._unfit(name, tensor) for name, tensor in self._named())), "")
        self._before = {} if self.unfit else self._marks()
        self.table: dict[str, TensorEntry] = {}
        self.left_out: tuple[str, ...] = ()
        self._saved: list[Range] = []
        self._places: dict[str, _Place] = {}

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"{prefix}{name}", t) for prefix, model in self._models.items() for name, t in tensors_of(model)]

    def _unfit(self, name: str, tensor: torch.Tensor) -> str:
        if tensor.numel() and tensor.layout != torch.strided:
            return f"tensor {name} has the layout {tensor.layout}"
        if tensor.device.type == self._device or not tensor.numel():
            return ""
        if tensor.device.type == HOST and tensor.numel() <= MOST_HOST_ELEMENTS:
            return ""
        return f"tensor {name} lies in memory of {tensor.device}, of {tensor.numel()} elements"

    def _groups(self) -> tuple[list[Group], set[int]]:
        """All, and the identities of parameters."""
        parameters = {id(p) for model in self._models.values() for p in model.parameters()}
        return groups_of(self._named(), self._device), parameters

    def _marks(self) -> dict[str, tuple[int, bytes]]:
        """Of what is no parameter: where it lies, and its digests."""
        groups, parameters = self._groups()
        others = [group for group in groups if not group.within(parameters)]
        if not others:
            return {}
        segment = DeviceSegment(self._cuda, lay_out((g.start, g.bytes, False) for g in others))
        found = _digests(segment, [(e.offset, e.offset + e.bytes) for e in segment.extents])
        marks = dict(zip((e.address for e in segment.extents), found, strict=True))
        return {group.name: (group.start, marks[group.start]) for group in others}

    def settle(self, allocations: Iterable[Range]) -> None:
        """Describes what does not change as the engine runs; `allocations` are those that a sleep takes away."""
        now = self._marks()
        groups, parameters = self._groups()
        changed = {name for name, mark in now.items() if self._before.get(name) != mark}
        self.left_out = tuple(sorted(changed))
        if changed:
            log.info("weights.left-out", tensors=", ".join(self.left_out), reason="it changed as the engine ran")
        kept = [group for group in groups if group.name not in changed]
        self.segment = DeviceSegment(self._cuda, lay_out(_extents(kept, allocations)), self._digest)
        for group in kept:
            entry = group.entry(self._offset(group))
            self.table[entry.name] = entry
            if group.within(parameters):
                self._saved.append((group.start, group.bytes))
            for name, tensor in group.members:
                self._places[name] = _Place(tensor.detach(), tensor.data_ptr())
        self._before = {}

    def _offset(self, group: Group) -> int:
        offset = self.segment.offset_of(group.start)
        if offset is None:
            raise LocalFault(f"tensor {group.name} lies in no allocation that was described")
        return offset

    @property
    def bytes(self) -> int:
        """Of all that is described."""
        return sum(entry.bytes for entry in self.table.values())

    def aside(self, live: Iterable[Range]) -> list[Range]:
        """Which of the `live` ranges no checkpoint holds: all but parameters."""
        return without(live, self._saved)

    def describe(self, fingerprint: Fingerprint) -> WeightManifest:
        """The manifest of what the device holds now; every tensor is hashed. Raises LocalFault."""
        entries = list(self.table.values())
        found = _digests(self.segment, [(e.offset, e.offset + e.bytes) for e in entries])
        tensors = tuple(replace(e, blocks=blocks) for e, blocks in zip(entries, found, strict=True))
        return WeightManifest(fingerprint, 0, self.segment.bytes, tensors, self.scalars(), digests=self._digest)

    # ------------------------------------------------------------------ after a checkpoint was read again

    def restore_places(self) -> None:
        """Puts tensors back where they were: what reads a checkpoint may have made some anew elsewhere, and captured
        graphs read the old place. Raises LocalFault naming one that is missing or of another form."""
        now = dict(self._named())
        with torch.no_grad():
            for name, place in self._places.items():
                tensor = now.get(name)
                if tensor is None or not place.takes(tensor):
                    raise LocalFault(f"tensor {name} did not come back from the checkpoint as it was")
                if tensor.data_ptr() != place.address:
                    place.tensor.copy_(tensor)
                    tensor.data = place.tensor

    # ------------------------------------------------------------------ what lies in the host's memory

    def _host_tensors(self) -> dict[str, torch.Tensor]:
        if self._device == HOST:
            return {}
        return {name: t for name, t in self._named() if t.device.type == HOST and t.numel()}

    def scalars(self) -> dict[str, float]:
        """Floats of layers, and elements of tensors in the host's memory, by name."""
        found = {
            f"{prefix}{name}": float(getattr(module, attribute))
            for prefix, model in self._models.items()
            for name, (module, attribute) in scalar_places(model).items()
        }
        for name, tensor in self._host_tensors().items():
            for n, value in enumerate(tensor.reshape(-1).tolist()):
                found[f"{name}[{n}]"] = float(value)
        return found

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Sets them to the source's values. Raises LocalFault naming one that exists on one side only."""
        odd = sorted(set(self.scalars()) ^ set(scalars))
        if odd:
            raise LocalFault(f"host scalar {odd[0]} exists on one side only")
        for prefix, model in self._models.items():
            for name, (module, attribute) in scalar_places(model).items():
                setattr(module, attribute, scalars[f"{prefix}{name}"])
        for name, tensor in self._host_tensors().items():
            values = [scalars[f"{name}[{n}]"] for n in range(tensor.numel())]
            with torch.no_grad():
                tensor.copy_(torch.tensor(values, dtype=torch.float64).to(tensor.dtype).reshape(tensor.shape))


def _extents(groups: Sequence[Group], allocations: Iterable[Range]) -> list[tuple[int, int, bool]]:
    """Allocations with something of the model in them, whole; and what lies in none of them, by itself."""
    outside = sorted((group.start, group.bytes) for group in groups)
    found = []
    for address, length in sorted(allocations):
        inside = [g for g in outside if address <= g[0] < address + length]
        if inside:
            found.append((address, length, True))
            outside = [g for g in outside if g not in set(inside)]
    return found + [(address, length, False) for address, length in outside]


def without(ranges: Iterable[Range], taken: Iterable[Range]) -> list[Range]:
    """What of `ranges` is not `taken`, in the order of addresses; neither overlaps within itself."""
    holes = sorted(taken)
    found: list[Range] = []
    for address, length in sorted(ranges):
        at, end = address, address + length
        for low, size in holes:
            if low + size <= at:
                continue
            if low >= end:
                break
            if low > at:
                found.append((at, low - at))
            at = max(at, low + size)
        if at < end:
            found.append((at, end - at))
    return found


def _digests(segment: DeviceSegment, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Of each [start, stop) of a segment, read and hashed by several threads."""
    shares = [list(range(n, len(spans), HASHERS)) for n in range(min(HASHERS, len(spans)))]
    found = [b""] * len(spans)

    def hash_(numbers: Sequence[int]) -> None:
        with segment.bounce() as bounce:
            for number in numbers:
                found[number] = segment.digests_by(bounce, *spans[number])

    run: Callable[[Sequence[int]], None] = hash_
    with ThreadPoolExecutor(max(len(shares), 1), "relight-hash") as pool:
        for _ in pool.map(run, shares):
            pass
    return found

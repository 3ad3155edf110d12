"""A model's tensors, moved into one segment and described by a manifest.

Every parameter, buffer and tensor held as a plain attribute is re-pointed at the segment without changing
its identity, so whatever refers to it follows. Tensors that share storage move together. Host scalars (floats
that kernels are called with) are described apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.transfer.manifest import ITEM_BYTES, TensorEntry, WeightManifest
from relight.transfer.segment import Segment, copy
from relight.transfer.verify import Digest, blocks_of

ALIGNMENT = 256
"""Bytes; more than any kernel asks for."""
_NOT_WEIGHTS = frozenset({"kv_cache", "lora_a_stacked", "lora_b_stacked", "punica_wrapper"})
"""Attributes of layers that change from step to step: cached keys and values, and the places that adapters are put into
when a request wants them. A receiver's adapters are its own, from its own start."""
_OWN = ("vllm.", "relight.")


def _inside(value: object, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict) and depth:
        for key, inner in value.items():
            yield from _inside(inner, f"{name}.{key}", depth - 1)
    elif isinstance(value, list | tuple) and depth:
        for n, inner in enumerate(value):
            yield from _inside(inner, f"{name}.{n}", depth - 1)
    elif depth and not isinstance(value, nn.Module) and type(value).__module__.startswith(_OWN):
        # Kernels, quantisation methods and attention backends keep tensors in plain objects.
        for key, inner in getattr(value, "__dict__", {}).items():
            yield from _inside(inner, f"{name}.{key}", depth - 1)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with content that the model holds, by name; the same tensor may come under many names."""
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    yield dot + name, tensor
        for name, value in module.__dict__.items():
            if (
                name not in _NOT_WEIGHTS
                and not name.startswith("_forward")
                and name not in ("_parameters", "_buffers", "_modules")
            ):
                yield from _inside(value, dot + name, 2)


def scalar_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where host scalars of the layers lie, such as FP8 KV scales: floats that are not tensors and change answers."""
    return {
        f"{path}.{name}": (module, name)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if type(value) is float
    }


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one storage: the bytes to move, and who points into them."""

    start: int
    bytes: int
    members: tuple[tuple[str, torch.Tensor], ...]

    @property
    def name(self) -> str:
        """That of its first member; the others are aliases."""
        return self.members[0][0]

    def within(self, tensors: Collection[int]) -> bool:
        """Whether all of its members are among the tensors of these identities."""
        return all(id(tensor) in tensors for _, tensor in self.members)

    def entry(self, offset: int) -> TensorEntry:
        """As a manifest has it, at `offset` of a segment."""
        names = list(dict.fromkeys(name for name, _ in self.members))
        _, first = self.members[0]
        dtype = str(first.dtype).removeprefix("torch.")
        if self.single and dtype in ITEM_BYTES:
            return TensorEntry(
                names[0], dtype, tuple(first.shape), tuple(first.stride()), offset, self.bytes, tuple(names[1:])
            )
        # Different views of one storage, and dtypes of which nobody here knows more, travel as bytes.
        return TensorEntry(names[0], "uint8", (self.bytes,), (1,), offset, self.bytes, tuple(names[1:]))

    @property
    def single(self) -> bool:
        _, first = self.members[0]
        return all(
            (t.data_ptr(), t.shape, t.stride(), t.dtype) == (first.data_ptr(), first.shape, first.stride(), first.dtype)
            for _, t in self.members
        )


def groups_of(named: Iterable[tuple[str, torch.Tensor]], device: str) -> list[Group]:
    """Those of the tensors that lie in memory of one type of device, grouped by their storage."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.device.type == device and tensor.layout == torch.strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    groups = []
    for members in by_storage.values():
        ends = [(t.data_ptr(), t.data_ptr() + _reach(t) * t.element_size()) for _, t in members]
        low, high = min(a for a, _ in ends), max(b for _, b in ends)
        groups.append(Group(low, high - low, tuple(members)))
    return groups


def _reach(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that the tensor touches, both included."""
    return 1 + sum(int(n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


class Weights:
    """The model's tensors in their segment, and the table that says which lies where."""

    def __init__(self, model: nn.Module, name: str, *, filled: bool = True, digest: Digest = Digest.XXH3) -> None:
        """Moves all tensors of `model` into a new segment. Raises LocalFault (no memory).

        Where the model is not `filled` yet its parameters are not copied: their pages come with the first refill.
        """
        self._places = scalar_places(model)
        groups = groups_of(tensors_of(model), "cpu")
        offsets, end = [], 0
        for group in groups:
            offsets.append(end)
            end += -(-group.bytes // ALIGNMENT) * ALIGNMENT
        self.segment = Segment(name, end, digest=digest)
        if filled:
            self.segment.populate(0, self.segment.bytes, patient=True)
        whole = torch.frombuffer(self.segment.view, dtype=torch.uint8)
        self.table: dict[str, TensorEntry] = {}
        self._unsaved: dict[str, bytes] = {}
        parameters = {id(p) for p in model.parameters()}
        for group, offset in zip(groups, offsets, strict=True):
            saved = group.within(parameters)
            self._move(group, offset, whole, copied=filled or not saved)
            entry = group.entry(offset)
            self.table[entry.name] = entry
            if not saved:
                # No checkpoint holds buffers and computed attributes: the disk rung needs a copy of its own.
                self._unsaved[entry.name] = bytes(self._bytes(entry))

    def _move(self, group: Group, offset: int, whole: torch.Tensor, *, copied: bool) -> None:
        # A tied parameter stands under several names; once moved, its address says nothing about its place.
        for tensor in {id(t): t for _, t in group.members}.values():
            at = offset + tensor.data_ptr() - group.start
            size = _reach(tensor) * tensor.element_size()
            view = whole[at : at + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            if copied:
                view.copy_(tensor.data)
            # Assigning .data keeps the object, so every reference to it now reads the segment.
            tensor.data = view

    def _bytes(self, entry: TensorEntry) -> memoryview:
        return self.segment.view[entry.offset : entry.offset + entry.bytes]

    def describe(self, fingerprint: Fingerprint) -> WeightManifest:
        """The manifest of what the segment holds now; every tensor is hashed."""
        tensors = tuple(replace(e, blocks=blocks_of(self._bytes(e), self.segment.digest)) for e in self.table.values())
        return WeightManifest(fingerprint, 0, self.segment.bytes, tensors, self._scalars(), digests=self.segment.digest)

    def _scalars(self) -> dict[str, float]:
        return {name: getattr(module, attribute) for name, (module, attribute) in self._places.items()}

    def restore_unsaved(self) -> None:
        """Puts back the tensors that no checkpoint holds."""
        for name, data in self._unsaved.items():
            copy(self._bytes(self.table[name]), memoryview(bytearray(data)))

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Sets host scalars to the source's values. Raises LocalFault naming one that exists on one side only."""
        odd = sorted(set(self._places) ^ set(scalars))
        if odd:
            raise LocalFault(f"host scalar {odd[0]} exists on one side only")
        for name, value in scalars.items():
            module, attribute = self._places[name]
            setattr(module, attribute, value)

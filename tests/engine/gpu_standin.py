"""A device for vLLM's sleep mode on a machine without one: its allocator, worker and backend are vLLM's own.

Made up: the extension that maps memory, cudart's copy, and torch's word on what is free. A device's memory is a file of
the host's for each allocation, mapped at an address that stays: memory that a sleep took away cannot be touched, and
memory that comes back holds rubbish.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from relight.core.errors import LocalFault
from relight.transfer.extents import Extent
from relight.transfer.segment import opaque
from relight.transfer.transports.cuda import FD, Piece
from tests.unit.transfer.fake_cuda import FakeCuda

GRANULE = 1 << 20
RUBBISH = 0xDB
_SHARED_FIXED, _RESERVED = 0x01 | 0x10, 0x02 | 0x20 | 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


@dataclass
class Device:
    """All of its allocations by address, and how much a neighbour takes while this process sleeps."""

    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(bytes, file)."""
    neighbour: int = 0
    fail_at: int = -1
    """How many more allocations are mapped before the device is full; -1: it never is."""
    passes_on: bool = True
    ordinary: dict[int, tuple[int, int]] = field(default_factory=dict)
    """What no pool of the sleep mode made."""

    def reserve(self, length: int) -> int:
        at = _libc.mmap(None, length, 0, _RESERVED, -1, 0)
        assert at not in (None, ctypes.c_void_p(-1).value)
        return int(at)

    def create_and_map(self, device: int, length: int, address: int, handle: int) -> None:
        if self.fail_at == 0:
            self.fail_at = -1
            raise RuntimeError("CUDA Error: out of memory")
        self.fail_at -= self.fail_at > 0
        assert address not in self.mapped, "mapped twice"
        self.mapped[address] = length, self._map(address, length)

    def _map(self, address: int, length: int) -> int:
        file = os.memfd_create("device", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, length)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert _libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, _SHARED_FIXED, file, 0) == address
        ctypes.memset(address, RUBBISH, length)
        return file

    def beside(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in memory that a sleep leaves alone, in the middle of an allocation."""
        length = GRANULE
        at = self.reserve(length)
        self.ordinary[at] = length, self._map(at, length)
        made = torch.frombuffer(opaque(at + 1024, tensor.numel() * tensor.element_size()), dtype=tensor.dtype)
        return made.reshape(tensor.shape).copy_(tensor)

    def unmap_and_release(self, device: int, length: int, address: int, handle: int) -> None:
        _, file = self.mapped.pop(address)
        assert _libc.mmap(address, length, 0, _RESERVED | 0x10, -1, 0) == address
        os.close(file)

    def copy(self, into: int, address: int, length: int) -> None:
        ctypes.memmove(into, address, length)

    def memory_info(self, *_: Any) -> tuple[int, int]:
        total = 1 << 40
        return total - sum(length for length, _ in self.mapped.values()) - self.neighbour, total


DEVICE = Device()


class Cuda(FakeCuda):
    """The driver as Relight calls it, over the same memory."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(0)

    def export(self, extent: Extent) -> tuple[Piece, int]:
        if not DEVICE.passes_on:
            raise LocalFault(f"passing on {extent.bytes} bytes: its allocator made it without handles")
        if extent.whole:
            length, file = DEVICE.mapped[extent.address]
            assert length == extent.bytes
            return Piece(FD, 0, length), os.dup(file)
        base, file = next((a, f) for a, (n, f) in DEVICE.ordinary.items() if 0 <= extent.address - a < n)
        return Piece(FD, extent.address - base, extent.bytes), os.dup(file)


def extension() -> ModuleType:
    """In place of vllm.cumem_allocator, which is compiled for CUDA."""
    made = ModuleType("vllm.cumem_allocator")
    made.init_module = lambda *a: None  # type: ignore[attr-defined]
    made.python_create_and_map = DEVICE.create_and_map  # type: ignore[attr-defined]
    made.python_unmap_and_release = DEVICE.unmap_and_release  # type: ignore[attr-defined]
    return made


class Cudart:
    """As vLLM's wrapper of cudart, for its allocator's copies."""

    def cudaMemcpy(self, into: int, address: int, length: int) -> None:  # noqa: N802 - cudart's name
        DEVICE.copy(into, address, length)


class Pool:
    """One memory pool of torch's, as far as it shows what is in use."""

    def __init__(self) -> None:
        self.segments: dict[int, list[tuple[int, int, str]]] = {}
        """By allocation: (bytes of a block, bytes asked for, its state)."""

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "address": address,
                "blocks": [{"size": size, "requested_size": asked, "state": state} for size, asked, state in blocks],
            }
            for address, blocks in self.segments.items()
        ]


class Tensors:
    """Tensors in the memory of a tag, several to an allocation, as torch's caching allocator packs them."""

    def __init__(self, allocator: Any, tag: str, length: int = GRANULE) -> None:
        self._allocator, self._tag, self._length = allocator, tag, length
        self._pool = Pool()
        allocator.allocator_and_pools.setdefault(tag, []).append((self._pool, None))
        self._left, self._at = 0, 0

    def _block(self, length: int) -> int:
        size = -(-length // 512) * 512
        if size > self._left:
            whole = max(-(-size // GRANULE) * GRANULE, self._length)
            self._at, self._left = DEVICE.reserve(whole), whole
            self._allocator.current_tag = self._tag
            DEVICE.create_and_map(0, whole, self._at, 0)
            self._allocator._python_malloc_callback((0, whole, self._at, 0))
            self._pool.segments[self._at] = []
            self._first = self._at
        at = self._at
        self._pool.segments[self._first].append((size, length, "active_allocated"))
        self._at, self._left = self._at + size, self._left - size
        return at

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in this memory, strides included."""
        reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        at = self._block(reach * tensor.element_size())
        flat = torch.frombuffer(opaque(at, reach * tensor.element_size()), dtype=tensor.dtype)
        made = flat.as_strided(tensor.shape, tensor.stride())
        made.copy_(tensor)
        return made

    def free(self, length: int) -> None:
        """A hole: memory that was in use and is no more."""
        at = self._block(length)
        blocks = self._pool.segments[self._first]
        blocks[-1] = (*blocks[-1][:2], "inactive")
        ctypes.memset(at, 0x11, length)

    def nobodys(self, data: bytes) -> int:
        """Memory in use that no tensor of the model names; where it lies."""
        at = self._block(len(data))
        ctypes.memmove(at, data, len(data))
        return at


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """From here on vLLM finds a device, and its allocator the extension."""
    sys.modules["vllm.cumem_allocator"] = extension()
    from vllm.distributed.device_communicators import cuda_wrapper
    from vllm.platforms import current_platform

    with contextlib.ExitStack() as stack:
        put = lambda *a, **k: stack.enter_context(patch.object(*a, **k))  # noqa: E731
        put(cuda_wrapper, "CudaRTLibrary", Cudart)
        put(type(current_platform), "is_cuda_alike", lambda self: True)
        for name in ("synchronize", "empty_cache", "set_device_index"):
            put(torch.accelerator, name, lambda *a: None)
        put(torch.accelerator, "get_memory_info", DEVICE.memory_info)
        put(torch.cuda, "get_device_name", lambda *a: "Stand-in")
        import relight.plugin.vllm.gpu_memory as ours

        put(ours, "Cuda", Cuda)
        yield


def settings(directory: Path, instance: str, revision: str) -> dict[str, str]:
    """What an agent would have told the engine."""
    directory.mkdir(mode=0o700, exist_ok=True)
    return {
        "RELIGHT_INSTANCE": instance, "RELIGHT_ENGINE_DIR": str(directory), "RELIGHT_BIND_HOST": "127.0.0.1",
        "RELIGHT_CONTENT_REVISION": revision, "RELIGHT_MODE": "normal",
    }  # fmt: skip

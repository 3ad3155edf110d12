"""Device memory as engines have it, made through the driver, and what of it makes a source."""

from __future__ import annotations

import ctypes
import random

from relight.core.fingerprint import Fingerprint
from relight.transfer.bounce import write_all
from relight.transfer.device_segment import DeviceSegment
from relight.transfer.extents import lay_out
from relight.transfer.manifest import Canary, TensorEntry, WeightManifest
from relight.transfer.transports.cuda import Access, AllocationProp, Cuda, Location
from relight.transfer.verify import blocks_of

GRANULE = 2 << 20
SIZES = (8 << 20, 2 << 20, 22 << 20)
BODY = sum(SIZES)
LAYOUT = {"engine": "test"}
HANDLES = {"fd": 0x1, "fabric": 0x8, "none": 0x0}
"""CUmemAllocationHandleType by kind of cuMemCreate's memory; "none" is what vLLM's sleep mode once had."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


def allocate(cuda: Cuda, kind: str) -> DeviceSegment:
    """SIZES as allocations of one address range, or one of cudaMalloc's for the kind "ipc"."""
    cuda._enter()
    at = ctypes.c_uint64()
    if kind == "ipc":
        cuda._driver.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        cuda._call("cuMemAlloc_v2", "allocating", ctypes.byref(at), BODY)
        return DeviceSegment(cuda, lay_out([(at.value, BODY, True)]))
    cuda._driver.cuMemCreate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong]
    cuda._call("cuMemAddressReserve", "reserving", ctypes.byref(at), BODY, 0, 0, 0)
    address, made = at.value, []
    for size in SIZES:
        wanted = AllocationProp(type=_PINNED, requested=HANDLES[kind], location=Location(_ON_DEVICE, cuda.device))
        handle = ctypes.c_uint64()
        cuda._call("cuMemCreate", "allocating", ctypes.byref(handle), size, ctypes.byref(wanted), 0)
        cuda._call("cuMemMap", "mapping", address, size, 0, handle, 0)
        access = Access(Location(_ON_DEVICE, cuda.device), _READ_WRITE)
        cuda._call("cuMemSetAccess", "mapping", address, size, ctypes.byref(access), 1)
        made.append((address, size, True))
        address += size
    return DeviceSegment(cuda, lay_out(made))


def fill(segment: DeviceSegment) -> WeightManifest:
    """Puts the body into the device's memory and describes it: some tensors in each allocation."""
    draw, entries = random.Random(11), list[TensorEntry]()
    for extent in segment.extents:
        at = extent.offset
        for size in (17, 1 << 20, extent.bytes - (1 << 20) - 512):
            body = draw.randbytes(size)
            write_all(segment.cuda, [(segment.at(at, at + size), body)])
            blocks = blocks_of(memoryview(body))
            entries.append(TensorEntry(f"t{len(entries)}", "uint8", (size,), (1,), at, size, (), blocks))
            at += -(-size // 256) * 256
    return WeightManifest(
        Fingerprint(LAYOUT, {"revision": "r1"}, {}), 0, segment.bytes, tuple(entries), {}, Canary((1,), (2,), (-0.1,))
    )

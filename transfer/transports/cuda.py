"""CUDA's driver, as far as memory has to be shared between processes and copied between devices; no torch needed.

libcuda.so.1 comes with NVIDIA's driver and is loaded when a device is first opened. Its functions are called in the
device's primary context, which is the one that torch uses. Structures and constants are those of cuda.h (12.9).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from relight.core.errors import InvalidInput, LocalFault
from relight.transfer.extents import MOST_EXTENTS, Extent

FD, FABRIC, IPC = "fd", "fabric", "ipc"
"""How an allocation is passed on: a descriptor, 64 bytes for a fabric of several nodes, or 64 bytes of legacy IPC."""
HANDLE_BYTES = 64
Event = ctypes.c_void_p
_TYPES = {FD: 0x1, FABRIC: 0x8}
"""CUmemAllocationHandleType."""
_NOT_READY = 600
_REMOTE = {1, 101, 201, 400}
"""Invalid value, device, context or handle: what the other side passed cannot be opened by anybody."""
_NON_BLOCKING, _LAZY_PEER_ACCESS = 0x1, 0x1
_SLEEPING = 0x1 | 0x2
"""CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING: who waits for such an event leaves the core to others."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_DMA_BUF = 0x1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD."""
_ON_DEVICE, _READ = 1, 1
"""CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READ."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int), ("requested", ctypes.c_int), ("location", Location), ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class CudaFault(LocalFault):
    """A call of the driver failed; `theirs` says that what a peer passed was at fault."""

    def __init__(self, message: str, *, theirs: bool) -> None:
        super().__init__(message)
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class Piece:
    """One allocation as it is passed to another process: `bytes` of it from `skip` on; "" as handle of a descriptor.

    `at` is the offset in the source's segment at which it lies.
    """

    kind: str
    skip: int
    bytes: int
    handle: str = ""
    at: int = 0

    @classmethod
    def parse(cls, raw: object) -> Piece:
        """Raises InvalidInput saying what was expected."""
        if not isinstance(raw, dict) or set(raw) != set(cls.__dataclass_fields__):
            raise InvalidInput(f"expected a piece of memory with {', '.join(cls.__dataclass_fields__)}")
        kind, handle = raw["kind"], raw["handle"]
        if kind not in (FD, FABRIC, IPC):
            raise InvalidInput(f"expected kind of a piece as {FD}, {FABRIC} or {IPC}")
        for name, least in (("skip", 0), ("bytes", 1), ("at", 0)):
            if type(raw[name]) is not int or not least <= raw[name] < 1 << 48:
                raise InvalidInput(f"expected {name} of a piece from {least} to {(1 << 48) - 1}")
        size = 0 if kind == FD else HANDLE_BYTES
        try:
            right = isinstance(handle, str) and len(bytes.fromhex(handle)) == size and len(handle) == 2 * size
        except ValueError:
            right = False
        if not right:
            raise InvalidInput(f"expected handle of a piece ({kind}) as {size} bytes in hexadecimal")
        return cls(kind, raw["skip"], raw["bytes"], handle, raw["at"])


@cache
def _library() -> Any:
    """The driver, initialised. Raises LocalFault where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LocalFault(f"this machine has no driver of NVIDIA: {error}") from error
    pointer, size = ctypes.c_uint64, ctypes.c_size_t
    library.cuMemcpyDtoDAsync_v2.argtypes = [pointer, pointer, size, ctypes.c_void_p]
    library.cuMemcpyDtoHAsync_v2.argtypes = [ctypes.c_void_p, pointer, size, ctypes.c_void_p]
    library.cuMemcpyHtoDAsync_v2.argtypes = [pointer, ctypes.c_void_p, size, ctypes.c_void_p]
    library.cuMemHostAlloc.argtypes = [ctypes.c_void_p, size, ctypes.c_uint]
    library.cuMemGetHandleForAddressRange.argtypes = [
        ctypes.c_void_p, pointer, size, ctypes.c_int, ctypes.c_ulonglong
    ]  # fmt: skip
    library.cuMemRetainAllocationHandle.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuMemGetAddressRange_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, pointer]
    library.cuMemGetAllocationPropertiesFromHandle.argtypes = [ctypes.c_void_p, pointer]
    library.cuMemExportToShareableHandle.argtypes = [ctypes.c_void_p, pointer, ctypes.c_int, ctypes.c_ulonglong]
    library.cuMemImportFromShareableHandle.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.cuMemAddressReserve.argtypes = [ctypes.c_void_p, size, size, pointer, ctypes.c_ulonglong]
    library.cuMemMap.argtypes = [pointer, size, size, pointer, ctypes.c_ulonglong]
    library.cuMemSetAccess.argtypes = [pointer, size, ctypes.c_void_p, size]
    library.cuMemUnmap.argtypes = library.cuMemAddressFree.argtypes = [pointer, size]
    library.cuMemRelease.argtypes = library.cuIpcCloseMemHandle.argtypes = [pointer]
    library.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, pointer]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, IpcHandle, ctypes.c_uint]
    library.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for name in (
        "cuEventQuery", "cuEventSynchronize", "cuEventDestroy_v2", "cuStreamSynchronize", "cuStreamDestroy_v2",
        "cuCtxSetCurrent", "cuMemFreeHost",
    ):  # fmt: skip
        getattr(library, name).argtypes = [ctypes.c_void_p]
    _check(library, library.cuInit(0), "starting the driver")
    return library


def _check(library: Any, code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        said = (name.value or b"unknown").decode(errors="replace")
        raise CudaFault(f"{what}: {said} ({code})", theirs=code in _REMOTE)


@dataclass(frozen=True, slots=True)
class Mapped:
    """A peer's piece in this process: where its bytes begin, and what `unmap` needs."""

    address: int
    bytes: int
    base: int
    whole: int
    kind: str
    at: int = 0
    """As the piece has it."""


class Cuda:
    """One device of this process, by its ordinal here. Thread-safe."""

    def __init__(self, device: int) -> None:
        """Raises LocalFault where the driver, or the device, is missing."""
        self.device = device
        self._driver = _library()
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", f"device {device}", ctypes.byref(number), device)
        self._number = number.value
        self._call("cuDevicePrimaryCtxRetain", f"device {device}", ctypes.byref(self._context), number)
        self._local = threading.local()

    def _call(self, name: str, what: str, *arguments: Any) -> None:
        _check(self._driver, getattr(self._driver, name)(*arguments), what)

    def _enter(self) -> None:
        """Makes the device's context that of this thread."""
        if not getattr(self._local, "entered", False):
            self._call("cuCtxSetCurrent", f"device {self.device}", self._context)
            if threading.current_thread() is not threading.main_thread():
                # While the engine's own thread captures a graph, calls of others would otherwise fail, and its capture
                # with them: nothing here is part of one.
                mode = ctypes.c_int(_RELAXED)
                self._call("cuThreadExchangeStreamCaptureMode", f"device {self.device}", ctypes.byref(mode))
            self._local.entered = True

    # ------------------------------------------------------------------ passing memory on

    def export(self, extent: Extent) -> tuple[Piece, int]:
        """What lies at `extent`, and its descriptor, which the caller closes; -1 when its handle is bytes. Raises
        LocalFault: not every allocation can be passed on."""
        self._enter()
        address, length = extent.address, extent.bytes
        what = f"passing on {length} bytes of device {self.device}"
        handle = ctypes.c_uint64()
        if self._driver.cuMemRetainAllocationHandle(ctypes.byref(handle), address):
            # It was not made by cuMemCreate: legacy IPC passes what cudaMalloc made.
            return self._export_legacy(address, length, what), -1
        try:
            if not extent.whole:
                raise LocalFault(f"{what}: they are a part of what its allocator made (cuMemCreate)")
            prop = AllocationProp()
            self._call("cuMemGetAllocationPropertiesFromHandle", what, ctypes.byref(prop), handle)
            if prop.requested & _TYPES[FD]:
                descriptor = ctypes.c_int(-1)
                self._call("cuMemExportToShareableHandle", what, ctypes.byref(descriptor), handle, _TYPES[FD], 0)
                return Piece(FD, 0, length), descriptor.value
            if prop.requested & _TYPES[FABRIC]:
                told = (ctypes.c_ubyte * HANDLE_BYTES)()
                self._call("cuMemExportToShareableHandle", what, ctypes.byref(told), handle, _TYPES[FABRIC], 0)
                return Piece(FABRIC, 0, length, bytes(told).hex()), -1
        finally:
            self._driver.cuMemRelease(handle)
        raise LocalFault(f"{what}: its allocator made it without handles for other processes (cuMemCreate)")

    def _export_legacy(self, address: int, length: int, what: str) -> Piece:
        base, whole, told = ctypes.c_uint64(), ctypes.c_size_t(), IpcHandle()
        self._call("cuMemGetAddressRange_v2", what, ctypes.byref(base), ctypes.byref(whole), address)
        if address + length > base.value + whole.value:
            raise LocalFault(f"{what}: they lie in more than one allocation")
        self._call("cuIpcGetMemHandle", what, ctypes.byref(told), address)
        return Piece(IPC, address - base.value, length, bytes(told.reserved).hex())

    def map(self, piece: Piece, descriptor: int) -> Mapped:
        """A peer's piece, readable by this device; takes ownership of `descriptor`. Raises CudaFault."""
        try:
            self._enter()
            return self._map_legacy(piece) if piece.kind == IPC else self._map(piece, descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _map_legacy(self, piece: Piece) -> Mapped:
        base, handle = ctypes.c_uint64(), IpcHandle.from_buffer_copy(bytes.fromhex(piece.handle))
        self._call("cuIpcOpenMemHandle_v2", "opening a peer's memory", ctypes.byref(base), handle, _LAZY_PEER_ACCESS)
        return Mapped(base.value + piece.skip, piece.bytes, base.value, 0, IPC, piece.at)

    def _map(self, piece: Piece, descriptor: int) -> Mapped:
        what, handle, at = "mapping a peer's memory", ctypes.c_uint64(), ctypes.c_uint64()
        told = ctypes.create_string_buffer(bytes.fromhex(piece.handle), HANDLE_BYTES)
        passed = ctypes.c_void_p(descriptor) if piece.kind == FD else ctypes.cast(told, ctypes.c_void_p)
        self._call("cuMemImportFromShareableHandle", what, ctypes.byref(handle), passed, _TYPES[piece.kind])
        whole = piece.skip + piece.bytes
        try:
            self._call("cuMemAddressReserve", what, ctypes.byref(at), whole, 0, 0, 0)
            try:
                self._call("cuMemMap", what, at, whole, 0, handle, 0)
                try:
                    access = Access(Location(_ON_DEVICE, self._number), _READ)
                    self._call("cuMemSetAccess", what, at, whole, ctypes.byref(access), 1)
                except CudaFault:
                    self._driver.cuMemUnmap(at, whole)
                    raise
            except CudaFault:
                self._driver.cuMemAddressFree(at, whole)
                raise
        finally:
            # A mapping keeps the memory by itself.
            self._driver.cuMemRelease(handle)
        return Mapped(at.value + piece.skip, piece.bytes, at.value, whole, piece.kind, piece.at)

    def unmap(self, mapped: Mapped) -> None:
        """Gives a peer's piece back; nothing may be copying from it."""
        self._enter()
        if mapped.kind == IPC:
            self._driver.cuIpcCloseMemHandle(mapped.base)
            return
        self._driver.cuMemUnmap(mapped.base, mapped.whole)
        self._driver.cuMemAddressFree(mapped.base, mapped.whole)

    def dma_buf(self, address: int, length: int) -> int:
        """A descriptor by which a network card reaches [address, address + length), both multiples of the host's page;
        the caller closes it. Raises LocalFault: not every driver and kernel have them."""
        self._enter()
        made = ctypes.c_int(-1)
        what = f"a DMA buffer of device {self.device}"
        self._call("cuMemGetHandleForAddressRange", what, ctypes.byref(made), address, length, _DMA_BUF, 0)
        return made.value

    # ------------------------------------------------------------------ copying

    def stream(self) -> Stream:
        """A new stream, which waits for no other. Raises LocalFault."""
        self._enter()
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", "a stream", ctypes.byref(made), _NON_BLOCKING)
        return Stream(self, made)

    def pinned(self, length: int) -> int:
        """The address of new memory of the host that the device reaches by itself; `unpin` gives it back. Raises
        LocalFault."""
        self._enter()
        made = ctypes.c_void_p()
        self._call("cuMemHostAlloc", f"{length} bytes of pinned memory", ctypes.byref(made), length, 0)
        return int(made.value or 0)

    def unpin(self, address: int) -> None:
        """Nothing may be copying to or from it."""
        self._enter()
        self._driver.cuMemFreeHost(address)


class Stream:
    """Copies of one device, one after the other, beside whatever else it does."""

    def __init__(self, cuda: Cuda, made: ctypes.c_void_p) -> None:
        self._cuda, self._stream = cuda, made

    def copy(self, into: int, address: int, length: int) -> Event:
        """Starts a copy between device memory; the event is what `done` or `wait` takes, once. Raises LocalFault."""
        return self._start("cuMemcpyDtoDAsync_v2", "copying between devices", into, address, length)

    def up(self, into: int, host: int, length: int) -> Event:
        """Starts a copy from pinned memory of the host to the device's; as `copy`."""
        return self._start("cuMemcpyHtoDAsync_v2", "copying to the device", into, host, length)

    def down(self, into: int, address: int, length: int) -> Event:
        """Starts a copy from the device's memory to pinned memory of the host; as `copy`."""
        return self._start("cuMemcpyDtoHAsync_v2", "copying from the device", into, address, length)

    def _start(self, call: str, what: str, into: int, address: int, length: int) -> Event:
        cuda, event = self._cuda, Event()
        cuda._enter()
        cuda._call("cuEventCreate", "an event", ctypes.byref(event), _SLEEPING)
        try:
            cuda._call(call, what, into, address, length, self._stream)
            cuda._call("cuEventRecord", what, event, self._stream)
        except CudaFault:
            cuda._driver.cuEventDestroy_v2(event)
            raise
        return event

    def wait(self, event: Event) -> None:
        """Returns when the copy is in place; its event is gone then. Raises LocalFault."""
        cuda = self._cuda
        cuda._enter()
        code = cuda._driver.cuEventSynchronize(event)
        cuda._driver.cuEventDestroy_v2(event)
        _check(cuda._driver, code, "waiting for a copy")

    def done(self, event: Event) -> bool:
        """Whether the copy is in place; its event is gone then. Raises LocalFault."""
        cuda = self._cuda
        cuda._enter()
        code = cuda._driver.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        cuda._driver.cuEventDestroy_v2(event)
        _check(cuda._driver, code, "copying between devices")
        return True

    def settle(self) -> None:
        """Returns when no copy is under way any more, well or not."""
        self._cuda._enter()
        with suppress(CudaFault):
            self._cuda._call("cuStreamSynchronize", "a stream", self._stream)

    def close(self) -> None:
        self.settle()
        self._cuda._driver.cuStreamDestroy_v2(self._stream)


def pieces(raw: object) -> Sequence[Piece]:
    """What a source says that its memory consists of. Raises InvalidInput."""
    if not isinstance(raw, list) or not 0 < len(raw) <= MOST_EXTENTS:
        raise InvalidInput(f"expected 1 to {MOST_EXTENTS} pieces of memory")
    return [Piece.parse(one) for one in raw]

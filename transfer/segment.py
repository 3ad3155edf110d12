"""A segment: shared memory with a fixed virtual address whose pages can be given back and brought back.

It is a memfd, so that its pages can be reached by a passed descriptor and no name is left behind by a
killed process. Its size is sealed: a peer that maps it can never be sent SIGBUS by a shrinking source.

Pages come back huge while that is cheap: one page is touched per 2 MiB and MADV_COLLAPSE (Linux 6.1) makes the range
huge whatever `shmem_enabled` says, for a third of what small pages cost. But in a virtual machine whose host takes free
huge pages back, each of those costs it 512 faults, ten times as much. So they are timed, and once they were dearer than
small ones the rest comes small, by MADV_POPULATE_WRITE (Linux 5.14), out of memory that the host leaves alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator

from relight.core.errors import LocalFault
from relight.transfer.extents import Extent, Extents
from relight.transfer.plan import HUGE
from relight.transfer.verify import Digest, blocks_of

HOST = -1
"""In place of a device's number: memory of the host."""
HUGE_SECONDS = 1.2e-3
"""Processor time that a huge page may take in the mean: its 512 small pages take about as long."""
HUGE_TRIES = 2
"""Huge pages whose price is advanced: one dear page at the begin decides nothing."""
_PROT_READ, _PROT_WRITE, _PROT_NONE = 1, 2, 0
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def _failed(call: str) -> LocalFault:
    code = ctypes.get_errno()
    return LocalFault(f"{call}: {os.strerror(code)}")


def _map(length: int, protection: int, fd: int) -> int:
    """Maps `fd` at an address that is a multiple of 2 MiB, so that huge pages can back it."""
    reserved = _libc.mmap(None, length + HUGE, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if reserved in (None, ctypes.c_void_p(-1).value):
        raise _failed("reserving address space")
    address = -(-reserved // HUGE) * HUGE
    if _libc.mmap(address, length, protection, _MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        _libc.munmap(reserved, length + HUGE)
        raise _failed("mapping a segment")
    # Give the unused edges of the reservation back; what lies between is the segment.
    if address > reserved:
        _libc.munmap(reserved, address - reserved)
    tail = reserved + HUGE - address
    if tail:
        _libc.munmap(address + length, tail)
    return int(address)


def opaque(address: int, length: int) -> memoryview:
    """[address, address + length) as a buffer; it is not looked at."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def _made(name: str, length: int, seals: int) -> int:
    descriptor = os.memfd_create(f"relight-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, length)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | seals)
    return descriptor


def _taken(descriptor: int, length: int) -> int:
    size = os.fstat(descriptor).st_size
    if size != length:
        raise LocalFault(f"a segment of {length} bytes was to be taken over, and this one has {size}")
    return os.dup(descriptor)


class Segment:
    """One memfd-backed region of `bytes` (a multiple of 2 MiB), mapped read-write in this process."""

    device = HOST

    def __init__(
        self, name: str, length: int, descriptor: int | None = None, *, freezes: bool = False,
        digest: Digest = Digest.XXH3,
    ) -> None:  # fmt: skip
        """Reserves the region; no page is allocated yet. Raises LocalFault. Its blocks are proven by `digest`.

        With a `descriptor`, of which it keeps a copy, it is that file in memory, whatever it holds. One that `freezes`
        may be frozen later.
        """
        self.bytes, self.digest = -(-max(length, 1) // HUGE) * HUGE, digest
        self._huge_allowance = HUGE_TRIES * HUGE_SECONDS
        self._there = bytearray(self.bytes // HUGE)
        """Which 2 MiB have all their pages: only `drop` takes any away."""
        self._laid = -1
        """The frozen segment whose pages lie here in place of its own; -1 while none does."""
        seals = 0 if freezes else fcntl.F_SEAL_SEAL
        try:
            self.fd = _made(name, self.bytes, seals) if descriptor is None else _taken(descriptor, self.bytes)
        except OSError as error:
            raise LocalFault(f"a segment of {self.bytes} bytes: {error}") from error
        self.address = _map(self.bytes, _PROT_READ | _PROT_WRITE, self.fd)
        self.view = opaque(self.address, self.bytes)

    @property
    def extents(self) -> Extents:
        """All of it lies together."""
        return Extents([Extent(0, self.address, self.bytes)])

    def room(self, start: int, stop: int) -> memoryview:
        """Where the bytes [start, stop) of the segment lie."""
        return self.view[start:stop]

    def populate(self, start: int, stop: int, *, patient: bool = False) -> None:
        """Allocates and maps the pages of [start, stop), in whole 2 MiB steps. Raises LocalFault (no memory).

        Who is `patient` gets huge pages whatever they cost: for memory that is read more often than it is made.
        """
        for low, high in self._absent(start // HUGE, min(-(-stop // HUGE), len(self._there))):
            self._populate(low * HUGE, high * HUGE, patient)
            self._there[low:high] = b"\1" * (high - low)

    def _absent(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Runs of what is not there, counted in 2 MiB."""
        while (low := self._there.find(0, low, high)) >= 0:
            end = self._there.find(1, low, high)
            end = high if end < 0 else end
            yield low, end
            low = end

    def _populate(self, low: int, high: int, patient: bool) -> None:
        while low < high and (patient or self._huge_allowance > 0):
            # The processor's time, not the wall's: waiting for the interpreter or for a core says nothing about pages.
            begun = time.thread_time()
            if not self._collapsed(low):
                self._huge_allowance, patient = 0.0, False
                break
            self._huge_allowance += HUGE_SECONDS - (time.thread_time() - begun)
            low += HUGE
        if low < high and _libc.madvise(self.address + low, high - low, _MADV_POPULATE_WRITE) != 0:
            raise _failed("bringing pages back")

    def _collapsed(self, at: int) -> bool:
        """Whether the 2 MiB at `at` are one huge page now. Raises LocalFault."""
        # Collapsing a range without a single page is refused; one page is enough.
        if _libc.fallocate(self.fd, 0, at, mmap.PAGESIZE) != 0:
            raise _failed("allocating a page")
        if _libc.madvise(self.address + at, HUGE, _MADV_COLLAPSE) == 0:
            return True
        if ctypes.get_errno() not in (errno.EINVAL, errno.EAGAIN, errno.ENOMEM, errno.EBUSY):
            raise _failed("collapsing pages")
        return False

    def freeze(self) -> None:
        """From now on nobody can change its bytes, this process included. Raises LocalFault."""
        descriptor = self.readonly_fd()
        try:
            # A mapping that could be made writable again stands in the seal's way; one of this descriptor could not.
            self._remap(descriptor, _PROT_READ, _MAP_SHARED)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise LocalFault(f"freezing a segment: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def lay(self, descriptor: int) -> None:
        """Has the pages of the frozen segment that `descriptor` names lie here, at no cost, until `drop`; its own are
        given back. What is written here meanwhile is this process's alone. Raises LocalFault, and it is empty then.
        """
        self.drop()
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                raise LocalFault("the segment to be shared can still be changed: it is not frozen")
            size = os.fstat(descriptor).st_size
            if size != self.bytes:
                raise LocalFault(f"the segment to be shared has {size} bytes, this one {self.bytes}")
            self._laid = os.dup(descriptor)
        except OSError as error:
            raise LocalFault(f"sharing a segment: {error.strerror}") from error
        self._remap(self._laid, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE)
        # Page tables only: the first forward pass need not fault for each page.
        _libc.madvise(self.address, self.bytes, _MADV_POPULATE_READ)

    def _remap(self, descriptor: int, protection: int, kind: int) -> None:
        if _libc.mmap(self.address, self.bytes, protection, kind | _MAP_FIXED, descriptor, 0) != self.address:
            raise _failed("mapping a segment anew")

    def drop(self) -> None:
        """Gives every page back; the address stays, and reads as zeros until it is filled again."""
        if self._laid >= 0:
            self._remap(self.fd, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
            os.close(self._laid)
            self._laid = -1
        if _libc.fallocate(self.fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, 0, self.bytes) != 0:
            raise _failed("punching a hole")
        self._there = bytearray(len(self._there))
        self._huge_allowance = HUGE_TRIES * HUGE_SECONDS

    def digests(self, start: int, stop: int) -> bytes:
        """The digests of the blocks of [start, stop), one after the other."""
        return blocks_of(self.view[start:stop], self.digest)

    def resident_bytes(self) -> int:
        """Bytes that the segment occupies now, whoever maps it; pages that it shares are their owner's."""
        return os.fstat(self.fd).st_blocks * 512

    def readonly_fd(self) -> int:
        """A descriptor for readers: it maps the same pages and can never write them. The caller closes it."""
        descriptor = self.fd if self._laid < 0 else self._laid
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmaps and forgets the segment; nobody may hold a view of it any more."""
        if self.fd >= 0:
            if self._laid >= 0:
                os.close(self._laid)
            self.view.release()
            _libc.munmap(self.address, self.bytes)
            os.close(self.fd)
            self.fd = -1


class Pieces:
    """Memory of this process that lies in pieces, at the offsets of another segment: to be read within it alone."""

    device = HOST

    def __init__(self, extents: Extents) -> None:
        self.extents = extents

    def room(self, start: int, stop: int) -> memoryview:
        """Where the bytes [start, stop) lie. Raises LocalFault unless they are in one piece."""
        return opaque(self.extents.at(start, stop), stop - start)


class MappedPeer:
    """A peer's segment, mapped read-only through the descriptor that it passed."""

    def __init__(self, fd: int) -> None:
        """Takes ownership of `fd`. Raises LocalFault; a descriptor that is not sealed is refused."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as error:
            os.close(fd)
            raise LocalFault(f"the passed descriptor is no memfd: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK or not size:
            os.close(fd)
            # A segment that can shrink under the reader ends it by SIGBUS.
            raise LocalFault("the passed segment is empty, or not sealed against shrinking")
        self.bytes = size
        try:
            self.address = _map(size, _PROT_READ, fd)
        finally:
            os.close(fd)
        self.view = opaque(self.address, size)

    def close(self) -> None:
        """Unmaps the peer's pages."""
        if self.address:
            self.view.release()
            _libc.munmap(self.address, self.bytes)
            self.address = 0


def copy(destination: memoryview, source: memoryview) -> None:
    """Copies equal-length buffers with the interpreter lock released, so that two threads copy at once."""
    length = len(source)
    if length != len(destination):
        raise LocalFault(f"copying {length} bytes into {len(destination)}")
    if length:
        ctypes.memmove(address_of(destination), address_of(source), length)


def address_of(buffer: memoryview) -> int:
    """The address of the first byte of a contiguous, non-empty buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) pieces of [start, stop), cut at multiples of `step`."""
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, end
        start = end

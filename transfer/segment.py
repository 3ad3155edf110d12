"""A segment: shared memory with a fixed virtual address whose pages can be given back and brought back.

It is a memfd, so that its pages can be reached by a passed descriptor and no name is left behind by a
killed process. Its size is sealed: a peer that maps it can never be sent SIGBUS by a shrinking source.

Pages come back in ranges, by MADV_POPULATE_WRITE (Linux 5.14), which brings a range for a third of what its faults
one by one would cost, and says that memory is short instead of ending the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator

from relight.core.errors import LocalFault

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED = 0x01
_MADV_POPULATE_WRITE = 23
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
    address = _libc.mmap(None, length, protection, _MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise _failed("mapping a segment")
    return int(address)


def _buffer(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


class Segment:
    """One memfd-backed region of `bytes` (whole pages), mapped read-write in this process."""

    def __init__(self, name: str, length: int) -> None:
        """Reserves the region; no page is allocated yet. Raises LocalFault."""
        self.bytes = -(-max(length, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.fd = os.memfd_create(f"relight-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise LocalFault(f"creating a segment of {self.bytes} bytes: {error}") from error
        self.address = _map(self.bytes, _PROT_READ | _PROT_WRITE, self.fd)
        self.view = _buffer(self.address, self.bytes)

    def populate(self, start: int, stop: int) -> None:
        """Allocates and maps the whole pages that hold [start, stop). Raises LocalFault (no memory)."""
        low, high = start // mmap.PAGESIZE * mmap.PAGESIZE, min(-(-stop // mmap.PAGESIZE) * mmap.PAGESIZE, self.bytes)
        if high > low and _libc.madvise(self.address + low, high - low, _MADV_POPULATE_WRITE) != 0:
            raise _failed("bringing pages back")

    def drop(self) -> None:
        """Gives every page back; the address stays, and reads as zeros until it is filled again."""
        if _libc.fallocate(self.fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, 0, self.bytes) != 0:
            raise _failed("punching a hole")

    def resident_bytes(self) -> int:
        """Bytes that the segment occupies now, whoever maps it."""
        return os.fstat(self.fd).st_blocks * 512

    def readonly_fd(self) -> int:
        """A descriptor for readers: it maps the same pages and can never write them. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmaps and forgets the segment; nobody may hold a view of it any more."""
        if self.fd >= 0:
            self.view.release()
            _libc.munmap(self.address, self.bytes)
            os.close(self.fd)
            self.fd = -1


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
        self.view = _buffer(self.address, size)

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

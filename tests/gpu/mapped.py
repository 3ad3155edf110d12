"""Device memory whose pages can be given back and put back under addresses that stay, as engines' allocators do it."""

from __future__ import annotations

import ctypes

from relight.transfer.transports.cuda import Access, AllocationProp, Cuda, Location
from tests.gpu.memory import HANDLES

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
GRANULE = 2 << 20


class Region:
    """`bytes` of one device, rounded up to whole granules; mapped from the beginning."""

    def __init__(self, cuda: Cuda, bytes_: int) -> None:
        self._cuda, self.bytes = cuda, -(-bytes_ // GRANULE) * GRANULE
        cuda._enter()
        driver = cuda._driver
        driver.cuMemCreate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong]
        at = ctypes.c_uint64()
        cuda._call("cuMemAddressReserve", "reserving", ctypes.byref(at), self.bytes, 0, 0, 0)
        self.address = at.value
        self.map()

    def map(self) -> None:
        """New pages, with whatever lies in them."""
        cuda, handle = self._cuda, ctypes.c_uint64()
        wanted = AllocationProp(type=_PINNED, requested=HANDLES["fd"], location=Location(_ON_DEVICE, cuda.device))
        cuda._call("cuMemCreate", "allocating", ctypes.byref(handle), self.bytes, ctypes.byref(wanted), 0)
        cuda._call("cuMemMap", "mapping", self.address, self.bytes, 0, handle, 0)
        access = Access(Location(_ON_DEVICE, cuda.device), _READ_WRITE)
        cuda._call("cuMemSetAccess", "mapping", self.address, self.bytes, ctypes.byref(access), 1)
        # A mapping keeps the memory by itself.
        cuda._call("cuMemRelease", "allocating", handle)

    def unmap(self) -> None:
        """Gives the pages back; nothing may be using them."""
        self._cuda._call("cuMemUnmap", "unmapping", ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes))

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """As bytes, for torch.as_tensor."""
        return {"shape": (self.bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

"""Device memory of a process of its own, passed on: python -m tests.gpu.exporter BYTES SOCKET, by the socket's number.

Ends with its standard input.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
from dataclasses import asdict

from relight.transfer.extents import Extent
from relight.transfer.transports.cuda import Cuda
from tests.gpu.mapped import Region

PATTERN = 0x5A


def main() -> None:
    cuda = Cuda(0)
    region = Region(cuda, int(sys.argv[1]))
    length = ctypes.c_size_t(region.bytes)
    cuda._call("cuMemsetD8_v2", "filling", ctypes.c_uint64(region.address), ctypes.c_ubyte(PATTERN), length)
    cuda._call("cuCtxSynchronize", "filling")
    piece, descriptor = cuda.export(Extent(0, region.address, region.bytes))
    with socket.socket(fileno=int(sys.argv[2])) as sock:
        socket.send_fds(sock, [json.dumps(asdict(piece)).encode()], [descriptor])
        sys.stdin.read()


if __name__ == "__main__":
    main()

"""Runs a program in the network namespace that this process is in: `inside.py FD ADDRESS PORT PROGRAM ...`.

It gives the empty namespace an address and a route that lead nowhere, and sends a socket that listens on
127.0.0.1:PORT in there over FD: whoever has it can answer the program's connections from outside.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

SIOCADDRT, SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR = 0x890B, 0x8913, 0x8914, 0x8916
IFF_UP, RTF_UP = 1, 1
PR_SET_PDEATHSIG = 1


def sockaddr(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def bring_up(address: str) -> None:
    """A kubelet names its node by the address that its default route leaves from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        flags = struct.unpack("16sh22x", fcntl.ioctl(handle, SIOCGIFFLAGS, struct.pack("16s24x", b"lo")))[1]
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))
        fcntl.ioctl(handle, SIOCSIFADDR, struct.pack("16s16s8x", b"lo:1", sockaddr(address)))
        device = ctypes.create_string_buffer(b"lo")
        # The struct rtentry: to anywhere, by no gateway, over that device.
        anywhere, by = [sockaddr("0.0.0.0")] * 3, ctypes.addressof(device)
        route = struct.pack("@L16s16s16sHhLPhPLLH", 0, *anywhere, RTF_UP, 0, 0, 0, 0, by, 0, 0, 0)
        fcntl.ioctl(handle, SIOCADDRT, route)


def main() -> None:
    fd, address, port, *program = sys.argv[1:]
    # Anew: a change of user namespace took it back.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    bring_up(address)
    with socket.socket(fileno=int(fd)) as channel, socket.create_server(("127.0.0.1", int(port))) as listening:
        socket.send_fds(channel, [b"x"], [listening.fileno()])
    os.execv(program[0], program)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()

"""One way of moving a body between two processes, run on demand: the receiver's process and, below it, the source's.

    python contender.py NAME BODY        one JSON line for each line on standard input

All contenders run alike: memory on both sides is resident before the clock starts, each transfer moves the whole body
into memory that the receiver owns, and the first one is compared byte by byte.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any, Protocol

import body

WAYS = {
    "raw_shm": "raw:Shm", "raw_tcp": "raw:Tcp",
    "relight_shm": "ours:Shm", "relight_tcp": "ours:Tcp", "relight_tls": "ours:Tls",
    "relight_sha256": "ours:Sha256",
    "nixl_shm": "peers:NixlShm", "nixl_tcp": "peers:NixlTcp", "mooncake_tcp": "peers:MooncakeTcp",
    "grpc_tcp": "peers:GrpcTcp", "gloo_tcp": "peers:GlooTcp",
}  # fmt: skip
STREAMS = 2
"""Threads of every contender that can be told how many."""


class Way(Protocol):
    """One contender. The source's side is `serve`; the receiver's are the others."""

    def __init__(self, sizes: list[int], length: int) -> None: ...

    def serve(self) -> dict[str, Any]:
        """Fills the source's memory and answers readers from now on; returns where."""
        ...

    def attach(self, address: dict[str, Any]) -> memoryview:
        """Readies the receiver; returns the memory that bodies land in."""
        ...

    def pull(self) -> dict[str, float]:
        """Moves one body; may tell seconds of parts by name."""
        ...


def way(name: str, of: str) -> Way:
    """The contender `name` for the body `of`."""
    module, _, kind = WAYS[name].partition(":")
    sizes = body.sizes(of)
    made: Way = getattr(importlib.import_module(module), kind)(sizes, body.offsets(sizes)[1])
    return made


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def source(name: str, of: str) -> None:
    serving = way(name, of)  # held until the end: what serves may go with it
    print(json.dumps(serving.serve()), flush=True)
    sys.stdin.read()  # until the receiver goes
    # Some engines crash in their own destructors; there is nothing left to tidy here.
    os._exit(0)


def receiver(name: str, of: str) -> None:
    command = [sys.executable, __file__, name, of, "--source"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        # Engines print what they like: the address is the first line that is an object.
        line = next((x for x in other.stdout if x.startswith("{")), "")
        if not line:
            raise SystemExit(f"the source of {name} ended before it was ready")
        receiving = way(name, of)
        into = receiving.attach(json.loads(line))
        sizes = body.sizes(of)
        expected = bytearray(len(into))
        body.fill(memoryview(expected))
        digest = body.digest(memoryview(expected), sizes)
        del expected
        print(json.dumps({"ready": name}), flush=True)
        compared = False
        for _ in sys.stdin:
            spent = cpu_seconds(os.getpid()) + cpu_seconds(other.pid)
            begun = time.perf_counter()
            parts = receiving.pull()
            seconds = time.perf_counter() - begun
            spent = cpu_seconds(os.getpid()) + cpu_seconds(other.pid) - spent
            if not compared and body.digest(into, sizes) != digest:
                raise SystemExit(f"{name} delivered other bytes than it was given")
            compared = True
            print(json.dumps({"seconds": seconds, "cpu_seconds": spent, **parts}), flush=True)
        other.kill()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WAYS)
    parser.add_argument("body")
    parser.add_argument("--source", action="store_true")
    arguments = parser.parse_args()
    (source if arguments.source else receiver)(arguments.name, arguments.body)


if __name__ == "__main__":
    main()

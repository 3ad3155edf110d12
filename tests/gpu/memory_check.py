"""What a GPU's memory has to do for guardians, with PyTorch and no engine: python -m tests.gpu.memory_check.

Pages are given back and put back under captured graphs, which must replay to the same bits; memory is passed to another
process and copied there; every rate is held to the raw copy of the same bytes. What a process keeps is measured twice:
by torch and by the driver's own word.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from relight.transfer.transports.cuda import Cuda, Piece
from tests.gpu.exporter import PATTERN
from tests.gpu.mapped import Region
from tests.gpu.table import Table

GIB = 1 << 30
BIG = 2 * GIB
SIZE = 4096
LEAST_SHARE = 0.8
"""Of the raw copy's rate, that a copy by way of another process's handles must reach."""
MOST_LEFT = 64 << 20
"""Bytes that a region may leave behind after its pages were given back."""


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def rate(bytes_: int, call: Callable[[], object], tries: int = 5) -> float:
    """GB/s of the best of some tries; the first warms up."""
    best = 0.0
    for n in range(tries + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if n:
            best = max(best, bytes_ / (time.perf_counter() - begun) / 1e9)
    return best


def as_matrix(region: Region) -> torch.Tensor:
    return torch.as_tensor(region, device="cuda").view(torch.bfloat16)[: SIZE * SIZE].view(SIZE, SIZE)


def graphs(table: Table, cuda: Cuda) -> None:
    """Weights whose pages go and come back under a captured graph."""
    region = Region(cuda, SIZE * SIZE * 2)
    weight = as_matrix(region)
    torch.manual_seed(7)
    weight.copy_(torch.randn(SIZE, SIZE, dtype=torch.bfloat16))
    told = torch.randn(8, SIZE, dtype=torch.bfloat16, device="cuda")
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            told @ weight
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before_capture = used()
    with torch.cuda.graph(graph):
        got = told @ weight
    table.row("pool of one captured graph", (used() - before_capture) / 2**20, "MiB")
    graph.replay()
    torch.cuda.synchronize()
    before, kept, whole = got.clone(), weight.to("cpu"), used()
    region.unmap()
    freed = whole - used()
    table.must("unmapped pages are free for others", freed >= region.bytes - MOST_LEFT, f"{freed} of {region.bytes}")
    region.map()
    weight.zero_()
    graph.replay()
    torch.cuda.synchronize()
    table.must("a graph reads the new pages under the old address", not torch.equal(got, before) and not got.any())
    weight.copy_(kept)
    graph.replay()
    torch.cuda.synchronize()
    table.must("it replays to the same bits after a refill", torch.equal(got, before))
    cycles = []
    for _ in range(20):
        begun = time.perf_counter()
        region.unmap()
        region.map()
        cycles.append(time.perf_counter() - begun)
    table.row("pages out and in again, median of 20", sorted(cycles)[10] * 1e3, "ms")
    weight.copy_(kept)
    graph.replay()
    torch.cuda.synchronize()
    table.must("and after twenty times more", torch.equal(got, before))
    table.must("cycles leak nothing", abs(used() - whole) <= MOST_LEFT, f"{used() - whole} bytes more")


def rates(table: Table) -> None:
    """Raw copies, which all others are held to."""
    device, other = (torch.empty(BIG, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned = torch.empty(BIG, dtype=torch.uint8, pin_memory=True)
    table.row("device to device, raw", rate(BIG, lambda: other.copy_(device)), "GB/s")
    table.row("host (pinned) to device", rate(BIG, lambda: device.copy_(pinned, non_blocking=True)), "GB/s")
    table.row("device to host (pinned)", rate(BIG, lambda: pinned.copy_(device, non_blocking=True)), "GB/s")
    pageable = torch.empty(BIG // 4, dtype=torch.uint8)
    table.row("host (pageable) to device", rate(BIG // 4, lambda: device[: BIG // 4].copy_(pageable)), "GB/s")


def between_processes(table: Table, cuda: Cuda) -> None:
    """Memory of another process, mapped here and copied: what a peer's weights come by."""
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "tests.gpu.exporter", str(BIG), str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            told, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, 1)
            table.must("another process passes its memory on", len(descriptors) == 1, told.decode())
            if len(descriptors) != 1:
                return
            mapped = cuda.map(Piece(**json.loads(told)), descriptors[0])
            into = torch.empty(BIG, dtype=torch.uint8, device="cuda")
            stream = cuda.stream()

            def copy() -> None:
                stream.copy(into.data_ptr(), mapped.address, BIG)
                stream.settle()

            got = rate(BIG, copy)
            table.row("device to device, from another process", got, "GB/s")
            raw = float(table.figures["device to device, raw"])
            table.must(f"at least {LEAST_SHARE:.0%} of the raw copy", got >= LEAST_SHARE * raw, f"{got / raw:.2f}")
            table.must("every byte is the other's", bool((into == PATTERN).all()))
            stream.close()
            cuda.unmap(mapped)
        finally:
            process.kill()


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("this interpreter's torch sees no GPU")
    table = Table(f"memory of {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    nothing = used()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    table.row("a process's context", (used() - nothing) / 2**20, "MiB")
    cuda = Cuda(0)
    graphs(table, cuda)
    torch.cuda.empty_cache()
    table.row("what is left of it all beside the region", (used() - nothing - SIZE * SIZE * 2) / 2**20, "MiB")
    rates(table)
    torch.cuda.empty_cache()
    between_processes(table, cuda)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())

"""nvlink for real: two processes, device memory of each kind, one device or two. Needs two NVIDIA GPUs of one node.

Without them these tests fail by name; `make test` leaves them out by their marker, `make test-gpu` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight.core.clock import SystemClock
from relight.core.errors import ModelDirty, RemoteFault
from relight.transfer.request import Holder, Options, Received, Wanted
from relight.transfer.session import refill
from relight.transfer.transports.cuda import Cuda
from relight.transfer.transports.nvlink import NvlinkReader, Pair
from tests.gpu.memory import BODY, LAYOUT, allocate

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """kind -> a source on device 0."""
    started: list[subprocess.Popen[str]] = []

    def make(kind: str) -> subprocess.Popen[str]:
        # A script's own folder comes first on the path, and must not hide the tests' package.
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.source", "0", kind, str(tmp_path / "n.sock")],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )
        )  # fmt: skip
        return started[-1]

    yield make
    for process in started:
        with process:
            process.kill()


def heard(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the source ended with {process.wait()}"
    return dict(json.loads(line))


def bring(told: dict[str, str], device: int, **options: object) -> Received:
    """A whole, proven refill of memory of `device`."""
    pair = Pair(Cuda(device))
    target = allocate(pair.cuda, "fd")

    def connect() -> NvlinkReader:
        return NvlinkReader(told["address"], told["grant"], "i-source", 5.0, pair)

    reader = connect()
    table = {t.name: t for t in reader.describe().tensors}
    reader.close()
    holders = [Holder("i-source", connect, connections=2)]
    return refill(
        target, Wanted(LAYOUT, table, "r1"), holders, streams=2, clock=SystemClock(), options=Options(**options)
    )


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("kind", ["fd", "ipc"])
def test_weights_move_from_device_to_device_and_are_proven(start: Start, kind: str, device: int) -> None:
    source = start(kind)
    got = bring(heard(source), device)
    assert got.bytes > BODY // 2
    assert source.stdin is not None
    source.stdin.close()
    assert heard(source) == {"cut": 0}, "nobody holds the source's memory when it sleeps"


def test_memory_that_was_made_without_handles_is_refused_with_the_reason(start: Start) -> None:
    assert "made it without handles for other processes" in heard(start("none"))["refused"]


def test_a_source_that_is_killed_is_the_one_at_fault(start: Start) -> None:
    source = start("fd")
    with pytest.raises(ModelDirty) as caught:
        bring(heard(source), 1, on_progress=lambda progress: source.kill())
    assert isinstance(caught.value.cause, RemoteFault)

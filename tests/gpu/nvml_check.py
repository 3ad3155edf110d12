"""The adapter for NVIDIA's devices against a process that holds a known amount: python -m tests.gpu.nvml_check.

RELIGHT_GPU_PYTHON names an interpreter with PyTorch, which is the process; the adapter runs in this one.
"""

from __future__ import annotations

import os
import subprocess
import sys

from relight.agent.devices.base import Wanted
from relight.agent.devices.host import Host
from relight.agent.devices.kinds import open_devices
from tests.gpu.table import Table

HELD = 1 << 30
SLACK = 64 << 20
"""Bytes that others may take or give back meanwhile."""
_HOLDER = f"""
import sys, torch
held = torch.ones({HELD}, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def main() -> int:
    python = os.environ.get("RELIGHT_GPU_PYTHON") or sys.exit("RELIGHT_GPU_PYTHON names no interpreter")
    backend = open_devices("nvidia", Host(), Wanted())
    device = backend.enumerate()[0]
    table = Table(f"{device.model_name} ({device.id})")
    for name, value in backend.facts().items():
        table.row(name, value or "not told")
    before = backend.readings()[0]
    table.row("memory", device.total_bytes / 2**30, "GiB")
    for name in ("utilisation", "temperature_celsius", "power_watts", "ecc_errors"):
        value = getattr(before, name)
        table.row(name, "not told" if value is None else float(value))
    table.must("it tells what is in use", before.used_bytes is not None)
    # The first device that the adapter counts, for the holder too.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": device.visible_as}
    with subprocess.Popen(
        [python, "-c", _HOLDER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None
            table.must("a process holds a gibibyte", holder.stdout.readline().strip() == "held")
            by_process = (backend.processes() or {}).get(device.id, {})
            told = by_process.get(holder.pid, 0)
            table.row("the process, by the driver's word", told / 2**20, "MiB")
            table.must("it is named by its number here, with all that it holds", told >= HELD, f"{by_process}")
            table.must("and counted as its instance's", backend.held_bytes([holder.pid]) == told)
            grown = (backend.readings()[0].used_bytes or 0) - (before.used_bytes or 0)
            table.must("the device has that much more in use", grown >= HELD, f"{grown}")
        finally:
            holder.kill()
    left = (backend.readings()[0].used_bytes or 0) - (before.used_bytes or 0)
    table.must("all of it is free when the process is gone", left <= SLACK, f"{left} bytes more")
    return table.show()


if __name__ == "__main__":
    sys.exit(main())

"""The host as kinds of devices read it: three trees, variables, tools. A recorded one reads like a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relight.core.errors import Unavailable

TOOL_SECONDS = 10.0
"""A tool that takes longer hangs in its driver."""


def run_tool(argv: Sequence[str]) -> str:
    """What a tool prints. Raises Unavailable when it is not there, fails, or hangs."""
    if shutil.which(argv[0]) is None:
        raise Unavailable(f"{argv[0]} is not installed where the agent runs")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(argv)} did not answer within {TOOL_SECONDS:.0f} s") from None
    except OSError as error:
        raise Unavailable(f"{argv[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip()[-200:]
        raise Unavailable(f"{' '.join(argv)} ended with {done.returncode}: {told or 'it said nothing'}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Host:
    """Roots of the kernel's trees, the agent's variables, and how a tool is run."""

    sysfs: Path = Path("/sys")
    devfs: Path = Path("/dev")
    procfs: Path = Path("/proc")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str] = run_tool

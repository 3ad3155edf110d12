"""Prometheus and promtool for the tests of dashboards and alerts: the distribution's own, unpacked into a folder, never
installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from debian import Debian

PROGRAMS = ("prometheus", "promtool")


def build(path: Path, run: Callable[..., None], say: Callable[[str], None]) -> None:
    """Fills `path`: bin/, with both programs: they need nothing beside."""
    say("Prometheus and promtool for the tests of dashboards (100 MB)")
    debian = Debian(path / "work", run, what_for="the Prometheus of the tests is")
    debian.update()
    # Exactly this one: its dependencies are a web interface's scripts and what starts a service.
    debian.unpack(["prometheus"], path / "work" / "root")
    (path / "bin").mkdir()
    for name in PROGRAMS:
        shutil.move(path / "work" / "root" / "usr" / "bin" / name, path / "bin" / name)
    shutil.rmtree(path / "work")


def sound(path: Path) -> bool:
    """Whether both programs start."""
    try:
        done = [
            subprocess.run([path / "bin" / name, "--version"], capture_output=True, check=False, timeout=60).returncode
            for name in PROGRAMS
        ]
    except (OSError, subprocess.TimeoutExpired):
        return False
    return not any(done)

"""The Redis server that the store's tests run: the distribution's own, unpacked into a folder, never installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from debian import Debian, found, libraries


def build(path: Path, run: Callable[..., None], say: Callable[[str], None]) -> None:
    """Fills `path`: root/, with what this machine has not got installed."""
    say("the Redis server of the store's tests (1.4 MB)")
    root = path / "root"
    root.mkdir(parents=True)
    debian = Debian(path / "work", run, what_for="the Redis server of the tests is")
    debian.update()
    debian.unpack_missing(["redis-server"], root)
    shutil.rmtree(path / "work")


def server(path: Path) -> tuple[str, dict[str, str]]:
    """The program, and the environment it needs."""
    root = path / "root"
    program = next(iter(found("usr/bin/redis-server", root)), root / "usr/bin/redis-server")
    return str(program), {**os.environ, "LD_LIBRARY_PATH": libraries(root)}


def sound(path: Path) -> bool:
    """Whether the server starts."""
    program, environment = server(path)
    try:
        done = subprocess.run([program, "--version"], env=environment, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0

"""Whether a process may be forked from: one thread, no device, no gRPC; and what environment it was made of."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

DEVICES = ("/dev/nvidia", "/dev/xpu", "/dev/dri", "/dev/kfd", "/dev/infiniband")
"""Files that a device context keeps open; forked, it is broken in the child."""


def unfit(proc: Path = Path("/proc/self")) -> str:
    """Why nothing may be forked from this process now; empty when it may.

    Threads do not survive a fork, but what they hold locked does. gRPC's core starts threads with its first channel or
    server and counts on them ever after; that it is imported does no harm.
    """
    if len(threads := _threads(proc / "task")) > 1:
        return f"it has {len(threads)} threads ({', '.join(sorted(set(threads)))})"
    for fd in (proc / "fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith(DEVICES):
            return f"it has {target} open, which a child cannot use"
    for module, question in (("torch.cuda", "is_initialized"), ("torch.xpu", "is_initialized")):
        asked = getattr(sys.modules.get(module), question, None)
        if asked is not None and asked():
            return f"{module} is initialised in it"
    if (found := _grpc_objects(gc.get_objects())) is not None:
        return f"it holds a gRPC object ({found})"
    return ""


def _threads(tasks: Path) -> list[str]:
    """Their names; one that ends while it is looked at is none."""
    names = []
    for thread in tasks.iterdir():
        with suppress(OSError):
            names.append((thread / "comm").read_text().strip())
    return names


def _grpc_objects(living: Iterable[object]) -> str | None:
    types = [
        kind
        for name, kinds in (("grpc", ("Channel", "Server")), ("grpc.aio", ("Channel", "Server")))
        for kind in (getattr(sys.modules.get(name), k, None) for k in kinds)
        if isinstance(kind, type)
    ]
    if not types:
        return None
    return next((type(o).__name__ for o in living if isinstance(o, tuple(types))), None)


def environment(entries: Sequence[str]) -> str:
    """A digest of what an interpreter whose `sys.path` is `entries` would import now: its packages and their versions.

    Another digest later means that the environment was changed under the process.
    """
    seen = hashlib.sha256(f"{os.path.realpath(sys.executable)}\0{sys.version}".encode())
    for entry in entries:
        for path in sorted(_marks(Path(entry))):
            try:
                status = path.stat()
            except OSError:
                continue
            seen.update(f"{path}\0{status.st_mtime_ns}\0{status.st_ino}\0".encode())
    return seen.hexdigest()[:16]


def _marks(directory: Path) -> Iterable[Path]:
    # Every installer writes a package's .dist-info anew; an editable package has only its own files.
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [
        directory / n for n in names if n.endswith((".dist-info", ".egg-info", ".pth")) or n.startswith("__editable")
    ]

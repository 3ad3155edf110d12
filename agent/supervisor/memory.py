"""How often the kernel has killed for want of memory in this container: the counter of its memory cgroup, v2 or v1."""

from __future__ import annotations

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


def oom_kills(cgroups: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> int | None:
    """The counter now; None where none can be read, as on a kernel without it."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (mount / "memory", "memory.oom_control") if controllers else (mount, "memory.events")
        # In a container the mount may begin at its own cgroup, while the path is told from the host's root.
        for folder in (base / path.lstrip("/"), base):
            found = _counter(folder / name)
            if found is not None:
                return found
    return None


def _counter(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        return None
    return None

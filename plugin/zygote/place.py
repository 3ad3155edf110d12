"""Where the kernel keeps a process's command line and environment, so that what is forked shows its own.

/proc/PID/cmdline and environ are the memory that `exec` laid out (proc(5), fields 48 to 51 of /proc/PID/stat). A forked
engine has its parent's; a supervisor that finds processes by their environment would take it for the zygote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

FIRST = ("RELIGHT_INSTANCE", "RELIGHT_OWNER", "RELIGHT_DEVICES")
"""Variables that must fit, whatever else does not."""


def show(argv: Sequence[str], env: Mapping[str, str] | None) -> None:
    """Overwrites the command line, and with `env` the environment, that others read; both are cut to the room there is.

    Only after libc's own environment was replaced: it points into this memory.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    _write(arg_start, arg_end, [word.encode() for word in argv])
    if env is not None:
        names = [*(n for n in FIRST if n in env), *(n for n in env if n not in FIRST)]
        _write(env_start, env_end, [f"{name}={env[name]}".encode() for name in names])


def _write(start: int, end: int, words: Sequence[bytes]) -> None:
    text = b""
    for word in words:
        if len(text) + len(word) + 1 >= end - start:
            break
        text += word + b"\0"
    if end > start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))

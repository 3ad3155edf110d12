"""The zygote's loop: one thread, one request at a time, a fork for each."""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from relight.core.clock import Clock
from relight.core.logs import get_logger
from relight.plugin.zygote import child, fitness

log = get_logger("zygote")
REQUEST_SECONDS = 5.0
"""A caller that has not said what it wants by then is hung up on: others wait behind it."""
GO_SECONDS = 30.0
"""How long a child waits for somebody to answer for it."""
MAX_LINE = 1 << 20


class Unfit(Exception):
    """Nothing may be forked from this process, and why."""


class Zygote:
    """Imports once and forks ever after. `preload` is a module with `preload()`, which imports and may say no by
    raising, and `in_child(env)`, which sets in a child what an import had read from the environment."""

    def __init__(self, path: Path, preload: ModuleType, clock: Clock) -> None:
        self._path, self._preload, self._clock = path, preload, clock
        # Engines add to sys.path while they are imported.
        self._entries = tuple(sys.path)
        self._environment = fitness.environment(self._entries)
        self._took = 0.0

    def prepare(self) -> None:
        """Imports, checks, freezes and listens. Raises Unfit."""
        begun = self._clock.monotonic()
        self._preload.preload()
        gc.collect()
        if why := fitness.unfit():
            raise Unfit(why)
        # What is collected never is written to, and so stays shared with every child.
        gc.freeze()
        self._took = self._clock.monotonic() - begun
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Its callers look whether the socket is there: it appears when it can be used.
        waiting = self._path.with_suffix(".new")
        waiting.unlink(missing_ok=True)
        self._listener.bind(str(waiting))
        waiting.chmod(0o600)
        self._listener.listen(16)
        waiting.rename(self._path)
        log.info("zygote.ready", seconds=round(self._took, 2), modules=len(sys.modules))

    def serve(self) -> None:
        """Forks until the process is ended."""
        while True:
            caller, _ = self._listener.accept()
            with caller:
                caller.settimeout(REQUEST_SECONDS)
                try:
                    self._answer(caller)
                except (OSError, ValueError) as error:
                    log.warning("zygote.call", reason=str(error))

    def _answer(self, caller: socket.socket) -> None:
        _, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.geteuid()):
            log.warning("zygote.refused", uid=uid)
            return
        try:
            asked = json.loads(_line(caller))
            if set(asked) == {"describe"}:
                _send(caller, self._describe())
                return
            if set(asked) != {"fork"}:
                raise ValueError("expected one line with `fork` or `describe`")
            ask = child.asked(asked["fork"])
        except (ValueError, TypeError) as error:
            _send(caller, {"refused": str(error), "stale": False})
            return
        stale = fitness.environment(self._entries) != self._environment
        why = "its environment was changed under it" if stale else fitness.unfit()
        if why:
            log.warning("zygote.unfit", reason=why)
            _send(caller, {"refused": why, "stale": True})
            return
        self._fork(ask, caller)

    def _describe(self) -> Mapping[str, object]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "pid": os.getpid(),
            "imported_seconds": self._took,
            "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "modules": len(sys.modules),
        }

    def _fork(self, ask: child.Ask, caller: socket.socket) -> None:
        first = os.fork()
        if first:
            os.waitpid(first, 0)
            return
        try:
            if os.fork():
                os._exit(0)
            # Only now is it nobody's child but the subreaper's.
            child.settle(ask, caller.fileno())
            _send(caller, {"pid": os.getpid()})
            caller.settimeout(GO_SECONDS)
            if _line(caller) != b"go":
                os._exit(0)
            caller.close()
            status = child.run(ask, self._preload.in_child)
        except BaseException:  # noqa: BLE001 - nothing of the zygote may run on in a child
            traceback.print_exc()
            status = 1
        os._exit(status)


def _line(sock: socket.socket) -> bytes:
    """One line without its end; empty when the other side hung up. Raises OSError, ValueError for one too long."""
    data = bytearray()
    while not data.endswith(b"\n"):
        got = sock.recv(65536)
        if not got:
            return b""
        data += got
        if len(data) > MAX_LINE:
            raise ValueError("a line of more than a mebibyte")
    return bytes(data[:-1])


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")

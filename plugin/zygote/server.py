"""The zygote's loop: one thread, one request at a time, a fork for each."""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from relight.core.clock import Clock
from relight.core.logs import get_logger
from relight.plugin.zygote import child, fitness, model
from relight.plugin.zygote.child import fork, line, send
from relight.plugin.zygote.model import Model

log = get_logger("zygote")
REQUEST_SECONDS = 5.0
"""A caller that has not said what it wants by then is hung up on: others wait behind it."""
MODELS = 8
"""Prepared models that are kept; each is a process that shares almost all of its memory with this one."""


class Unfit(Exception):
    """Nothing may be forked from this process, and why."""


class Zygote:
    """Imports once and forks ever after.

    `preload` is a module with `preload()`, which imports and may say no by raising, `in_child(env)`, which sets in a
    child what an import had read from the environment, `model_of(argv)`, which names what engines of one model have in
    common, and `prepare(argv)`, which reads that.
    """

    def __init__(self, path: Path, preload: child.Preload, clock: Clock) -> None:
        self._path, self._preload, self._clock = path, preload, clock
        # Engines add to sys.path while they are imported.
        self._entries = tuple(sys.path)
        self._environment = fitness.environment(self._entries)
        self._models: dict[str, Model] = {}
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
            asked = json.loads(line(caller))
            if set(asked) == {"describe"}:
                send(caller, self._describe())
                return
            if set(asked) not in ({"fork"}, {"prepare"}):
                raise ValueError("expected one line with `fork`, `prepare` or `describe`")
            ((what, raw),) = asked.items()
            ask = child.asked(raw)
        except (ValueError, TypeError) as error:
            send(caller, {"refused": str(error), "stale": False})
            return
        stale = fitness.environment(self._entries) != self._environment
        why = "its environment was changed under it" if stale else fitness.unfit()
        if why:
            log.warning("zygote.unfit", reason=why)
            send(caller, {"refused": why, "stale": True})
            return
        self._bury()
        key = self._preload.model_of(ask.argv)
        if what == "prepare":
            self._prepare(key, ask)
            send(caller, {"prepared": key})
        elif key not in self._models or not self._models[key].fork(raw, caller):
            fork(ask, caller, self._preload, "")

    def _prepare(self, key: str, ask: child.Ask) -> None:
        if key in self._models:
            return
        while len(self._models) >= MODELS:
            self._models.pop(next(iter(self._models))).end()
        made = model.begin(key, ask, self._preload, self._listener)
        if made is not None:
            self._models[key] = made

    def _bury(self) -> None:
        """Takes in which models became ready, and forgets those whose process ended."""
        for made in self._models.values():
            made.look()
        for key in [key for key, made in self._models.items() if made.ended]:
            del self._models[key]

    def _describe(self) -> Mapping[str, object]:
        self._bury()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "pid": os.getpid(),
            "imported_seconds": self._took,
            "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "modules": len(sys.modules),
            "models": sorted(key for key, made in self._models.items() if made.ready),
        }

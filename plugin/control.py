"""The small socket protocol between an agent and the part of Relight inside an engine's process.

One JSON object per line over a unix socket: {"op": ..., "args": {...}} in; any number of {"progress": ...}
out, then one {"ok": ...} or {"error": {"code", "message", "cause"}}. Calls on one connection are answered in
order; several connections are served at once. Only the user that runs the engine may connect.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relight.core.errors import InvalidInput, LocalFault, ModelDirty, RelightError
from relight.core.logs import get_logger
from relight.transfer.transports.shm import peer_uid
from relight.transfer.transports.wire import Acceptor, listening

VERSION = 1
MAX_LINE = 1 << 20
log = get_logger("plugin.control")

Progress = Callable[[object], None]
Operation = Callable[[Mapping[str, Any], Progress], object]
"""Takes the call's arguments and a way to report progress; returns what is sent back as `ok`."""


class ControlServer:
    """Serves the named operations at `path` until closed."""

    def __init__(self, path: Path, operations: Mapping[str, Operation]) -> None:
        self._path, self._operations = path, operations
        path.unlink(missing_ok=True)
        listener = listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path))
        path.chmod(0o600)
        self._acceptor = Acceptor(listener, self._serve, "relight-control")

    def close(self) -> None:
        self._acceptor.close()
        self._path.unlink(missing_ok=True)

    def _serve(self, sock: socket.socket) -> None:
        if peer_uid(sock) != os.geteuid():
            return

        def send(message: Mapping[str, object]) -> None:
            sock.sendall(json.dumps(message).encode() + b"\n")

        with sock.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE):
                try:
                    send(self._answer(line, lambda said: send({"progress": said})))
                except OSError:
                    # The agent went away; what was begun has ended, and the next agent asks anew.
                    return

    def _answer(self, line: bytes, progress: Progress) -> Mapping[str, object]:
        try:
            try:
                call = json.loads(line)
                operation = self._operations[call["op"]]
                arguments = call.get("args", {})
            except (ValueError, KeyError, TypeError, AttributeError):
                known = ", ".join(sorted(self._operations))
                raise InvalidInput(f'expected one line {{"op": ..., "args": ...}} with op one of: {known}') from None
            return {"ok": operation(arguments, progress)}
        except RelightError as error:
            return {"error": _described(error)}
        except Exception as error:
            log.exception("control.failed", line=line[:200].decode(errors="replace"))
            return {"error": _described(LocalFault(f"{type(error).__name__}: {error}"))}


def _described(error: RelightError) -> dict[str, object]:
    cause = error.cause.code if isinstance(error, ModelDirty) else ""
    return {"code": error.code, "message": str(error), "cause": cause}

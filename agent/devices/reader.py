"""`python -m relight.agent.devices.reader`: reads devices where engines run, for an agent elsewhere.

In a slot pod the engine's container has the devices, and the agent's has none. This process stands beside the
supervisor there; one line of JSON asks, one answers. It decides nothing: which devices, the agent says each time.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relight.agent.devices.base import DeviceBackend, Wanted
from relight.agent.devices.host import Host
from relight.agent.devices.kinds import known, open_devices
from relight.core.errors import InvalidInput, RelightError

MAX_LINE = 1 << 16
_ANSWERS: Mapping[str, Callable[[DeviceBackend], Any]] = {
    "enumerate": lambda backend: {"kind": backend.kind, "devices": [asdict(d) for d in backend.enumerate()]},
    "processes": lambda backend: backend.processes(),
    "readings": lambda backend: [asdict(r) for r in backend.readings()],
    "links": lambda backend: [[a, b, link] for (a, b), link in backend.links().items()],
    "facts": lambda backend: dict(backend.facts()),
}
QUESTIONS = tuple(_ANSWERS)


class Reader:
    """Answers questions about the devices of one host; those that were opened once stay open."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._open: dict[str, DeviceBackend] = {}
        self._opening = threading.Lock()

    def answer(self, line: bytes) -> dict[str, Any]:
        """The reply to one line. Raises nothing: what is wrong is in it."""
        try:
            asked = json.loads(line)
            backend = self._backend(str(asked["kind"]), asked["visible"], asked["count"])
            return {"ok": True, "answer": _ANSWERS[asked["question"]](backend)}
        except RelightError as error:
            return {"ok": False, "code": error.code, "error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"ok": False, "code": InvalidInput.code, "error": f"not a question: {type(error).__name__}: {error}"}

    def _backend(self, kind: str, visible: list[str] | None, count: int | None) -> DeviceBackend:
        key = json.dumps([kind, visible, count])
        with self._opening:
            if key not in self._open:
                wanted = Wanted(None if visible is None else tuple(map(str, visible)), count)
                self._open[key] = open_devices(kind, self._host, wanted)
            return self._open[key]


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, reader: Reader) -> None:
        self.reader = reader
        super().__init__(str(path), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        while isinstance(server, _Server) and (line := self.rfile.readline(MAX_LINE)):
            self.wfile.write(json.dumps(server.reader.answer(line)).encode() + b"\n")


def serve(path: Path, host: Host) -> _Server:
    """A server that listens on a socket of its owner's alone, in place of what was there before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.unlink()
    server = _Server(path, Reader(host))
    path.chmod(0o600)
    return server


NOTHING_HERE = 3
"""Exit status where the host shows no accelerator: there will be nothing to ask."""


def main() -> int:
    """Runs until the process that it stands beside has ended. Exit status 2 when it cannot listen, 3 where there is no
    accelerator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--beside", type=int, metavar="PID", required=True, help="end when this process ends")
    arguments = parser.parse_args()
    host = Host()
    if not any(kind.there(host) for kind in known().values()):
        return NOTHING_HERE
    try:
        ended = os.pidfd_open(arguments.beside)
        server = serve(arguments.socket, host)
    except OSError as error:
        print(f"relight devices reader: {arguments.socket}: {error}", file=sys.stderr)
        return 2
    threading.Thread(target=server.serve_forever, daemon=True).start()
    select.select([ended], [], [])
    return 0


if __name__ == "__main__":
    sys.exit(main())

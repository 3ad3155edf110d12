"""`python -m relight.agent.hostcopy --name host-... --directory DIR --host ADDRESS`: one copy, until it is ended.

It answers at DIR/c, one line of JSON for each: {"describe": {}} or {"fill": {...}} (orders.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from relight.agent.hostcopy.copy import HostCopy, Place
from relight.agent.hostcopy.orders import CONTROL, MAX_LINE, PAGES, named, parse
from relight.core.clock import SystemClock
from relight.core.errors import FieldError, InvalidInput, LocalFault
from relight.core.tls import TlsFiles
from relight.transfer.transports.shm import listening_here, peer_uid

PATIENCE = 5.0
"""Seconds that one who asks may take to say what."""


def answer(copy: HostCopy, line: bytes) -> dict[str, Any]:
    """What is said to one question; a bad one is refused with the reason, and changes nothing."""
    try:
        try:
            asked = json.loads(line)
        except (ValueError, RecursionError):
            raise InvalidInput("not JSON") from None
        if not isinstance(asked, dict) or len(asked) != 1 or next(iter(asked)) not in ("describe", "fill"):
            raise InvalidInput("bad question", [FieldError("question", "describe or fill", repr(asked)[:80])])
        if "fill" in asked:
            copy.fill(parse(asked["fill"]))
        return copy.describe()
    except InvalidInput as error:
        return {"refused": str(error), "code": error.code}


def _listen(listener: socket.socket, copy: HostCopy) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with sock:
            try:
                sock.settimeout(PATIENCE)
                if peer_uid(sock) != os.geteuid():
                    continue
                with sock.makefile("rb") as lines:
                    line = lines.readline(MAX_LINE)
                sock.sendall(json.dumps(answer(copy, line)).encode() + b"\n")
            except OSError:
                continue


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("relight.agent.hostcopy")
    parser.add_argument("--name", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--source-rate", type=int)
    parser.add_argument("--tls", type=Path, nargs=3, metavar=("CERTIFICATE", "KEY", "AUTHORITY"))
    return parser.parse_args(arguments)


def main() -> int:
    told = _arguments(sys.argv[1:])
    try:
        place = Place(
            named(told.name), told.directory / PAGES, told.host, TlsFiles(*told.tls) if told.tls else None,
            told.source_rate,
        )  # fmt: skip
        listener = listening_here(told.directory / CONTROL)
    except (InvalidInput, LocalFault) as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    copy = HostCopy(place, SystemClock())
    threading.Thread(target=_listen, args=(listener, copy), name="relight-host-control", daemon=True).start()
    over.wait()
    listener.close()
    copy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

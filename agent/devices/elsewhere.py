"""Devices of the engine's container, asked of the reader that runs there (reader.py)."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relight.agent.devices.base import Device, Reading, Wanted, held_by
from relight.agent.devices.host import TOOL_SECONDS
from relight.agent.procfs import Procfs
from relight.core.clock import Clock
from relight.core.errors import InvalidInput, Unavailable
from relight.core.records import PcieLink

ASK_SECONDS = 3 * TOOL_SECONDS
"""A reader runs a tool or two for an answer."""
PATIENCE = 120.0
"""How long a reader may take until it is there: its container starts with the agent's."""
AGAIN = 0.2


class DevicesElsewhere:
    """A kind of device, in another container of this pod."""

    def __init__(self, path: Path, kind: str, wanted: Wanted, clock: Clock, patience: float = PATIENCE) -> None:
        """Waits for the reader. Raises InvalidInput as the kind does, Unavailable when it does not answer."""
        self._path, self._procfs = path, Procfs()
        self._asked = {"kind": kind, "visible": wanted.visible, "count": wanted.count}
        until, pause = clock.monotonic() + patience, threading.Event()
        while True:
            try:
                found = self._ask("enumerate")
                break
            except Unavailable:
                if clock.monotonic() >= until:
                    raise
                pause.wait(AGAIN)
        self.kind = str(found["kind"])
        self._devices = tuple(Device(**{**d, "cores": tuple(d["cores"])}) for d in found["devices"])

    def boot_id(self) -> str:
        return self._procfs.boot_id()

    def enumerate(self) -> tuple[Device, ...]:
        return self._devices

    def held_bytes(self, pids: Iterable[int]) -> int:
        return held_by(self.processes(), pids)

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        told = self._ask("processes") or {}
        return {device: {int(pid): int(held) for pid, held in by_pid.items()} for device, by_pid in told.items()}

    def readings(self) -> tuple[Reading, ...]:
        return tuple(
            Reading(**{**told, "pcie": PcieLink(**told["pcie"]) if told["pcie"] else None})
            for told in self._ask("readings")
        )

    def links(self) -> Mapping[tuple[str, str], str]:
        return {(a, b): link for a, b, link in self._ask("links")}

    def facts(self) -> Mapping[str, str]:
        return dict(self._ask("facts"))

    def _ask(self, question: str) -> Any:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ASK_SECONDS)
                connection.connect(str(self._path))
                connection.sendall(json.dumps({**self._asked, "question": question}).encode() + b"\n")
                with connection.makefile("rb") as answers:
                    reply = json.loads(answers.readline())
        except (OSError, ValueError) as error:
            # It leaves at once where its container shows no accelerator.
            why = f"no devices are read in the engine's container, which may show none ({self._path}): {error}"
            raise Unavailable(why, retry_after=1.0) from error
        if reply["ok"]:
            return reply["answer"]
        if reply["code"] == InvalidInput.code:
            raise InvalidInput(str(reply["error"]))
        raise Unavailable(str(reply["error"]), retry_after=1.0)

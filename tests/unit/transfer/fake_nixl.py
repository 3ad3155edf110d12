"""NIXL's Python interface in one process: what is registered is read by those who know its agent's metadata.

What it cannot show is shown by `make test-nixl`, with the real library.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from types import SimpleNamespace
from typing import Any

_numbers = itertools.count(1)
_registered: dict[str, list[tuple[int, int]]] = {}
"""By agent: (address, bytes) of what may be read."""
opened: list[str] = []
"""Names of all agents that were ever made."""


class NixlFakeError(Exception):
    pass


class FakeAgent:
    """Reads when it is looked at, so that a read is under way until then; never when it is `stuck`."""

    stuck = False

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self._known: dict[str, str] = {}
        self._under_way: dict[int, tuple[Any, Any, str]] = {}
        _registered[name] = []
        opened.append(name)

    def get_reg_descs(self, listed: list[tuple[int, int, int, str]], kind: str) -> list[tuple[int, int]]:
        assert kind in ("DRAM", "VRAM")
        return [(address, length) for address, length, _, _ in listed]

    def register_memory(self, described: list[tuple[int, int]]) -> None:
        _registered[self.name].extend(described)

    def deregister_memory(self, described: list[tuple[int, int]]) -> None:
        for one in described:
            _registered[self.name].remove(one)

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, next(_numbers)]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        try:
            name, _ = json.loads(metadata)
        except ValueError as error:
            raise NixlFakeError("NIXL_ERR_MISMATCH") from error
        self._known[name] = name
        return str(name).encode()

    def remove_remote_agent(self, name: str) -> None:
        del self._known[name]

    def get_xfer_descs(self, listed: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int]]:
        assert kind in ("DRAM", "VRAM")
        return [(address, length) for address, length, _ in listed]

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> int:
        assert operation == "READ"
        assert peer in self._known
        number = next(_numbers)
        self._under_way[number] = here[0], there[0], peer
        return number

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        if FakeAgent.stuck:
            return "PROC"
        (into, length), (at, _), peer = self._under_way[handle]
        if not any(low <= at and at + length <= low + size for low, size in _registered[peer]):
            return "ERR"
        ctypes.memmove(into, at, length)
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        del self._under_way[handle]


api = SimpleNamespace(nixl_agent=FakeAgent, nixl_agent_config=lambda backends: backends)

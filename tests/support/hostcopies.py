"""Asking the process of a host copy, for tests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def ask(path: Path, question: dict[str, Any] | bytes, patience: float) -> dict[str, Any]:
    """Its answer; one that is still starting is waited for."""

    def once() -> dict[str, Any] | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(patience)
            try:
                sock.connect(str(path))
            except OSError:
                return None
            sock.sendall((question if isinstance(question, bytes) else json.dumps(question).encode()) + b"\n")
            with sock.makefile("rb") as lines:
                said: dict[str, Any] = json.loads(lines.readline())
                return said

    answer = until(once, lambda said: said is not None, patience)
    assert answer is not None
    return answer


def until(look: Callable[[], T], good: Callable[[T], bool], patience: float = 30.0) -> T:
    """The first good look. Fails after `patience` seconds."""
    over = time.monotonic() + patience
    while True:
        seen = look()
        if good(seen):
            return seen
        assert time.monotonic() < over, f"still {seen}"
        time.sleep(0.02)

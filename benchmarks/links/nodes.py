"""The nodes as a benchmark speaks to them, and what one idle link gives."""

from __future__ import annotations

import json
import os
import selectors
import signal
import statistics
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from network import inside

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[1] / ".venv" / "bin" / "python"
DEADLINE = 120.0
"""Seconds within which a node has to answer anything."""
BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:5.0f} s] {text}", flush=True)


@dataclass
class Process:
    """One node's process, spoken to by lines of JSON."""

    name: str
    space: str
    address: str
    process: subprocess.Popen[str] = field(init=False)

    def start(self) -> None:
        command = [str(PYTHON), str(HERE / "node.py")]
        self.process = subprocess.Popen(
            inside(self.space, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            start_new_session=True,
        )  # fmt: skip

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(DEADLINE):
                raise SystemExit(f"{self.name} did not answer within {DEADLINE:.0f} s")
        answer = dict(json.loads(self.process.stdout.readline() or '{"error": "ended"}'))
        if "error" in answer:
            raise SystemExit(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.hear()

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def goodput(a: Process, b: Process, body: int) -> float:
    """Bytes per second of one idle link: median of three."""
    rates = []
    for _ in range(3):
        port = a.ask(do="raw-serve", bind=a.address, bytes=body)["port"]
        rates.append(body / b.ask(do="raw-read", host=a.address, port=port, bytes=body)["seconds"])
    return statistics.median(rates)

"""One node of the fan-out: a source, or a receiver that passes on what it has. Told what to do line by line in JSON.

{"do": "source", "name", "bind", "bytes", "pace"}    -> {"address", "key", "generation"}
{"do": "prepare", "name", "bind", "bytes"}           -> {"address", "key"}: an empty segment, and a relay of it
{"do": "receive", "holders": [...], "planned"}       -> {"seconds", "holders", "lost"}
{"do": "raw-serve", "bind", "bytes"}                 -> {"port"}
{"do": "raw-read", "host", "port", "bytes"}          -> {"seconds"}
"""

from __future__ import annotations

import json
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx

from relight.core.clock import SystemClock
from relight.core.errors import TransferError
from relight.core.fingerprint import Fingerprint
from relight.transfer import grants
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.pace import Pace
from relight.transfer.request import Cancel, Holder, Kept, Options, Progress, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports.tcp import TcpListener, TcpReader
from relight.transfer.verify import blocks_of

TENSOR = 4 << 20
LAYOUT = {"engine": "benchmark"}
CLOCK = SystemClock()
DEADLINE = 20.0


def table(length: int, view: memoryview | None = None) -> tuple[TensorEntry, ...]:
    """The body's tensors, with digests when there is something to hash."""
    return tuple(
        TensorEntry(
            f"t{at // TENSOR}", "uint8", (size := min(TENSOR, length - at),), (1,), at, size, (),
            blocks_of(view[at : at + size]) if view is not None else b"",
        )
        for at in range(0, length, TENSOR)
    )  # fmt: skip


class Node:
    """What one process holds."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._listener: TcpListener | None = None
        self._relay: Source | None = None
        self._kept = Kept()

    def source(self, told: dict[str, Any]) -> dict[str, Any]:
        length = told["bytes"]
        segment = self._segment or Segment("source", length)
        if self._segment is None:
            segment.populate(0, segment.bytes)
            block = random.Random(7).randbytes(TENSOR)
            for at in range(0, length, TENSOR):
                segment.view[at : at + TENSOR] = block[: length - at]
                segment.view[at : at + 8] = at.to_bytes(8, "little")
            self._segment = segment
            self._manifest = WeightManifest(
                Fingerprint(LAYOUT, {"revision": "r1"}, {}), 0, segment.bytes, table(length, segment.view)
            )
        return self._serve(told, Source(told["name"], segment, self._manifest, CLOCK, Pace(told["pace"], CLOCK)))

    def _serve(self, told: dict[str, Any], source: Source) -> dict[str, Any]:
        source.open(1, key := grants.new_key())
        if self._listener is not None:
            self._listener.release()
        self._listener = TcpListener(told["bind"])
        return {"address": self._listener.register(source), "key": key}

    def prepare(self, told: dict[str, Any]) -> dict[str, Any]:
        length = told["bytes"]
        if self._segment is None:
            self._segment = Segment("target", length)
        self._segment.drop()
        self._segment.populate(0, self._segment.bytes)
        self._kept = Kept(paged=True)
        self._wanted = Wanted(LAYOUT, {t.name: t for t in table(length)}, "r1")
        self._relay = Source(told["name"], self._segment, None, CLOCK, Pace(told["pace"], CLOCK))
        return self._serve(told, self._relay)

    def receive(self, told: dict[str, Any]) -> dict[str, Any]:
        def holder(h: dict[str, Any]) -> Holder:
            def connect() -> TcpReader:
                return TcpReader(h["address"], h["grant"], h["name"], DEADLINE)

            return Holder(h["name"], connect, h["partial"], tuple(h["queue"]), h.get("connections", 1))

        assert self._segment is not None
        begun = time.perf_counter()
        got = refill(
            self._segment, self._wanted, [holder(h) for h in told["holders"]], streams=1, clock=CLOCK,
            options=Options(
                planned_seconds=told["planned"], relay=self._relay, kept=self._kept, parts=told.get("parts", 0),
                turn=told.get("turn", 0.0),
            ),
        )  # fmt: skip
        return {"seconds": time.perf_counter() - begun, "holders": dict(got.holders), "lost": dict(got.lost)}

    def read(self, told: dict[str, Any]) -> dict[str, Any]:
        stop = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: stop.set())

        def connect() -> TcpReader:
            return TcpReader(told["address"], told["grant"], told["name"], DEADLINE)

        reader = connect()
        manifest = reader.describe()
        reader.close()
        wanted = Wanted(
            manifest.fingerprint.layout, {t.name: t for t in manifest.tensors}, manifest.fingerprint.content["revision"]
        )
        if self._segment is None or self._segment.bytes != manifest.segment_bytes:
            self._segment = Segment("read", manifest.segment_bytes)
        total, latest, cancel = 0, 0, Cancel()

        def placed(progress: Progress) -> None:
            nonlocal latest
            latest = progress.bytes
            if stop.is_set():
                cancel.set()

        while not stop.is_set():
            latest = 0
            with suppress(TransferError):
                refill(
                    self._segment, wanted, [Holder(told["name"], connect)], streams=1, clock=CLOCK,
                    options=Options(cancel=cancel, on_progress=placed),
                )  # fmt: skip
            total += latest
        return {"bytes": total}

    def healthy(self, told: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": httpx.get(f"{told['url']}/health", timeout=2.0, trust_env=False).status_code == 200}
        except httpx.HTTPError:
            return {"ok": False}

    def stream(self, told: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": "serving", "prompt": "Once upon a time there was", "max_tokens": told["tokens"], "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{told['url']}/v1/completions", json=body, timeout=DEADLINE * 3) as answer:
            lines = answer.raise_for_status().iter_lines()
            times = [time.perf_counter() for line in lines if line.startswith("data: {")]
        return {"gaps": [b - a for a, b in pairwise(times)]}

    def raw_serve(self, told: dict[str, Any]) -> dict[str, Any]:
        listener = socket.create_server((told["bind"], 0))
        body = memoryview(bytes(1 << 20))

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, listener:
                for at in range(0, told["bytes"], len(body)):
                    sock.sendall(body[: told["bytes"] - at])

        threading.Thread(target=serve, daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def raw_read(self, told: dict[str, Any]) -> dict[str, Any]:
        into, got = memoryview(bytearray(1 << 20)), 0
        begun = time.perf_counter()
        with socket.create_connection((told["host"], told["port"])) as sock:
            while got < told["bytes"]:
                got += sock.recv_into(into)
        return {"seconds": time.perf_counter() - begun}


def main() -> None:
    node = Node()
    does = {
        "source": node.source, "prepare": node.prepare, "receive": node.receive, "read": node.read,
        "healthy": node.healthy, "stream": node.stream, "raw-serve": node.raw_serve, "raw-read": node.raw_read,
    }  # fmt: skip
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = does[told["do"]](told)
        except Exception as error:  # noqa: BLE001 - the benchmark has to hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

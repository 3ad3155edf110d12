"""Both ends of `make test-nixl`, each a process of the engine environment: told what to do by lines of JSON.

python ends.py source|receiver UCX_TLS
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from relight.core.clock import SystemClock
from relight.core.errors import ModelDirty, RelightError
from relight.core.fingerprint import Fingerprint
from relight.transfer import grants
from relight.transfer.manifest import Canary, TensorEntry, WeightManifest
from relight.transfer.request import Holder, Options, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports import wire
from relight.transfer.transports.base import Question
from relight.transfer.transports.nixl import Landing, NixlListener, NixlReader
from relight.transfer.transports.nixl_agent import Agent
from relight.transfer.transports.tcp import TcpListener, TcpReader
from relight.transfer.verify import blocks_of

BODY = 96 << 20
HERE = "127.0.0.1"
CARD = "lo"
LAYOUT = {"engine": "test"}
DEADLINE = 2.0
AFTERWARDS = 1.0
"""Seconds in which a source that goes on would still send what it was asked for."""


def say(**words: Any) -> None:
    print("@" + json.dumps(words), flush=True)


def described(segment: Segment) -> WeightManifest:
    half = BODY // 2
    entries = tuple(
        TensorEntry(f"t{n}", "uint8", (half,), (1,), n * half, half, (), blocks_of(segment.view[n * half :][:half]))
        for n in range(2)
    )
    return WeightManifest(
        Fingerprint(LAYOUT, {"revision": "r1"}, {}), 0, segment.bytes, entries, {}, Canary((1,), (2,), (-0.1,))
    )


class SourceEnd:
    """A source over nixl and tcp, with a body that all sources share."""

    def __init__(self, transports: str) -> None:
        self._segment = Segment("nixl-test-source", BODY)
        self._fill()
        self._source = Source("i-source", self._segment, described(self._segment), SystemClock())
        self._agent = Agent(CARD, transports)
        self._generation = 0

    def _fill(self) -> None:
        self._segment.populate(0, BODY)
        piece = random.Random(7).randbytes(1 << 20)
        for at in range(0, BODY, 1 << 20):
            self._segment.view[at : at + (1 << 20)] = piece[at >> 20 :] + piece[: at >> 20]

    def wake(self) -> dict[str, Any]:
        self._fill()
        self._generation += 1
        self._source.open(self._generation, key := grants.new_key())
        self._listeners = NixlListener(self._agent, HERE), TcpListener(HERE)
        nixl, tcp = (listener.register(self._source) for listener in self._listeners)
        claims = grants.Claims("i-source", self._generation, self._source.manifest_digest, "i-receiver",
                               time.time() + 300)  # fmt: skip
        return {"nixl": nixl, "tcp": tcp, "grant": grants.mint(key, claims), "pid": os.getpid()}

    def sleep(self) -> dict[str, Any]:
        cut = self._source.close(1.0)
        for listener in self._listeners:
            listener.release()
        self._segment.drop()
        return {"cut": cut, "resident": self._segment.resident_bytes()}


class ReceiverEnd:
    """Refills one segment, over and over, through one agent."""

    def __init__(self, transports: str) -> None:
        self._segment = Segment("nixl-test-target", BODY)
        self._agent = Agent(CARD, transports)
        self._landing = Landing(self._agent, self._segment)
        self._readers: list[NixlReader] = []
        self._table: dict[str, TensorEntry] = {}

    def _connect(self, source: dict[str, Any]) -> NixlReader:
        reader = NixlReader(source["nixl"], source["grant"], "i-source", DEADLINE, self._landing)
        self._readers.append(reader)
        return reader

    def refill(self, source: dict[str, Any], reserve: dict[str, Any] | None = None, kill: bool = False) -> dict:
        """A whole refill; with `kill` the source dies after the first chunks, and `reserve` is there over tcp."""
        self._segment.drop()
        self._readers.clear()
        if not self._table:
            with closing(TcpReader(source["tcp"], source["grant"], "i-source", DEADLINE)) as reader:
                self._table = {t.name: t for t in reader.describe().tensors}
        holders = [Holder("i-source by nixl", lambda: self._connect(source))]
        if reserve:
            holders.append(
                Holder(
                    "i-other by tcp", lambda: TcpReader(reserve["tcp"], reserve["grant"], "i-other", DEADLINE),
                    reserve=True,
                )
            )  # fmt: skip
        killed = threading.Event()

        def progress(_: object) -> None:
            if kill and not killed.is_set():
                killed.set()
                os.kill(source["pid"], signal.SIGKILL)

        begun = time.monotonic()
        try:
            got = refill(
                self._segment, Wanted(LAYOUT, self._table, "r1"), holders, streams=1,
                clock=SystemClock(), options=Options(on_progress=progress),
            )  # fmt: skip
        except RelightError as error:
            return {"why": str(error), "dirty": isinstance(error, ModelDirty)}
        same = all(
            blocks_of(self._segment.view[t.offset : t.offset + t.bytes]) == t.blocks for t in self._table.values()
        )
        return {
            "bytes": got.bytes, "same": same, "holders": dict(got.holders), "lost": dict(got.lost),
            "completed": sum(r.completed for r in self._readers), "seconds": round(time.monotonic() - begun, 3),
        }  # fmt: skip

    def stopped(self, source: dict[str, Any]) -> dict[str, Any]:
        """The source is stopped between its permission and its answer, and goes on after its reader has given up."""
        self._segment.drop()
        self._segment.populate(0, BODY)
        reader = self._connect(source)
        reader.ask(Question(0, 1, 0, 32 << 20), self._segment.view[: 32 << 20])
        select.select([reader.sock], [], [], DEADLINE)
        os.kill(source["pid"], signal.SIGSTOP)
        begun = time.monotonic()
        try:
            reader.fill(32 << 20)
            why = ""
        except RelightError as error:
            why = str(error)
        noticed = time.monotonic() - begun
        reader.close()
        closed = time.monotonic() - begun
        self._segment.view[:BODY] = bytes(BODY)
        os.kill(source["pid"], signal.SIGCONT)
        time.sleep(AFTERWARDS)
        return {"why": why, "noticed": round(noticed, 3), "closed": round(closed, 3),
                "untouched": bytes(self._segment.view[:BODY]) == bytes(BODY)}  # fmt: skip

    def begin(self, source: dict[str, Any]) -> dict[str, Any]:
        """Reads until it is killed."""
        self._segment.populate(0, BODY)
        reader = self._connect(source)

        def read() -> None:
            while True:
                reader.ask(Question(0, 1, 0, 32 << 20), self._segment.view[: 32 << 20])
                reader.fill(32 << 20)

        threading.Thread(target=read, daemon=True).start()
        while reader.completed < 8 << 20:
            time.sleep(0.001)
        return {"reading": True}

    def hostile(self, metadata: str) -> dict[str, Any]:
        """What a source is told that sends `metadata` (hexadecimal) as its own."""
        listener = socket.create_server((HERE, 0))

        def serve() -> None:
            with listener, listener.accept()[0] as sock:
                wire.receive_frame(sock)
                sock.sendall(wire.OK)
                region = {"agent": "relight-x", "address": 1 << 40, "bytes": BODY, "device": -1}
                wire.send_frame(sock, json.dumps(region).encode())
                wire.send_frame(sock, bytes.fromhex(metadata))

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"nixl:{HERE}:{listener.getsockname()[1]}"
        try:
            NixlReader(address, "grant", "i-hostile", DEADLINE, self._landing)
            why = ""
        except RelightError as error:
            why = f"{type(error).__name__}: {error}"
        thread.join()
        return {"why": why}


def main() -> None:
    ends: dict[str, Callable[[str], Any]] = {"source": SourceEnd, "receiver": ReceiverEnd}
    end = ends[sys.argv[1]](sys.argv[2])
    say(ready=True)
    for line in sys.stdin:
        name, words = json.loads(line)
        say(**getattr(end, name)(**words))
    # NIXL's libraries do not survive the interpreter's own end everywhere.
    os._exit(0)


if __name__ == "__main__":
    main()

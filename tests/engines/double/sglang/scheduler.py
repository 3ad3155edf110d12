"""The scheduler: it holds memory, runs requests on it, and takes the whole server down with it when it fails."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .memory import Region, checkpoint

if TYPE_CHECKING:
    from .launch_server import Oddities

ALL_TAGS = ("kv_cache", "weights", "cuda_graph")
KV_BYTES, GRAPH_BYTES = 8 << 20, 32 << 20


@dataclass(eq=False)
class Request:
    """One request; `out` grows by (id, log-probability)."""

    rid: str
    prompt: Sequence[int]
    count: int
    out: list[tuple[int, float]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class Scheduler:
    """Runs one step of all requests after the other, on one event loop with its tokenizer."""

    def __init__(self, arguments: argparse.Namespace, odd: Oddities, note: Path) -> None:
        self.odd, self._note = odd, note
        self.enabled = arguments.enable_memory_saver and not odd.no_saver
        weights = checkpoint(arguments.model_path)
        graphs = os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true")
        self.graphs_saved = graphs and not arguments.disable_cuda_graph
        self.regions = {
            "weights": Region(len(weights), backup=arguments.enable_weights_cpu_backup),
            "kv_cache": Region(KV_BYTES, backup=False),
            # Copied to host memory in truth, which is no memory of the device; here both would be the same.
            "cuda_graph": Region(GRAPH_BYTES, backup=False),
        }
        self.regions["weights"].write(weights)
        self.weight_bytes = len(weights)
        self.offload_tags: set[str] = set()
        self.engine_paused = False
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.answered = 0
        self.spoke = time.time()
        self._number: int | None = None

    def die(self, why: str) -> NoReturn:
        """As a failed child does it: SIGQUIT to the parent, which kills the whole tree."""
        print(f"Scheduler hit an exception: {why}", flush=True)
        self._note.with_suffix(".died").write_text(why)
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(why)

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort_all(self) -> None:
        """Those that run and those that wait, all of which are told."""
        for request in [*self.running, *self.waiting]:
            request.aborted = True
            request.ended.set()
        self.running, self.waiting = [], []

    async def loop(self) -> None:
        """Speaks all the time unless it is held or hangs: that is how others see that it goes on."""
        while True:
            hangs = self.odd.hang_after is not None and self.answered >= self.odd.hang_after and self.running
            if not self.engine_paused and not hangs:
                self._step()
                self.spoke = time.time()
            await asyncio.sleep(self.odd.token_seconds or 0.005)

    def _step(self) -> None:
        self.running += self.waiting
        self.waiting = []
        hang = self.odd.hang_after
        if not self.running or (hang is not None and self.answered >= hang):
            return
        gone = [tag for tag in ("weights", "kv_cache") if not self.regions[tag].mapped]
        if gone:
            self.die(f"CUDA error: an illegal memory access was encountered (a batch ran, {gone} are released)")
        self._number = self._number or self.regions["weights"].number()
        for request in list(self.running):
            made = zlib.crc32(f"{self._number}|{list(request.prompt)}|{len(request.out)}".encode())
            request.out.append((3 + made % 248, -(made % 1000) / 1000))
            if len(request.out) >= request.count:
                self.running.remove(request)
                self.answered += 1
                request.ended.set()

    # ------------------------------------------------------------------ control

    def pause(self, mode: str) -> None:
        """`retract` puts what runs back into the queue; neither lets anything begin."""
        if mode not in ("in_place", "retract"):
            self.die(f"AssertionError: mode {mode}")
        self.engine_paused = True
        if mode == "retract":
            for request in self.running:
                request.out.clear()
            self.waiting, self.running = [*self.running, *self.waiting], []

    def release(self, tags: Sequence[str]) -> None:
        idle = not self.running and (self.engine_paused or not self.waiting)
        if not idle:
            self.die("AssertionError: release_memory_occupation should be called only when server is idle.")
        for tag in tags or ALL_TAGS:
            again = tag in self.offload_tags
            self.offload_tags.add(tag)
            if not self.enabled or (tag == "cuda_graph" and not self.graphs_saved):
                continue
            if again:
                self.die(f"CUDA error: an illegal memory access was encountered ({tag} was released twice)")
            self.regions[tag].pause()
        self._number = None

    def resume(self, tags: Sequence[str]) -> None:
        """Raises KeyError for a tag that is not released; the caller dies of it."""
        for tag in tags or ALL_TAGS:
            self.offload_tags.remove(tag)
        for tag in tags or ALL_TAGS:
            if not self.regions[tag].mapped:
                self.regions[tag].resume(flipped=tag == "weights" and self.odd.backup_flips)

    def load(self, directory: str) -> str:
        """The reason why nothing was loaded; empty when it was."""
        if not self.regions["weights"].mapped:
            self.die("CUDA error: an illegal memory access was encountered (weights were loaded into released memory)")
        try:
            content = checkpoint(directory)
        except OSError as error:
            return f"Failed to get weights iterator: {error}."
        if len(content) != self.weight_bytes:
            return "Failed to update weights: shapes differ.\nRolling back to original weights."
        self.regions["weights"].write(content)
        self._number = None
        return ""

    def digests(self) -> dict[str, str]:
        if not self.regions["weights"].mapped:
            self.die("CUDA error: an illegal memory access was encountered (checksums of released weights)")
        return self.regions["weights"].digests()

    def bytes(self, tag: str) -> int:
        """As the engine states it: what it allocated at its start, released or not."""
        return {"weights": self.weight_bytes, "kv_cache": KV_BYTES, "cuda_graph": GRAPH_BYTES}[tag]

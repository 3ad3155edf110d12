"""The worker class `RelightCPUWorker`: vLLM's CPU worker whose sleep frees memory and whose wake is proven.

Weights lie in a segment from load on; the KV cache's pages are given back at sleep. The agent reaches the worker
past vLLM's own loop, on a control socket, so that a refill neither waits for nor blocks the engine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import replace

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from relight.core.clock import SystemClock
from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.logs import configure, get_logger
from relight.core.records import Mode
from relight.plugin import settings as environment
from relight.plugin.control import ControlServer
from relight.plugin.counting import Counter, Counting
from relight.plugin.operations import Operations
from relight.plugin.orders import ModelMemory
from relight.plugin.pages import HostPages
from relight.plugin.residency import Residency
from relight.plugin.stages import Stages
from relight.plugin.vllm import describing, handlers, warmup
from relight.plugin.vllm.completing import Completing
from relight.plugin.vllm.loader import reload_in_place
from relight.plugin.vllm.packing import pack
from relight.plugin.vllm.weights import Weights
from relight.transfer.manifest import WeightManifest

SWITCH_SECONDS = 5e-4
"""How long a decoding engine may keep the interpreter from a thread that serves a reader: a tenth of the usual time,
since a reader needs it dozens of times."""

log = get_logger("plugin.vllm.worker")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MADV_DONTNEED = 4


def _pages(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, length) of the whole pages inside a tensor's storage; the edges belong to the allocator."""
    storage = tensor.untyped_storage()
    start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    low, high = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    return low, max(high - low, 0)


class RelightCPUWorker(Completing, Counting, CPUWorker):  # type: ignore[misc]
    """See the module; `--worker-cls relight.plugin.vllm.worker.RelightCPUWorker`."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        configure("engine")
        sys.setswitchinterval(SWITCH_SECONDS)
        self._relight_stages = Stages(SystemClock())
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._relight_settings = environment.read(os.environ)
        filled = not self._relight_settings.awaits
        self._relight_weights = Weights(
            self.get_model(), self._relight_settings.instance, filled=filled, digest=self._relight_settings.digests
        )
        # Packed where they now lie: a handler keeps the address that it was made with.
        self._relight_packing = pack(self.get_model(), filled=filled)
        self._relight_layout = describing.layout(self, self._relight_packing.name, "cpu")
        self._relight_stages.end("model", "built" if not filled else "built and loaded")
        if not filled:
            self._listen()
            self._relight.fill(self._relight_settings.start_seconds)
            self._relight_stages.end("", "")

    def determine_available_memory(self) -> int:
        if self._relight_settings.mode is Mode.LAZY:
            self._relight_rest = warmup.least(self.model_runner)
        available = super().determine_available_memory()
        self._relight_stages.end("compile", "compiled code is loaded or made, and run once")
        return int(available)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        if self._relight_settings.awaits:
            self._relight.settle()
        else:
            self._listen()
        own, weights = self._relight_settings, self._relight_weights
        log.info("worker.ready", instance=own.instance, rank=self.rank, weight_bytes=weights.segment.bytes)
        self._relight_stages.end("kv", "KV cache and what else comes after the model")
        self._relight_counter = Counter()
        return times

    def _listen(self) -> None:
        own, weights, clock = self._relight_settings, self._relight_weights, SystemClock()
        memory = ModelMemory(
            HostPages(own.instance, weights.segment, self._drop_derived, clock), weights.table, self._relight_layout,
            self._describe, self._reload, weights.restore_scalars, handlers.rebuild,
        )  # fmt: skip
        cards = own.cards_of(self.rank, self.parallel_config.world_size)
        self._relight = Residency(replace(own, cards=cards), self.rank, memory, clock)
        operations = Operations(
            self._relight, self._relight_stages, self._relight_layout, self._resident, self.relight_shapes,
            weight_bytes=sum(entry.bytes for entry in weights.table.values()),
        )  # fmt: skip
        self._relight_control = ControlServer(own.control_socket(self.rank), operations.table())

    # ------------------------------------------------------------------ called by vLLM, in its own loop

    def sleep(self, level: int = 1) -> None:
        self._relight.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        # Raising keeps vLLM's scheduler paused: an engine without proven weights cannot be made to answer.
        self._relight.resume()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self._drop_cache()

    # ------------------------------------------------------------------ what the residency is given

    def _describe(self, revision: str) -> WeightManifest:
        prints = Fingerprint(self._relight_layout, {"revision": revision}, self._runtime())
        return self._relight_weights.describe(prints)

    def _reload(self, path: str) -> None:
        with torch.inference_mode(False), set_current_vllm_config(self.vllm_config):
            reload_in_place(self.get_model(), self._relight_packing, self.vllm_config, path)
        self._relight_weights.restore_unsaved()

    def _caches(self) -> list[torch.Tensor]:
        unique = {t.untyped_storage().data_ptr(): t for t in self.model_runner.kv_caches}
        return list(unique.values())

    def _drop_cache(self) -> None:
        for tensor in self._caches():
            address, length = _pages(tensor)
            if length and _libc.madvise(address, length, _MADV_DONTNEED) != 0:
                raise LocalFault(f"giving the KV cache back: {os.strerror(ctypes.get_errno())}")

    def _drop_derived(self) -> None:
        handlers.drop()
        self._drop_cache()

    def _resident(self) -> tuple[int, int]:
        # A segment whose pages no process maps is counted by nobody's proportional set size.
        return self._relight_weights.segment.resident_bytes(), self._cache_resident()

    def _cache_resident(self) -> int:
        total = 0
        for tensor in self._caches():
            address, length = _pages(tensor)
            marks = ctypes.create_string_buffer(length // mmap.PAGESIZE)
            if length and _libc.mincore(address, length, marks) == 0:
                total += marks.raw.count(1) * mmap.PAGESIZE
        return total

    def _runtime(self) -> dict[str, str]:
        return describing.runtime(self, sum(t.untyped_storage().nbytes() for t in self._caches()))

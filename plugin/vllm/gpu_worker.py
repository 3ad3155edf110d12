"""The worker class `RelightGPUWorker`: vLLM's GPU worker, which captures most of its graphs after a lazy start.

Weights are still vLLM's own affair here: it loads them itself in every mode.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from vllm.compilation.counter import compilation_counter
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from relight.core.clock import SystemClock
from relight.core.errors import Conflict, LocalFault
from relight.core.logs import configure, get_logger
from relight.core.records import Mode
from relight.plugin import settings as environment
from relight.plugin.counting import Counter, Counting
from relight.plugin.vllm import describing
from relight.plugin.vllm.completing import Completing
from relight.plugin.vllm.graphs.lazy import LazyGraphs, left_for_cache, obstacle
from relight.plugin.vllm.graphs.v1 import V1Graphs
from relight.plugin.vllm.graphs.v2 import V2Graphs

log = get_logger("plugin.vllm.gpu_worker")
MEMORY = frozenset({"weights", "kv_cache"})
"""What a forward pass, and so a capture, needs to be there."""


class RelightGPUWorker(Completing, Counting, Worker):  # type: ignore[misc]
    """See the module; `--worker-cls relight.plugin.vllm.gpu_worker.RelightGPUWorker`."""

    _relight_graphs: LazyGraphs | None = None
    _relight_missing: frozenset[str] = frozenset()
    _relight_cache_bytes = 0

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        configure("engine")
        self._relight_settings = environment.read(os.environ)
        super().load_model(load_dummy_weights=load_dummy_weights)

    def determine_available_memory(self) -> int:
        available = int(super().determine_available_memory())
        if self._relight_settings.mode is Mode.LAZY:
            available = left_for_cache(available, int(getattr(self, "cudagraph_memory_estimate", 0)))
        self._relight_cache_bytes = available
        return available

    def compile_or_warm_up_model(self) -> CompilationTimes:
        # Not sooner: the estimate of memory is made from the whole set, and the cache's runner makes the set anew.
        graphs = self._relight_graphs = self._relight_lazily()
        with nullcontext() if graphs is None else graphs.starting():
            times = super().compile_or_warm_up_model()
        self._relight_rest = () if graphs is None else graphs.pieces
        self._relight_counter = Counter()
        return times

    def _relight_lazily(self) -> LazyGraphs | None:
        if self._relight_settings.mode is not Mode.LAZY or self.model_config.enforce_eager:
            return None
        reason = obstacle(self.vllm_config, self.use_v2_model_runner)
        try:
            if reason:
                raise LocalFault(reason)
            runner = (V2Graphs if self.use_v2_model_runner else V1Graphs)(self.model_runner)
        except LocalFault as fault:
            log.warning("graphs.all-at-start", reason=str(fault))
            return None
        graphs = LazyGraphs(runner, dict(self._relight_settings.sizes), SystemClock())
        return graphs if graphs.plan.first else None

    def relight_complete(self) -> int:
        if self._relight_rest and self._relight_missing:
            raise Conflict("asleep: graphs are captured with weights and cache in place")
        return super().relight_complete()

    def relight_describe(self) -> dict[str, Any]:
        """Called by `collective_rpc`: the fingerprint's parts, and bytes of weights and cache, awake or not."""
        bytes_ = self._relight_cache_bytes
        return {
            "layout": describing.layout(self, "none", torch.cuda.get_device_name(self.device)),
            "runtime": describing.runtime(self, bytes_),
            "weight_bytes": describing.weight_bytes(self.get_model()),
            "kv_bytes": bytes_,
        }

    def relight_graphs(self) -> dict[str, Any]:
        """Called by `collective_rpc`: how far the capturing is, and how many captures this process has done at all."""
        status = None if self._relight_graphs is None else asdict(self._relight_graphs.status)
        return {"captures": compilation_counter.num_cudagraph_captured, "lazy": status}

    # ------------------------------------------------------------------ called by vLLM, in its own loop

    def sleep(self, level: int = 1) -> None:
        self._relight_missing = MEMORY
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        self._relight_missing -= MEMORY if tags is None else frozenset(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        self._relight_missing |= MEMORY & frozenset(tags)
        super().discard(tags)

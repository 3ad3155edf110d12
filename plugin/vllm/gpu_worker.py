"""The worker class `RelightGPUWorker`: vLLM's GPU worker whose weights others read, and which wakes by reading theirs.

vLLM loads weights itself, in every mode, and its sleep mode's allocator keeps them. What a sleep has taken away a
refill brings back (allocator.py, residency.py), on a thread of the agent's control socket: vLLM's loop only learns that
it may wake. After a lazy start most graphs are captured late (graphs/).
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict, replace
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
from relight.plugin.control import ControlServer
from relight.plugin.counting import Counter, Counting
from relight.plugin.operations import Operations
from relight.plugin.residency import Residence, Residency
from relight.plugin.stages import Stages
from relight.plugin.vllm import describing
from relight.plugin.vllm.allocator import CACHE, WEIGHTS, Calls
from relight.plugin.vllm.completing import Completing
from relight.plugin.vllm.gpu_memory import GpuMemory
from relight.plugin.vllm.graphs.lazy import LazyGraphs, left_for_cache, obstacle
from relight.plugin.vllm.graphs.v1 import V1Graphs
from relight.plugin.vllm.graphs.v2 import V2Graphs

log = get_logger("plugin.vllm.gpu_worker")
MEMORY = frozenset({WEIGHTS, CACHE})
"""What a forward pass, and so a capture, needs to be there."""


class RelightGPUWorker(Completing, Counting, Worker):  # type: ignore[misc]
    """See the module; `--worker-cls relight.plugin.vllm.gpu_worker.RelightGPUWorker`."""

    _relight_graphs: LazyGraphs | None = None
    _relight_missing: frozenset[str] = frozenset()
    _relight_cache_bytes = 0

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        configure("engine")
        self._relight_settings = environment.read(os.environ)
        self._relight_stages = Stages(SystemClock())
        # Before vLLM works on the weights: it may write into the configuration that they were made by.
        name = torch.cuda.get_device_name(self.device)
        self.relight_layout = describing.layout(self, "none", name) | {"kernels": describing.kernels(self.vllm_config)}
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._relight_memory = GpuMemory(self, self._relight_settings.digests)
        self._relight_stages.end("model", "built and loaded")

    def determine_available_memory(self) -> int:
        available = int(super().determine_available_memory())
        if self._relight_settings.mode is Mode.LAZY:
            available = left_for_cache(available, int(getattr(self, "cudagraph_memory_estimate", 0)))
        self._relight_cache_bytes = available
        self._relight_stages.end("compile", "compiled code is loaded or made, and run once")
        return available

    def compile_or_warm_up_model(self) -> CompilationTimes:
        # Not sooner: the estimate of memory is made from the whole set, and the cache's runner makes the set anew.
        graphs = self._relight_graphs = self._relight_lazily()
        with nullcontext() if graphs is None else graphs.starting():
            times = super().compile_or_warm_up_model()
        self._relight_rest = () if graphs is None else graphs.pieces
        self._relight_stages.end("kv", "KV cache, graphs and what else comes after the model")
        self._relight_listen()
        self._relight_counter = Counter()
        return times

    def _relight_listen(self) -> None:
        own, clock, memory = self._relight_settings, SystemClock(), self._relight_memory
        calls = Calls(super().sleep, lambda: super(RelightGPUWorker, self).wake_up([WEIGHTS]), self._relight_enter)
        given = memory.settle(calls, own.instance, clock, self._relight_cache_bytes)
        cards = own.cards_of(self.rank, self.parallel_config.world_size)
        # vLLM has loaded its weights, whatever the mode of the start was.
        self._relight = Residency(replace(own, cards=cards, mode=Mode.COLD), self.rank, given, clock)
        operations = Operations(
            self._relight, self._relight_stages, self.relight_layout, memory.resident, self.relight_shapes,
            weight_bytes=memory.weight_bytes, unfit=memory.unfit, direct=memory.reach(cards),
        )  # fmt: skip
        self._relight_control = ControlServer(own.control_socket(self.rank), operations.table())
        self._relight_stages.end("describe", "digests of every tensor, by way of the host")
        log.info("worker.ready", instance=own.instance, rank=self.rank, tensors=len(memory.table), unfit=memory.unfit)

    def _relight_enter(self) -> None:
        torch.accelerator.set_device_index(self.device)
        torch.accelerator.synchronize()

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

    def relight_graphs(self) -> dict[str, Any]:
        """Called by `collective_rpc`: how far the capturing is, and how many captures this process has done at all."""
        status = None if self._relight_graphs is None else asdict(self._relight_graphs.status)
        return {"captures": compilation_counter.num_cudagraph_captured, "lazy": status}

    # ------------------------------------------------------------------ called by vLLM, in its own loop

    def sleep(self, level: int = 1) -> None:
        try:
            self._relight.sleep(level)
        finally:
            if self._relight.state is not Residence.AWAKE:
                self._relight_missing = MEMORY

    def wake_up(self, tags: list[str] | None = None) -> None:
        # Raising keeps vLLM's scheduler paused: an engine without proven weights cannot be made to answer.
        self._relight.may_resume()
        super().wake_up(tags)
        self._relight_missing -= MEMORY if tags is None else frozenset(tags)
        if not self._relight_missing:
            self._relight.resume()

    def discard(self, tags: tuple[str, ...]) -> None:
        if WEIGHTS in tags:
            raise Conflict("weights are given back by a sleep alone")
        self._relight_missing |= MEMORY & frozenset(tags)
        super().discard(tags)

"""Graphs of a lazy start: the first set at start, the rest in pieces between steps, all ranks in step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import torch
from vllm import envs
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.worker import workspace

from relight.core.clock import Clock
from relight.core.errors import Conflict, LocalFault
from relight.core.logs import get_logger
from relight.plugin.vllm.completing import Piece
from relight.plugin.vllm.graphs.order import Graph, Plan, plan

log = get_logger("plugin.vllm.graphs")


class Runner(Protocol):
    """What differs between vLLM's two runners (v1.py, v2.py)."""

    def full(self) -> Collection[Graph]: ...
    def busy(self) -> bool: ...
    def use(self, ready: Collection[Graph]) -> None: ...
    def starting(self, first: Collection[Graph]) -> AbstractContextManager[None]: ...
    def capture(self, graphs: Collection[Graph]) -> None: ...
    def forget(self, graphs: Collection[Graph]) -> None: ...


class Verdict(IntEnum):
    """What became of a piece; the worst one of all ranks holds for each."""

    DONE = 0
    FAILED = 1
    MOVED = 2


Agree = Callable[[Verdict], Verdict]


def worst_of_ranks(verdict: Verdict) -> Verdict:
    """A step must run by the same graph on all ranks: padded differently, they would wait for each other forever."""
    world = get_world_group()
    if world.world_size == 1:
        return verdict
    told = torch.tensor([verdict], dtype=torch.int32)
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX, group=world.cpu_group)
    return Verdict(int(told))


@dataclass(frozen=True, slots=True)
class Status:
    """How far the capturing is."""

    captured: int
    left: int
    first: int


class LazyGraphs:
    """The graphs of one rank from start to the full set."""

    def __init__(
        self, runner: Runner, histogram: Mapping[int, float], clock: Clock, agree: Agree = worst_of_ranks
    ) -> None:
        self._runner, self._clock, self._agree = runner, clock, agree
        self.plan: Plan = plan(runner.full(), histogram)
        self._ready: frozenset[Graph] = frozenset()
        self._void = ""

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around vLLM's own warm-up, which captures the first set."""
        first = frozenset(self.plan.first)
        self._runner.use(first)
        with self._runner.starting(first):
            yield
        self._ready = first
        log.info("graphs.first", captured=len(first), left=self.status.left)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(partial(self._capture, piece) for piece in self.plan.pieces)

    @property
    def status(self) -> Status:
        return Status(len(self._ready), len(self.plan.graphs - self._ready), len(self.plan.first))

    def _capture(self, piece: tuple[Graph, ...]) -> None:
        if self._void:
            raise LocalFault(self._void)
        if self._runner.busy():
            raise Conflict("a step is under way: graphs are captured between steps")
        begun, verdict, reason = self._clock.monotonic(), Verdict.DONE, ""
        wrapped, scratch = _wrapped(), _scratch()
        # A kernel may want a lasting buffer of its own for a size that it has not seen; the common one must stay.
        workspace.unlock_workspace()
        try:
            with _no_garbage():
                self._runner.capture(piece)
        except Exception as error:  # noqa: BLE001 - other ranks have to be told before anything is raised
            verdict, reason = Verdict.FAILED, f"{type(error).__name__}: {error}"
        finally:
            workspace.lock_workspace()
        if any(new != old for new, old in zip(_scratch(), scratch, strict=True) if old):
            verdict = Verdict.MOVED
        worst = self._agree(verdict)
        if worst is Verdict.DONE:
            self._ready |= set(piece)
            self._runner.use(self._ready)
            seconds = round(self._clock.monotonic() - begun, 3)
            log.info("graphs.captured", captured=len(self._ready), left=self.status.left, seconds=seconds)
            return
        self._runner.forget(piece)
        _forget_since(wrapped)
        if worst is Verdict.MOVED:
            # Every graph so far writes where that memory was. They are kept, and none is run again.
            self._ready = frozenset()
            self._void = "the engine's scratch memory moved: it runs without graphs until it is started again"
            self._runner.use(self._ready)
            raise LocalFault(self._void)
        # What each rank runs is still the same: the set before this piece.
        raise LocalFault(f"graphs were not captured: {reason or 'another rank failed'}")


def _wrapped() -> dict[Any, set[Any]]:
    """What vLLM's wrappers around compiled code have captured so far."""
    return {wrapper: set(wrapper.concrete_cudagraph_entries) for wrapper in CUDAGraphWrapper._all_instances}


def _forget_since(before: dict[Any, set[Any]]) -> None:
    # A wrapper replays whatever it has; half a piece must be captured again.
    for wrapper in list(CUDAGraphWrapper._all_instances):
        entries = wrapper.concrete_cudagraph_entries
        for key in set(entries) - before.get(wrapper, set()):
            del entries[key]


def _scratch() -> list[tuple[int, int] | None]:
    memory = workspace.current_workspace_manager()._current_workspaces
    return [None if t is None else (t.data_ptr(), t.nbytes) for t in memory]


@contextmanager
def _no_garbage() -> Iterator[None]:
    """A kernel's module that is collected in the middle of a capture spoils it.

    vLLM's own guard would unfreeze the heap that vLLM froze after its start.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def obstacle(vllm_config: Any, v2: bool) -> str:
    """Why this engine captures everything at its start; empty where it may capture late.

    In each of these a late capture would touch what requests use, or need what only the start has.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    reasons = {
        "LoRA: capturing puts adapters of its own where requests have theirs": vllm_config.lora_config is not None,
        "speculative decoding: a drafter captures with its model": vllm_config.speculative_config is not None,
        "data parallel: engines of other ranks would have to capture at the same moment": (
            parallel.data_parallel_size > 1
        ),
        "pipeline parallel: a stage's inputs lie where a capture reads": parallel.pipeline_parallel_size > 1,
        "microbatches": bool(parallel.use_ubatching),
        "a KV connector: it takes the capture's layers for a request's": vllm_config.kv_transfer_config is not None,
        "a startup plan: vllm would save what the first graphs took as what all take": bool(
            envs.VLLM_ENABLE_STARTUP_PLAN
        ),
        "breakable graphs": bool(is_breakable_cudagraph_enabled()),
        "recurrent state: the V1 runner captures on the state of requests": (
            not v2 and bool(model.is_hybrid or model.is_attention_free)
        ),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def left_for_cache(available: int, estimate: int) -> int:
    """What the KV cache may take: vLLM's estimate for the whole set is kept free for what is captured later.

    vLLM subtracts it unless it was told not to. Then a normal start finds out at once that memory is short; a lazy one
    would find out while it serves.
    """
    return available if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else available - estimate

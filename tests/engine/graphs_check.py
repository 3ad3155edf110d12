"""Run by test_graphs.py in the engine environment: prints what it found about late captures, as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from graphs_engine import CAPTURING, HISTOGRAM, Engine, join, join_alone, no_gpu
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_worker import Worker

from relight.core.errors import RelightError
from relight.core.records import Mode

ROOM = 1 << 36
MODES = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def lazily(runner: str, mode: str) -> dict[str, Any]:
    """Normal and lazy, step by step."""
    normal = Engine(runner, CUDAGraphMode[mode], Mode.NORMAL, HISTOGRAM)
    normal.start()
    whole, steps, count = normal.graphs(), normal.steps(), compilation_counter.num_cudagraph_captured
    engine = Engine(runner, CUDAGraphMode[mode], Mode.LAZY, HISTOGRAM)
    engine.start()
    first, lefts, by_none, late = engine.graphs(), [engine.worker.relight_graphs()["lazy"]["left"]], [], []
    at_start = list(CAPTURING.trace)
    worst_padding = 0.0
    while True:
        ran = engine.steps()
        by_none.append(sum(mode == "NONE" for _, _, mode, _ in ran))
        own = {(tokens, decode): size for tokens, decode, _, size in steps}
        worst_padding = max([worst_padding, *(s / t for t, d, _, s in ran if s != own[t, d])])
        if not lefts[-1]:
            break
        before = len(CAPTURING.trace)
        pieces = engine.worker.relight_complete()
        late.append(len(CAPTURING.trace) - before)
        lefts.append(engine.worker.relight_graphs()["lazy"]["left"])
        assert workspace.current_workspace_manager().is_locked()
    return {
        "equal": engine.graphs() == whole, "steps_equal": engine.steps() == steps, "whole": len(whole),
        "first": len(first), "at_start": at_start, "lefts": lefts, "by_none": by_none, "late": late,
        "padding": worst_padding, "trace": CAPTURING.trace, "count": compilation_counter.num_cudagraph_captured,
        "normal_count": count, "pieces_left": pieces, "again": engine.worker.relight_complete(),
    }  # fmt: skip


def faults(runner: str) -> dict[str, Any]:
    """A piece that fails is as if it had not been; scratch memory that moves voids all graphs; asleep is refused."""
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    normal = Engine(runner, mode, Mode.NORMAL, {})
    normal.start()
    whole = normal.graphs()
    engine = Engine(runner, mode, Mode.LAZY, HISTOGRAM)
    engine.start()
    first = engine.graphs(), engine.steps()
    CAPTURING.fail_at = len(CAPTURING.trace) + 2
    said = [_refusal(engine)]
    kept = (engine.graphs(), engine.steps()) == first
    engine.worker._relight_missing = frozenset({"kv_cache"})
    said.append(_refusal(engine))
    engine.worker._relight_missing = frozenset()
    engine.runner.execute_model_state = object()
    said.append(_refusal(engine))
    engine.runner.execute_model_state = None
    while engine.worker.relight_complete():
        pass
    recovered = engine.graphs() == whole
    engine = Engine(runner, mode, Mode.LAZY, HISTOGRAM)
    engine.start()
    CAPTURING.grow_at = len(CAPTURING.trace) + 1
    said += [_refusal(engine), _refusal(engine)]
    CAPTURING.grow_at = -1
    void = {ran for _, _, ran, _ in engine.steps()}
    return {"said": said, "kept": kept, "recovered": recovered, "void": sorted(void)}


def _refusal(engine: Engine) -> str:
    try:
        engine.worker.relight_complete()
    except RelightError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def obstacles() -> dict[str, int]:
    """Graphs captured at start by engines that cannot capture late, and by one that can."""
    found = {}
    for name in ("", "strange", "lora_config", "kv_transfer_config"):
        engine = Engine("v2", CUDAGraphMode.FULL_AND_PIECEWISE, Mode.LAZY, {})
        if name == "strange":
            candidates = engine.runner.cudagraph_manager._candidates
            candidates.update({key: chosen[::-1] for key, chosen in candidates.items()})
        elif name:
            # Seen while the worker decides alone: the rest of vLLM would want a whole configuration of that kind.
            object.__setattr__(engine.config, name, object())
        lazy = engine.worker._relight_lazily()
        if name.endswith("_config"):
            object.__setattr__(engine.config, name, None)
        engine.worker._relight_lazily = lambda lazy=lazy: lazy
        engine.start()
        found[name] = len(engine.graphs())
    return found


def estimate() -> dict[str, Any]:
    """The worker's memory for the KV cache, where vLLM subtracts its estimate and where it was told not to.

    vLLM's memory profile of a model is left out; its estimate of the graphs, V1's, is made.
    """
    mode, found = CUDAGraphMode.FULL_AND_PIECEWISE, {}
    for start in (Mode.NORMAL, Mode.LAZY):
        for applied in ("1", "0"):
            engine = Engine("v1", mode, start, HISTOGRAM)
            engine.runner._init_minimal_kv_cache_for_profiling = lambda: None
            engine.runner._cleanup_profiling_kv_cache = lambda: None
            profiled = partialmethod(_profiled, applied == "1")
            environ = patch.dict(os.environ, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=applied)
            with environ, patch.object(Worker, "determine_available_memory", profiled):
                found[f"{start}/{applied}"] = ROOM - engine.worker.determine_available_memory()
    return found


def _profiled(worker: Any, applied: bool) -> int:
    worker.cudagraph_memory_estimate = worker.model_runner.profile_cudagraph_memory()
    return ROOM - worker.cudagraph_memory_estimate * applied


def rank(number: int, rendezvous: str) -> dict[str, Any]:
    """One of two ranks, in a process of its own. The second one's memory is short once."""
    join(number, 2, rendezvous)
    found: dict[str, Any] = {}
    for runner in ("v1", "v2"):
        engine = Engine(runner, CUDAGraphMode.FULL_AND_PIECEWISE, Mode.LAZY, HISTOGRAM)
        if runner == "v1" and number:
            # Ranks may hold their keys in any order.
            keys = engine.runner.cudagraph_dispatcher.cudagraph_keys
            for mode, descs in list(keys.items()):
                backwards = sorted(descs, key=str, reverse=True)
                keys[mode] = set(backwards)
        engine.start()
        said, steps, left = [], [engine.steps()], 1
        CAPTURING.fail_at = len(CAPTURING.trace) + 6 if number else -1
        done = [list(CAPTURING.trace)]
        while left and len(said) < 3:
            before = len(CAPTURING.trace)
            try:
                left = engine.worker.relight_complete()
                done.append(CAPTURING.trace[before:])
            except RelightError as error:
                said.append(str(error))
            steps.append(engine.steps())
        found[runner] = {"said": said, "steps": steps, "done": done, "graphs": engine.graphs()}
    return found


def ranks() -> list[Any]:
    """Both ranks, forked before anything has begun a thread."""
    directory = Path(tempfile.mkdtemp())
    children = []
    for number in range(2):
        child = os.fork()
        if not child:
            try:
                with no_gpu():
                    (directory / f"{number}").write_text(json.dumps(rank(number, str(directory / "meet"))))
            except BaseException:  # noqa: BLE001 - a fork of the tests' process must end here, whatever happens
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, "a rank ended early"
    return [json.loads((directory / f"{number}").read_text()) for number in range(2)]


def main() -> None:
    both = ranks()
    with no_gpu():
        join_alone()
        found = {
            "lazily": {f"{runner}/{mode}": lazily(runner, mode) for runner in ("v1", "v2") for mode in MODES},
            "faults": {runner: faults(runner) for runner in ("v1", "v2")},
            "obstacles": obstacles(), "estimate": estimate(), "ranks": both,
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()

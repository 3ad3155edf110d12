"""The graphs of vLLM's V1 runner: the keys of its CudagraphDispatcher say what is captured and what steps may run.

A step whose key is missing runs without a graph. It is not padded to a larger one: the padded sizes are worked out once
and serve all modes at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import graph_capture

from relight.plugin.vllm.graphs.order import Graph

MODES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
"""In the order in which vLLM captures them."""


def graph_of(mode: Any, desc: Any) -> Graph:
    fields = (desc.num_tokens, desc.num_reqs, desc.uniform, desc.has_lora, desc.num_active_loras)
    return Graph(mode.name, desc.num_tokens, desc.uniform, "/".join(f"{int(field or 0):05d}" for field in fields))


class V1Graphs:
    """One engine's dispatcher."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._dispatcher = runner, runner.cudagraph_dispatcher
        keys = self._dispatcher.cudagraph_keys
        self._of = {graph_of(mode, desc): (mode, desc) for mode in MODES for desc in keys[mode]}

    def full(self) -> Collection[Graph]:
        return self._of.keys()

    def busy(self) -> bool:
        """Whether a step has run whose tokens are not sampled yet."""
        return self._runner.execute_model_state is not None

    def use(self, ready: Collection[Graph]) -> None:
        """Steps run by these graphs or by none."""
        self._dispatcher.cudagraph_keys = {
            mode: {desc for graph in ready for its, desc in [self._of[graph]] if its == mode} for mode in MODES
        }

    @contextmanager
    def starting(self, first: Collection[Graph]) -> Iterator[None]:
        """vLLM captures what it would dispatch."""
        self.use(first)
        yield

    def capture(self, graphs: Collection[Graph]) -> None:
        """As the runner's capture_model does it."""
        runner, keys = self._runner, self._dispatcher.cudagraph_keys
        before = {mode: set(keys[mode]) for mode in MODES}
        try:
            set_cudagraph_capturing_enabled(True)
            with set_current_vllm_config(runner.vllm_config), graph_capture(device=runner.device):
                for mode in MODES:
                    for uniform in (False, True):
                        some = [g for g in graphs if g.mode == mode.name and g.decode is uniform]
                        some.sort(key=lambda g: (-g.tokens, g.name))
                        descs = [self._of[g][1] for g in some]
                        # A capture is a step that is dispatched to a graph not yet there.
                        keys[mode].update(descs)
                        runner._capture_cudagraphs(batch_descriptors=descs, cudagraph_runtime_mode=mode)
        finally:
            set_cudagraph_capturing_enabled(False)
            self._dispatcher.cudagraph_keys = before

    def forget(self, graphs: Collection[Graph]) -> None:
        """The dispatcher knows of a graph by `use` alone."""

"""The graphs of vLLM's V2 runner, kept by its CudaGraphManager.

`_capture_descs` says what `capture` captures, `_candidates` what `dispatch` may choose; a descriptor that is chosen and
was not captured is an assertion in the middle of a step. Both are instance attributes, and both are set here alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode

from relight.core.errors import LocalFault
from relight.plugin.vllm.graphs.order import Graph, stands_in

MODES = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
"""In the order in which vLLM tries them for a step."""
Candidates = dict[tuple[int, int], list[Any]]


def candidates(
    descs: Mapping[Any, Sequence[Any]], loras: Sequence[int], allowed: Callable[[tuple[int, int], Any], bool]
) -> Candidates:
    """What a step of so many tokens may run, as CudaGraphManager._init_candidates puts it together."""
    found: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
    for mode in MODES:
        ascending = tuple(reversed(descs.get(mode, ())))
        for lora in loras:
            low = 0
            for tokens, group in groupby((d for d in ascending if d.num_active_loras == lora), lambda d: d.num_tokens):
                matching = list(group)
                for step in range(low, tokens + 1):
                    found[step, lora] += [d for d in matching if allowed((step, lora), d)]
                low = tokens + 1
    return {key: chosen for key, chosen in found.items() if chosen}


def graph_of(mode: Any, desc: Any) -> Graph:
    decode = desc.uniform_token_count is not None or desc.max_query_len is not None
    name = "/".join(
        f"{field or 0:05d}"
        for field in (
            desc.num_tokens, desc.num_reqs, desc.uniform_token_count, desc.max_query_len, desc.num_active_loras,
            desc.num_ubatches,
        )
    )  # fmt: skip
    return Graph(mode.name, desc.num_tokens, decode, name)


class V2Graphs:
    """One engine's manager. Raises LocalFault where it does not dispatch as this module knows it."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._manager = runner, runner.cudagraph_manager
        self._descs = {mode: list(descs) for mode, descs in self._manager._capture_descs.items()}
        self._whole: Candidates = self._manager._candidates
        self._of = {graph_of(mode, d): (mode, d) for mode, descs in self._descs.items() for d in descs}
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        if candidates(self._descs, self._manager.lora_capture_cases, lambda *_: True) != self._whole:
            raise LocalFault("this vllm chooses graphs otherwise than Relight knows")

    def full(self) -> Collection[Graph]:
        return self._of.keys()

    def busy(self) -> bool:
        """Whether a step has run whose tokens are not sampled yet: its output lies where a capture writes."""
        return self._runner.execute_model_state is not None

    def use(self, ready: Collection[Graph]) -> None:
        """Steps run by these graphs alone, the next larger one where their own is missing, or by none."""
        if len(ready) == len(self._of):
            self._manager._candidates = self._whole
            return
        descs = {mode: [d for d in every if graph_of(mode, d) in ready] for mode, every in self._descs.items()}

        def allowed(step: tuple[int, int], desc: Any) -> bool:
            return desc in self._whole.get(step, ()) or stands_in(desc.num_tokens, step[0])

        self._manager._candidates = candidates(descs, self._manager.lora_capture_cases, allowed)

    @contextmanager
    def starting(self, first: Collection[Graph]) -> Iterator[None]:
        """vLLM's own start captures these alone, and what it captures with is noted for the rest."""
        capture = self._manager.capture

        def noting(*arguments: Any, **options: Any) -> Any:
            self._arguments = (arguments, options)
            return capture(*arguments, **options)

        self._manager.capture = noting
        try:
            with self._captures(first):
                yield
        finally:
            del self._manager.capture

    def capture(self, graphs: Collection[Graph]) -> None:
        """Not by the runner's capture_model: that would capture an encoder and a drafter once more."""
        if self._arguments is None:
            raise LocalFault("vllm captured nothing when it started")
        arguments, options = self._arguments
        with self._captures(graphs), set_current_vllm_config(self._runner.vllm_config):
            self._manager.capture(*arguments, **options)

    def forget(self, graphs: Collection[Graph]) -> None:
        for graph in graphs:
            self._manager.graphs.pop(self._of[graph][1], None)

    @contextmanager
    def _captures(self, graphs: Collection[Graph]) -> Iterator[None]:
        # Afterwards the whole set again: vLLM itself captures anew when it changes its parallelism.
        chosen: defaultdict[Any, list[Any]] = defaultdict(list)
        for mode, every in self._descs.items():
            chosen[mode] = [d for d in every if graph_of(mode, d) in graphs]
        self._manager._capture_descs = {mode: descs for mode, descs in chosen.items() if descs}
        try:
            yield
        finally:
            self._manager._capture_descs = {mode: list(descs) for mode, descs in self._descs.items()}

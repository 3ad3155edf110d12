"""One rank's weights on its GPU, from their load on: described where they lie, or why that cannot be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.device_allocator import get_mem_allocator_instance

from relight.core.clock import Clock
from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.logs import get_logger
from relight.plugin.orders import ModelMemory
from relight.plugin.pages import HostPages
from relight.plugin.settings import Card
from relight.plugin.vllm import describing
from relight.plugin.vllm.allocator import CACHE, WEIGHTS, Allocator, AllocatorPages, Calls
from relight.plugin.vllm.device_weights import DeviceWeights
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.segment import Segment
from relight.transfer.transports.cuda import Cuda
from relight.transfer.transports.registered import reaches
from relight.transfer.transports.verbs import Device
from relight.transfer.verify import Digest

TRIED_BYTES = 2 << 20
"""Of the device's memory, registered with a card to see whether that works."""
DRAFT = "draft."
"""What the names of a draft model's tensors begin with."""
log = get_logger("plugin.vllm.gpu_memory")


def obstacle(vllm_config: Any) -> str:
    """Why weights of such an engine can neither be given back nor read; empty when they can."""
    model, parallel, offload = vllm_config.model_config, vllm_config.parallel_config, vllm_config.offload_config
    reasons = {
        "its adapters lie in the memory that a sleep takes away": vllm_config.lora_config is not None,
        "its experts change places as it runs (EPLB)": bool(parallel.enable_eplb),
        "some of its weights are kept in the host's memory": bool(
            offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size
        ),
        "its sleep mode is not vllm's own allocator's": (
            not model.enable_sleep_mode or model.sleep_mode_backend != "cumem"
        ),
        "its communicators are suspended too, and come back with the first memory that does": bool(
            model.enable_nccl_comm_suspend
        ),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


class GpuMemory:
    """Made when a worker's model is loaded; `settle` when it has run once and takes its first requests."""

    def __init__(self, worker: Any, digest: Digest) -> None:
        self._worker, self._digest = worker, digest
        self.unfit = obstacle(worker.vllm_config)
        self._weights: DeviceWeights | None = None
        self._allocator: Allocator | None = None
        self._pages: AllocatorPages | None = None
        self._cache_bytes = 0
        if not self.unfit:
            self._attempt(self._find)

    def _attempt(self, step: Callable[[], None]) -> None:
        """An engine whose weights cannot be described serves as it would without: nobody reads it, and it does not
        sleep."""
        try:
            step()
        except Exception as error:  # of whatever a model's code or the driver raises: requests go on
            self.unfit = f"its weights cannot be described: {type(error).__name__}: {error}"
            log.exception("memory.unfit", reason=self.unfit)

    def _find(self) -> None:
        worker = self._worker
        models: dict[str, nn.Module] = {"": worker.get_model()}
        if (draft := worker.get_draft_model()) is not None:
            models[DRAFT] = draft
        self._allocator = Allocator(get_mem_allocator_instance())
        # Copies here wait for nothing that torch has begun.
        torch.accelerator.synchronize()
        weights = self._weights = DeviceWeights(models, Cuda(worker.device.index), worker.device.type, self._digest)
        self.unfit = weights.unfit

    def settle(self, calls: Calls, instance: str, clock: Clock, cache_bytes: int) -> ModelMemory:
        """The memory as a residency takes it, now that the engine has run; `cache_bytes` are its KV cache's."""
        self._cache_bytes, self._calls = cache_bytes, calls
        weights, allocator = self._weights, self._allocator
        if not self.unfit and weights is not None and allocator is not None:
            calls.enter()
            self._attempt(lambda: weights.settle(allocator.ranges(WEIGHTS)))
        layout = self._worker.relight_layout
        if self.unfit or weights is None or allocator is None:
            nothing = HostPages(instance, Segment(instance, 1, digest=self._digest), lambda: None, clock)
            return ModelMemory(nothing, {}, layout, self._describe, _nothing, _nothing, lambda: None, self.unfit)
        pages = self._pages = AllocatorPages(instance, weights, allocator, calls, clock)
        return ModelMemory(
            pages, weights.table, layout, self._describe, self._reload, weights.restore_scalars, lambda: None
        )

    def _describe(self, revision: str) -> WeightManifest:
        runtime = describing.runtime(self._worker, self._cache_bytes)
        prints = Fingerprint(self._worker.relight_layout, {"revision": revision}, runtime)
        if self.unfit or self._weights is None:
            return WeightManifest(prints, 0, 1, (), digests=self._digest)
        self._calls.enter()
        return self._weights.describe(prints)

    def _reload(self, path: str) -> None:
        """By vLLM itself, which processes what it reads as it did at its start."""
        weights, pages = self._weights, self._pages
        if weights is None or pages is None:
            raise LocalFault(self.unfit)
        self._calls.enter()
        # Another rung may have begun to bring other content.
        pages.restore()
        with torch.no_grad(), set_current_vllm_config(self._worker.vllm_config):
            self._worker.model_runner.reload_weights(weights_path=path)
        weights.restore_places()
        torch.accelerator.synchronize()

    # ------------------------------------------------------------------ looks

    @property
    def table(self) -> Mapping[str, TensorEntry]:
        """What is described."""
        return self._weights.table if self._weights is not None and not self.unfit else {}

    @property
    def weight_bytes(self) -> int:
        """Of all weights, awake or not."""
        described = sum(entry.bytes for entry in self.table.values())
        return described or describing.weight_bytes(self._worker.get_model())

    def resident(self) -> tuple[int, int]:
        """Bytes of weights and KV cache that are on the device now."""
        if self.unfit or self._allocator is None:
            return self.weight_bytes, self._cache_bytes
        return self._allocator.resident(WEIGHTS), self._allocator.resident(CACHE)

    def reach(self, cards: Sequence[Card]) -> dict[str, str]:
        """By card, the way by which it reaches this memory; or, behind `no: `, why it does not. Tried, and undone."""
        if self.unfit or self._weights is None:
            return {}
        found = {}
        for card in cards:
            try:
                device = Device(card.name)
                try:
                    segment = self._weights.segment
                    some = replace(segment.extents[0], bytes=min(segment.extents[0].bytes, TRIED_BYTES))
                    found[card.name] = reaches(device, segment.cuda, some)
                finally:
                    device.close()
            except LocalFault as fault:
                found[card.name] = f"no: {fault}"
        return found


def _nothing(_: object) -> None:
    """There is nothing that could be filled."""
